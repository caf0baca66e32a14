import pytest
import torch

from titan_dit.config.section import UserError
from titan_dit.config.training import SamplingConfig
from titan_dit.diffusion.drawing import (
    check,
    generate,
    name_of_sampler,
    sampler_of,
)
from titan_dit.diffusion.guidance import Guidance
from titan_dit.diffusion.previews import preview, preview_labels
from titan_dit.diffusion.row_conditions import spread_labels
from titan_dit.diffusion.samplers.discrete import ddim, ddpm
from titan_dit.diffusion.samplers.ode import euler, heun
from titan_dit.diffusion.sections import DDPMConfig, RectifiedFlowConfig
from titan_dit.models.dit_config import DiTConfig
from titan_dit.objectives.base import DataShare
from titan_dit.rng import SampleRNG

CONFIG = DiTConfig(
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    patch_size=2,
    latent_size=4,
    in_channels=2,
    num_classes=5,
)
STATIC = CONFIG.static(torch.device("cpu"))


def built(section):
    return section.build(CONFIG, section.example(CONFIG)[0])


def network():
    torch.manual_seed(0)
    model = CONFIG.build(2)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def draw(forward, labels, numbers, seed=0, sampler=heun, steps=4, cfg_scale=2.0):
    with torch.no_grad():
        return generate(
            forward,
            built(RectifiedFlowConfig()),
            {"labels": torch.tensor(labels)},
            torch.tensor(numbers),
            seed=seed,
            sampler=sampler,
            steps=steps,
            guidance=Guidance(cfg_scale),
        )


@pytest.mark.parametrize("sampler", [euler, heun])
@pytest.mark.parametrize("cfg_scale", [1.0, 2.0])
def test_a_perfect_network_gives_back_the_data(sampler, cfg_scale):
    data = torch.randn(3, 4, 8)
    noise = SampleRNG(0, torch.arange(3)).normal("sample", (4, 8))

    def forward(inputs, static):
        copies = len(inputs["tokens"]) // 3
        return (noise - data).repeat(copies, 1, 1)

    got = draw(forward, [0, 1, 2], [0, 1, 2], sampler=sampler, cfg_scale=cfg_scale)
    torch.testing.assert_close(got, data, rtol=0, atol=1e-5)


def test_the_network_is_asked_in_the_units_it_was_trained_in():
    asked = []

    def forward(inputs, static):
        assert torch.equal(static["positions"], STATIC["positions"])
        asked.append((inputs["timestep"][0].item(), inputs["labels"].tolist()))
        return torch.zeros_like(inputs["tokens"])

    draw(forward, [3, 4], [0, 1], sampler=euler, steps=4)
    assert [t for t, _ in asked] == [1000, 750, 500, 250]
    assert all(labels == [3, 4, -1, -1] for _, labels in asked)


@pytest.mark.parametrize("cfg_scale", [1.0, 3.0])
def test_a_sample_does_not_depend_on_the_batch_it_is_drawn_in(cfg_scale):
    model = network()
    labels, numbers = [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]
    whole = draw(model, labels, numbers, cfg_scale=cfg_scale)
    for part in ([2], [4, 0], [3, 2, 1]):
        got = draw(model, part, part, cfg_scale=cfg_scale)
        torch.testing.assert_close(got, whole[torch.tensor(part)], rtol=1e-5, atol=1e-5)


def test_number_seed_and_label_each_change_a_sample():
    model = network()
    sample = draw(model, [1], [0])
    assert torch.equal(draw(model, [1], [0]), sample)
    for other in (draw(model, [1], [1]), draw(model, [1], [0], seed=1), draw(model, [2], [0])):
        assert (other - sample).abs().max() > 1e-3


def test_bf16_predictions_are_guided_and_integrated_in_fp32():
    conditional, unconditional = torch.tensor([1 / 3, 1 / 7]).bfloat16()

    def forward(inputs, static):
        has_label = (inputs["labels"] >= 0)[:, None, None].expand_as(inputs["tokens"])
        return torch.where(has_label, conditional, unconditional)

    got = draw(forward, [0], [0], steps=64, cfg_scale=2.7)
    noise = SampleRNG(0, torch.tensor([0])).normal("sample", (4, 8))
    velocity = unconditional.float() + 2.7 * (conditional.float() - unconditional.float())
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, noise - velocity, rtol=0, atol=1e-5)


def guided_parts(cfg_channels):
    """Predictions with and without a label, and the guided one, by channel."""
    seen, torch_rng = [], torch.Generator().manual_seed(0)
    parts = torch.randn(2, 1, 4, 4, 4, generator=torch_rng)  # [label, b, n, pixel, 2c]

    def forward(inputs, static):
        return parts.flatten(3).flatten(0, 1)

    def sampler(process, noise, settings):
        seen.append(process.predict(noise, torch.zeros(1)))
        return noise

    generate(
        forward, built(DDPMConfig()), {"labels": torch.tensor([1])}, torch.tensor([0]), seed=0,
        sampler=sampler, steps=1, guidance=Guidance(3.0, cfg_channels),
    )  # fmt: skip
    return parts[0], parts[1], seen[0].unflatten(-1, (4, 4))


def test_guidance_leaves_a_learned_variance_as_predicted_with_the_label():
    conditional, unconditional, seen = guided_parts(None)
    guided = unconditional + 3 * (conditional - unconditional)
    torch.testing.assert_close(seen[..., :2], guided[..., :2])
    assert torch.equal(seen[..., 2:], conditional[..., 2:])


def test_the_first_channels_alone_can_be_guided():
    conditional, unconditional, seen = guided_parts(1)
    guided = unconditional + 3 * (conditional - unconditional)
    torch.testing.assert_close(seen[..., :1], guided[..., :1])
    assert torch.equal(seen[..., 1:], conditional[..., 1:])


def test_a_sampler_is_given_eta_and_other_noise_for_every_step():
    def sampler(process, noise, settings):
        assert (settings.steps, settings.eta) == (7, 0.25)
        drawn = [noise, *(settings.noise(step) for step in range(3))]
        for i, first in enumerate(drawn):
            for second in drawn[:i]:
                assert (first - second).abs().max() > 0.5
        assert torch.equal(settings.noise(1), drawn[2])
        return noise

    generate(
        network(), built(RectifiedFlowConfig()), {"labels": torch.tensor([1])}, torch.tensor([0]),
        seed=0, sampler=sampler, steps=7, eta=0.25,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("path", "keys", "words"),
    [
        (
            DDPMConfig(steps=100),
            {"steps": 101},
            "[sampling] steps=101: the network is trained with 100",
        ),
        (
            DDPMConfig(),
            {"steps": 25, "cfg_channels": 3},
            "[sampling] cfg_channels=3: a latent has 2 channels",
        ),
        (
            DDPMConfig(),
            {"sampler": "heun"},
            '[sampling] sampler="heun" does not fit [objective] name="ddpm". '
            "Valid: auto, ddim, ddpm, dpmpp_2m.",
        ),
        (RectifiedFlowConfig(), {"steps": 5000}, None),
        # Schedulers of diffusers that go to the data, and that do not.
        (DDPMConfig(prediction="v"), {"sampler": "diffusers:PNDMScheduler"}, None),
        (RectifiedFlowConfig(), {"sampler": "diffusers:DPMSolverMultistepScheduler"}, None),
        # Leaves the noise of the first step of training, 3% in 100 steps.
        (DDPMConfig(steps=100), {"sampler": "diffusers:DEISMultistepScheduler"}, None),
        (
            RectifiedFlowConfig(),
            {"sampler": "diffusers:DEISMultistepScheduler"},
            '[sampling] sampler="diffusers:DEISMultistepScheduler" does not end at the data in 25 '
            "steps: it misses them by 0.098.",
        ),
        (
            DDPMConfig(),
            {"sampler": "diffusers:DDIMInverseScheduler"},
            '[sampling] sampler="diffusers:DDIMInverseScheduler" does not end at the data',
        ),
        (
            DDPMConfig(),
            {"sampler": "diffusers:IPNDMScheduler"},
            '[sampling] sampler="diffusers:IPNDMScheduler" does not end at the data',
        ),
        (
            DDPMConfig(),
            {"sampler": "diffusers:PNDMScheduler", "steps": 2},
            '[sampling] sampler="diffusers:PNDMScheduler" cannot draw in 2 steps (operands',
        ),
        (
            DDPMConfig(prediction="v"),
            {"sampler": "diffusers:IPNDMScheduler"},
            '[sampling] sampler="diffusers:IPNDMScheduler" predicts the noise only, but '
            '[objective] prediction="v".',
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_it_is_tried(path, keys, words):
    if words is None:
        check(built(path), SamplingConfig(**keys), "[sampling] {}")
        return
    with pytest.raises(UserError) as caught:
        check(built(path), SamplingConfig(**keys), "[sampling] {}")
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("num", "classes"), [(10, [0, 1]), (7, [3, 1, 4]), (2, [0, 1, 2]), (5, [9])]
)
def test_labels_are_spread_evenly_in_order(num, classes):
    labels = spread_labels(num, classes).tolist()
    assert len(labels) == num
    assert labels == sorted(labels, key=classes.index)
    counts = [labels.count(label) for label in classes]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("num", "num_classes", "shown"),
    [(100, 10, 10), (40, 1000, 10), (16, 10, 4), (3, 10, 1), (8, 1, 1)],
)
def test_a_preview_shows_few_classes_several_times(num, num_classes, shown):
    labels = preview_labels(num, num_classes).tolist()
    assert len(labels) == num
    assert sorted(set(labels)) == list(range(shown))
    assert min(labels.count(label) for label in set(labels)) >= min(num, 4)


@pytest.mark.parametrize(
    ("path", "name", "expected"),
    [
        (DDPMConfig(), "auto", ddim),
        (DDPMConfig(), "ddpm", ddpm),
        (RectifiedFlowConfig(), "auto", heun),
        (RectifiedFlowConfig(), "euler", euler),
        (RectifiedFlowConfig(), "titan_dit.diffusion.samplers.ode:euler", euler),
    ],
)
def test_a_sampler_is_chosen_by_name_or_is_a_users_own(path, name, expected):
    assert sampler_of(path, name) is expected


def test_samplers_are_found_by_name_and_objective():
    flow = [sampler_of(RectifiedFlowConfig(), name) for name in ("euler", "heun", "auto")]
    assert flow == [euler, heun, heun]
    assert [sampler_of(DDPMConfig(), name) for name in ("ddpm", "ddim", "auto")] == [
        ddpm,
        ddim,
        ddim,
    ]
    assert name_of_sampler(RectifiedFlowConfig(), "auto") == "heun"
    with pytest.raises(
        UserError, match=r"\[sampling\] sampler=.huen. is unknown. Did you mean heun"
    ):
        sampler_of(RectifiedFlowConfig(), "huen")


def test_a_sampler_of_another_objective_is_refused_with_those_that_fit():
    with pytest.raises(
        UserError, match=r"sampler=.heun. does not fit \[objective\] name=.ddpm.*auto, ddim, ddpm"
    ):
        sampler_of(DDPMConfig(), "heun")


def test_a_path_of_a_users_own_has_no_sampler_to_choose():
    class Other(RectifiedFlowConfig):
        name = "mine:Other"

    with pytest.raises(UserError, match=r'sampler="auto": .*name="mine:Other" has no default'):
        sampler_of(Other(), "auto")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_preview_is_the_same_on_any_number_of_ranks(tmp_path, ranks):
    sampling, model = SamplingConfig(num=8, steps=2), network()
    shares = {}

    def picture(rank, gather):
        share = DataShare(torch.device("cpu"), rank, ranks, gather)
        with torch.no_grad():
            made = preview(model, built(RectifiedFlowConfig()), sampling, 0, share)
        made.write(tmp_path / f"{ranks}-{rank}{made.suffix}")
        return (tmp_path / f"{ranks}-{rank}{made.suffix}").read_bytes()

    def kept(rank):
        def gather(rows):
            shares[rank] = rows
            return torch.cat([rows] * ranks)

        return gather

    for rank in range(ranks):
        picture(rank, kept(rank))
    whole = torch.cat([shares[rank] for rank in range(ranks)])
    assert len({len(rows) for rows in shares.values()}) == 1
    expected = draw(model, preview_labels(8, 5).tolist(), range(8), steps=2, cfg_scale=2.0)
    torch.testing.assert_close(whole[:8], CONFIG.detokenize(expected), rtol=1e-5, atol=1e-5)
    pictures = [picture(rank, lambda rows: whole) for rank in range(ranks)]
    assert all(data == pictures[0] for data in pictures)
    assert pictures[0][:4] == b"\x89PNG"


def times_of(sampling, config):
    """The times at which the network is asked by a preview."""
    asked = []

    def forward(inputs, static, context=None):
        asked.append(inputs["timestep"][0].item() / 1000)
        return torch.zeros_like(inputs["tokens"])

    sampling = SamplingConfig(every=1, num=1, sampler="euler", steps=2, cfg_scale=1.0, **sampling)
    preview(forward, built(config), sampling, 0, DataShare(torch.device("cpu")))
    return asked


def test_previews_have_the_shift_of_training_unless_they_have_their_own():
    shifted = RectifiedFlowConfig(shift=3.0)
    assert times_of({}, RectifiedFlowConfig()) == pytest.approx([1.0, 0.5])
    assert times_of({}, shifted) == pytest.approx([1.0, 0.75])
    assert times_of({"shift": 1.0}, shifted) == pytest.approx([1.0, 0.5])
    # Four tokens: sqrt(4 / 256).
    by_tokens = RectifiedFlowConfig(shift_by_tokens="sqrt")
    assert times_of({}, by_tokens) == pytest.approx([1.0, 1 / 9])


def test_a_shift_without_a_flow_is_refused():
    with pytest.raises(
        UserError, match=r"\[sampling\] shift=2 is for flows, but \[objective\] name"
    ):
        check(built(DDPMConfig()), SamplingConfig(shift=2.0), "[sampling] {}")
