import math

import pytest
import torch
from points import batch_of, built, prepare, tokens_of

from titan_dit.config.section import UserError
from titan_dit.diffusion.sections import RectifiedFlowConfig
from titan_dit.objectives.base import Prepared
from titan_dit.rng import SampleRNG


def times(count=20_000, **settings):
    return built(RectifiedFlowConfig(**settings)).times(SampleRNG(0, torch.arange(count))).double()


def loss_of(prediction, targets):
    return built(RectifiedFlowConfig()).loss({"prediction": prediction}, targets)


def kolmogorov(values, cdf):
    """sqrt(n) times the largest CDF distance; 1.95 has p = 0.001."""
    values = values.sort().values
    steps = (torch.arange(len(values), dtype=torch.float64) + 0.5) / len(values)
    return math.sqrt(len(values)) * (cdf(values) - steps).abs().max().item()


def test_inputs_lie_on_the_straight_path_and_the_target_is_its_velocity():
    numbers = torch.arange(50, 58)
    rng, clean = SampleRNG(3, numbers), tokens_of(numbers)
    prepared = prepare(RectifiedFlowConfig(), numbers, seed=3)
    noise = rng.normal("noise", (6, 4))
    t = prepared.inputs["timestep"][:, None, None] / 1000
    expected = (1 - t) * clean + t * noise
    torch.testing.assert_close(prepared.inputs["tokens"], expected, rtol=0, atol=1e-6)
    assert torch.equal(prepared.targets["velocity"], noise - clean)


def test_following_the_velocity_from_any_time_leads_to_the_data():
    numbers = torch.arange(8)
    prepared = prepare(RectifiedFlowConfig(), numbers)
    t = prepared.inputs["timestep"][:, None, None] / 1000
    data = prepared.inputs["tokens"] - t * prepared.targets["velocity"]
    torch.testing.assert_close(data, tokens_of(numbers), rtol=0, atol=1e-5)


def test_uniform_times_are_uniform():
    assert kolmogorov(times(timesteps="uniform"), lambda t: t) < 1.95


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (-0.6, 0.8), (1, 2)])
def test_logit_normal_times_have_a_normal_logit(mean, std):
    t = times(logit_mean=mean, logit_std=std)
    assert t.median().item() == pytest.approx(1 / (1 + math.exp(-mean)), abs=0.01)

    def cdf(t):
        return 0.5 * (1 + torch.erf((t.logit() - mean) / std / math.sqrt(2)))

    assert kolmogorov(t, cdf) < 1.95


@pytest.mark.parametrize("scale", [-1.0, 0.0, 1.29, 1.75])
def test_mode_sampling_is_the_formula_of_the_paper_on_the_uniform_draw(scale):
    u = times(timesteps="uniform")
    t = times(timesteps="mode", mode_scale=scale)
    expected = 1 - u - scale * (torch.cos(torch.pi / 2 * u).square() - 1 + u)
    torch.testing.assert_close(t, expected, rtol=1e-5, atol=1e-6)
    # A rank-preserving map of (0, 1) onto itself, with its mode in the middle.
    assert t[u.argsort()].diff().max() <= 1e-6
    assert (t >= 0).all()
    assert (t <= 1).all()
    middle = ((t - 0.5).abs() < 0.1).double().mean().item()
    assert (middle > 0.22, middle < 0.18) == (scale > 1, scale < 0)


@pytest.mark.parametrize(
    ("how", "tokens", "expected"),
    [
        ("off", 4096, 1.0),
        ("sqrt", 256, 1.0),
        ("sqrt", 1024, 2.0),
        ("sqrt", 4096, 4.0),
        ("exponential", 256, math.exp(0.5)),
        ("exponential", 4096, math.exp(1.15)),
        ("exponential", 2176, math.exp(0.825)),
    ],
)
def test_the_shift_grows_with_the_tokens(how, tokens, expected):
    config = RectifiedFlowConfig(shift_by_tokens=how)
    assert config.shift_of(tokens) == pytest.approx(expected)
    assert RectifiedFlowConfig(shift_by_tokens=how, shift=3.0).shift_of(tokens) == pytest.approx(
        3 * expected
    )


def test_times_are_shifted_by_the_tokens_after_patching():
    objective = built(RectifiedFlowConfig(timesteps="uniform", shift_by_tokens="sqrt"))
    tokens = objective.model.token_shape[0]
    assert objective.shift == pytest.approx(math.sqrt(tokens / 256))
    u, t = times(timesteps="uniform"), times(timesteps="uniform", shift_by_tokens="sqrt")
    expected = objective.shift * u / (1 + (objective.shift - 1) * u)
    torch.testing.assert_close(t, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("timesteps", ["uniform", "logit_normal"])
@pytest.mark.parametrize("shift", [0.5, 3.0])
def test_shift_maps_every_time_by_its_formula(timesteps, shift):
    plain, shifted = times(timesteps=timesteps), times(timesteps=timesteps, shift=shift)
    expected = shift * plain / (1 + (shift - 1) * plain)
    torch.testing.assert_close(shifted, expected, rtol=1e-5, atol=1e-7)
    assert ((shifted > plain) == (shift > 1)).all()


@pytest.mark.parametrize("timesteps", ["uniform", "logit_normal"])
def test_times_stay_inside_zero_and_one(timesteps):
    t = times(timesteps=timesteps, shift=3.0, count=200_000)
    assert t.min() > 0
    assert t.max() < 1


def test_the_network_is_told_the_time_in_steps_of_the_original():
    numbers = torch.arange(1000)
    timestep = prepare(RectifiedFlowConfig(), numbers).inputs["timestep"]
    assert torch.equal(timestep, 1000 * built(RectifiedFlowConfig()).times(SampleRNG(0, numbers)))
    assert timestep.dtype == torch.float32


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_labels_are_dropped_at_the_given_rate_whatever_the_label(share):
    numbers = torch.arange(21_000)
    labels = prepare(RectifiedFlowConfig(condition_dropout=share), numbers, tokens=1).inputs[
        "labels"
    ]
    dropped = labels == -1
    assert torch.equal(labels[~dropped], (numbers % 7)[~dropped])
    for label in range(7):
        rate = dropped[numbers % 7 == label].float().mean().item()
        assert abs(rate - share) < 4 * math.sqrt(share * (1 - share) / 3000)


@pytest.mark.parametrize("share", [0, 1])
def test_condition_dropout_of_zero_and_one_is_none_and_all(share):
    labels = prepare(RectifiedFlowConfig(condition_dropout=share), torch.arange(5000)).inputs[
        "labels"
    ]
    assert (labels == -1).float().mean() == share


@pytest.mark.parametrize("timesteps", ["uniform", "logit_normal"])
def test_time_noise_and_condition_dropout_are_independent(timesteps):
    numbers = torch.arange(20_000)
    objective = RectifiedFlowConfig(timesteps=timesteps, condition_dropout=0.5)
    prepared = prepare(objective, numbers, tokens=1, channels=1)
    noise = prepared.targets["velocity"] + tokens_of(numbers, tokens=1, channels=1)
    dropped = (prepared.inputs["labels"] == -1).float()
    t, noise = prepared.inputs["timestep"] - 500, noise.flatten()
    # Their magnitudes too: a normal shares its magnitude with the word it is drawn from.
    columns = torch.stack((t, t.abs(), noise, noise.abs(), dropped)).double()
    off_diagonal = torch.corrcoef(columns).tril(-1)
    off_diagonal[1, 0] = off_diagonal[3, 2] = 0
    assert off_diagonal.abs().max() < 4 / math.sqrt(20_000)


def test_a_sample_is_prepared_the_same_in_any_batch():
    numbers = torch.arange(100, 124)
    whole = prepare(RectifiedFlowConfig(condition_dropout=0.5), numbers)
    order = torch.arange(24).flip(0)
    for part in (order, order[:5], order[7:8], order[::3]):
        again = prepare(RectifiedFlowConfig(condition_dropout=0.5), numbers[part])
        for name, values in again.inputs.items():
            assert torch.equal(values, whole.inputs[name][part])
        assert torch.equal(again.targets["velocity"], whole.targets["velocity"][part])


def test_another_seed_draws_another_time_and_noise():
    numbers = torch.arange(8)
    a, b = (prepare(RectifiedFlowConfig(), numbers, seed=seed) for seed in (0, 1))
    assert not torch.isclose(a.inputs["timestep"], b.inputs["timestep"]).any()
    assert (a.targets["velocity"] - b.targets["velocity"]).abs().mean() > 0.5


def test_preparing_leaves_the_batch_alone():
    numbers = torch.arange(64)
    batch = batch_of(numbers)
    built(RectifiedFlowConfig(condition_dropout=1)).prepare(batch, SampleRNG(0, numbers))
    assert torch.equal(batch.fields["latent"], batch_of(numbers).fields["latent"])
    assert torch.equal(batch.fields["label"], numbers % 7)


def test_the_loss_is_the_mean_square_over_channels_one_for_each_token():
    numbers = torch.arange(8)
    prepared = prepare(RectifiedFlowConfig(), numbers)
    prediction = torch.randn(8, 6, 4)
    loss = loss_of(prediction, prepared.targets)
    expected = ((prediction.double() - prepared.targets["velocity"].double()) ** 2).sum(-1) / 4
    assert loss.shape == (8, 6)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-7)
    assert loss_of(prepared.targets["velocity"], prepared.targets).abs().max() == 0


def test_the_loss_of_a_bf16_prediction_is_taken_in_fp32():
    targets = {"velocity": torch.randn(2, 3, 4)}
    prediction = targets["velocity"].bfloat16()
    loss = loss_of(prediction, targets)
    assert loss.dtype == torch.float32
    # In bf16 the difference would be rounded away.
    expected = (prediction.float() - targets["velocity"]).square().mean(-1)
    assert torch.equal(loss, expected)
    assert loss.min() > 0


def test_the_loss_counts_the_tokens_of_all_ranks():
    assert prepare(RectifiedFlowConfig(), torch.arange(4), total_weight=32).total_tokens == 32 * 6


def test_the_network_predicts_as_many_channels_as_it_is_given():
    assert RectifiedFlowConfig().output_channels(4) == 4


@pytest.mark.parametrize("size", [None, 1, 2, 3, 4, 5, 7, 100])
def test_microbatches_cover_every_row_once_and_in_order(size):
    rows = 7
    whole = Prepared(
        inputs={"tokens": torch.randn(rows, 2, 3), "labels": torch.arange(rows)},
        static={"positions": torch.randn(2, 2)},
        targets={"velocity": torch.randn(rows, 2, 3)},
        weight=torch.rand(rows),
        total_tokens=28.0,
    )
    parts = list(whole.microbatches(size))
    assert all(len(part.weight) <= (size or rows) for part in parts)
    assert len(parts) == math.ceil(rows / (size or rows))
    for name in ("inputs", "targets"):
        for key, values in getattr(whole, name).items():
            assert torch.equal(torch.cat([getattr(part, name)[key] for part in parts]), values)
    assert torch.equal(torch.cat([part.weight for part in parts]), whole.weight)
    assert all(part.total_tokens == 28 for part in parts)
    assert all(part.static is whole.static for part in parts)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"condition_dropout": 1.5}, "condition_dropout=1.5 must be at most 1"),
        ({"shift": 0}, "shift=0.0 must be above 0"),
        ({"logit_std": -1.0}, "logit_std=-1.0 must be above 0"),
        ({"logit_mean": math.nan}, "logit_mean=nan must be"),
    ],
)
def test_impossible_settings_are_refused(settings, words):
    with pytest.raises(UserError) as caught:
        RectifiedFlowConfig(**settings)
    assert f"[objective] {words}" in str(caught.value)


RANGES = [(0.0, 0.875), (0.875, 1.0), (0.3, 0.4), (0.97, 1.0)]


@pytest.mark.parametrize("bounds", RANGES)
@pytest.mark.parametrize(
    "settings",
    [
        {"timesteps": "uniform"},
        {"timesteps": "logit_normal", "logit_mean": -0.4, "logit_std": 1.3},
        {"timesteps": "mode"},
        {"timesteps": "mode", "mode_scale": -0.5, "shift": 2.0},
        {"timesteps": "logit_normal", "shift": 3.0},
    ],
)
def test_a_range_cuts_the_distribution_and_keeps_its_shape(settings, bounds):
    first, last = bounds
    every = times(400_000, **settings)
    inside = every[(every >= first) & (every <= last)].sort().values
    cut = times(t_min=first, t_max=last, **settings)
    assert first - 1e-7 <= cut.min()
    assert cut.max() <= last + 1e-7
    # Two samples of one distribution.
    assert len(inside) > (2000 if first < 0.97 else 100)
    assert len(cut.unique()) > len(cut) / 3
    share = torch.searchsorted(inside, cut.sort().values).double() / len(inside)
    steps = (torch.arange(len(cut), dtype=torch.float64) + 0.5) / len(cut)
    scale = math.sqrt(len(cut) * len(inside) / (len(cut) + len(inside)))
    assert scale * (share - steps).abs().max() < 1.95


def test_an_expert_is_validated_on_its_own_times():
    expert = built(RectifiedFlowConfig(t_min=0.875))
    levels = [expert.noise_level(t) for t in expert.validation_timesteps(8).values()]
    assert levels == sorted(levels)
    assert 0.875 < levels[0] < 0.89
    assert 0.98 < levels[-1] < 1
    for direction in ("to_noise", "to_data"):
        narrow = built(RectifiedFlowConfig(t_min=0.999, direction=direction))
        timesteps = narrow.validation_timesteps(8)
        assert len(timesteps) == 8
        assert all(0.999 < narrow.noise_level(t) < 1 for t in timesteps.values())


@pytest.mark.parametrize(("first", "last"), [(0.99, 1.0), (0.998, 0.999), (0.0, 0.001)])
def test_tails_of_a_distribution_have_many_times(first, last):
    found = times(t_min=first, t_max=last)
    assert len(found.unique()) > len(found) / 5
    assert (found < 1).all()


def test_a_range_without_times_is_refused():
    with pytest.raises(UserError, match=r"less than 1e-30 .* between them\. Set a wider range"):
        built(RectifiedFlowConfig(t_min=0.9, t_max=0.95, logit_std=0.05))


def test_an_empty_range_of_times_is_refused():
    with pytest.raises(UserError, match=r"t_min=0.5 must be below t_max=0.5\. Set two"):
        RectifiedFlowConfig(t_min=0.5, t_max=0.5)


@pytest.mark.parametrize(
    ("kind", "weight"),
    [
        ("uniform", lambda t: torch.ones_like(t)),
        ("cosmap", lambda t: 2 / (math.pi - 2 * math.pi * t + 2 * math.pi * t**2)),
        ("sigma_sqrt", lambda t: t**-2.0),
    ],
)
def test_a_loss_is_weighted_by_its_time(kind, weight):
    numbers, config = torch.arange(6), RectifiedFlowConfig(loss_weight=kind)
    prepared = prepare(config, numbers)
    velocity = prepared.targets["velocity"]
    prediction = {"prediction": torch.zeros_like(velocity)}
    plain = built(RectifiedFlowConfig()).loss(prediction, {"velocity": velocity})
    found = built(config).loss(prediction, prepared.targets)
    t = prepared.inputs["timestep"] / 1000
    torch.testing.assert_close(found, plain * weight(t)[:, None], rtol=1e-5, atol=1e-6)


def test_the_weights_of_cosmap_have_mean_one():
    t = torch.linspace(0, 1, 100_001, dtype=torch.float64)
    objective = built(RectifiedFlowConfig(loss_weight="cosmap"))
    assert objective.loss_weight(t).mean().item() == pytest.approx(1, abs=1e-4)


def test_the_shift_of_flux2_depends_on_tokens_and_steps():
    pipeline = pytest.importorskip("diffusers.pipelines.flux2.pipeline_flux2_klein")
    config = RectifiedFlowConfig(shift_by_tokens="flux2")
    for tokens in (64, 1024, 4096, 4300, 4301, 9216):
        for steps in (4, 10, 28, 50, 200):
            expected = math.exp(pipeline.compute_empirical_mu(tokens, steps))
            assert config.shift_of(tokens, steps) == pytest.approx(expected)
        assert config.shift_of(tokens) == config.shift_of(tokens, 200)
