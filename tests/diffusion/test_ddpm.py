import pytest
import torch
from points import batch_of, built, tokens_of

from titan_dit.config.section import UserError
from titan_dit.diffusion.base import by_channel
from titan_dit.diffusion.conditions import NO_LABEL
from titan_dit.diffusion.ddpm import bits_per_value
from titan_dit.diffusion.noise_schedule import named
from titan_dit.diffusion.samplers.base import Settings
from titan_dit.diffusion.samplers.discrete import ddim, ddpm
from titan_dit.diffusion.sections import DDPMConfig
from titan_dit.rng import SampleRNG

KINDS = ["eps", "v", "x"]
CPU = torch.device("cpu")
SHAPE = {"tokens": 6, "pixels": 2, "channels": 3}


def of(**keys):
    return built(DDPMConfig(**keys), **SHAPE)


def prepare(objective, numbers, seed=0):
    return objective.prepare(batch_of(numbers, **SHAPE), SampleRNG(seed, numbers))


def predicted(tensor):
    return {"prediction": tensor}


def exact(objective, targets):
    """The exact prediction, by channel, from the sample and its noise."""
    tables, step = objective.tables(CPU), targets["step"]
    signal, sigma = (t[step].view(-1, 1, 1, 1) for t in (tables.signal, tables.sigma))
    return {
        "eps": targets["noise"],
        "x": targets["clean"],
        "v": signal * targets["noise"] - sigma * targets["clean"],
    }[objective.config.prediction]


def with_variance(values, spread):
    """Join [b, n, p, c] and a variance in the layout of a network: [b, n, p * 2c]."""
    return torch.cat((values, torch.full_like(values, spread)), -1).flatten(2)


def test_inputs_are_the_sample_and_its_noise_at_the_level_of_the_step():
    numbers = torch.arange(40, 72)
    objective, alpha_bars = of(condition_dropout=0.0), named("linear", 1000).alpha_bar
    prepared = prepare(objective, numbers)
    clean, noise, step = (prepared.targets[name] for name in ("clean", "noise", "step"))
    assert torch.equal(clean.flatten(2), tokens_of(numbers, **SHAPE))
    alpha_bar = torch.tensor(alpha_bars)[step].view(-1, 1, 1, 1)
    expected = alpha_bar.sqrt() * clean + (1 - alpha_bar).sqrt() * noise
    torch.testing.assert_close(prepared.inputs["tokens"], expected.flatten(2), check_dtype=False)
    assert torch.equal(prepared.inputs["timestep"], step.float())
    assert torch.equal(prepared.inputs["labels"], numbers % 7)
    assert prepared.total_tokens == 32 * 6


@pytest.mark.parametrize("steps", [50, 1000])
def test_every_step_is_drawn_equally_often(steps):
    count = 40_000
    step = prepare(of(steps=steps), torch.arange(count)).targets["step"]
    assert step.dtype == torch.int64
    assert (step.min(), step.max()) == (0, steps - 1)
    found = step.bincount(minlength=50).view(50, -1).sum(1).double()
    chi2 = ((found - count / 50) ** 2 / (count / 50)).sum()
    assert chi2 < 85.4  # 49 degrees of freedom, p = 0.001.


def test_labels_are_dropped_in_their_share():
    labels = prepare(of(condition_dropout=0.25), torch.arange(20_000)).inputs["labels"]
    assert (labels == NO_LABEL).double().mean().item() == pytest.approx(0.25, abs=0.012)


def test_dropping_labels_does_not_depend_on_the_step():
    """With one stream for both, labels would be dropped at some steps only."""
    prepared = prepare(of(condition_dropout=0.5), torch.arange(20_000))
    dropped = prepared.inputs["labels"] == NO_LABEL
    low = prepared.targets["step"] < 500
    assert dropped[low].double().mean().item() == pytest.approx(0.5, abs=0.02)
    assert dropped[~low].double().mean().item() == pytest.approx(0.5, abs=0.02)


def test_the_bound_has_no_min_snr_weight_and_no_weight_by_the_number_of_steps():
    targets = prepare(of(), torch.arange(16)).targets
    prediction = torch.randn(16, 6, 12)
    plain, weighted = (
        of(min_snr_gamma=g).terms(predicted(prediction), targets) for g in (None, 5.0)
    )
    assert torch.equal(plain["vb"], weighted["vb"])
    assert not torch.equal(plain["mse"], weighted["mse"])
    few = of(steps=400)
    targets = prepare(few, torch.arange(16)).targets
    values, spread = few.split(prediction)
    tables, step = few.tables(CPU), targets["step"]
    signal, sigma = (t[step].view(-1, 1, 1, 1) for t in (tables.signal, tables.sigma))
    noisy = signal * targets["clean"] + sigma * targets["noise"]
    bits = bits_per_value(
        targets["clean"], noisy, step, few.clean(values, noisy, step, tables),
        few.log_variance(spread, step, tables), tables,
    )  # fmt: skip
    torch.testing.assert_close(few.terms(predicted(prediction), targets)["vb"], bits.mean((2, 3)))


def test_a_draw_depends_on_seed_and_sample_number_alone():
    whole = prepare(of(), torch.arange(10))
    part = prepare(of(), torch.tensor([7, 2]))
    for where in ("inputs", "targets"):
        for name, value in getattr(whole, where).items():
            assert torch.equal(getattr(part, where)[name], value[[7, 2]])
    other = prepare(of(), torch.arange(10), seed=1)
    assert (other.targets["noise"] - whole.targets["noise"]).abs().max() > 1
    assert not torch.equal(other.targets["step"], whole.targets["step"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_an_exact_prediction_has_no_error_and_stands_for_the_sample(kind, schedule):
    objective = of(prediction=kind, noise_schedule=schedule)
    targets = prepare(objective, torch.arange(64)).targets
    values = exact(objective, targets)
    terms = objective.terms(predicted(with_variance(values, -1.0)), targets)
    assert terms["mse"].abs().max() < 1e-12
    # Only the negative log-likelihood of step 0 is left of the bound.
    assert terms["vb"][targets["step"] > 0].abs().max() < 1e-4
    step, tables = targets["step"], objective.tables(CPU)
    noisy = prepare(objective, torch.arange(64)).inputs["tokens"]
    found = objective.clean(values, by_channel(noisy, 3), step, tables)
    # At the noisiest steps the signal is less than 1% of the input.
    kept = tables.signal[step] > 0.05
    torch.testing.assert_close(found[kept], targets["clean"][kept], rtol=0, atol=1e-4)


@pytest.mark.parametrize("gamma", [None, 5.0])
def test_the_same_network_has_the_same_weighted_error_of_x_0_whatever_it_predicts(gamma):
    """Without weights, the errors of eps, v and x are SNR, SNR + 1 and 1 times that of x_0."""
    found = {}
    for kind in KINDS:
        objective = of(prediction=kind, min_snr_gamma=gamma, learn_sigma=False)
        targets = prepare(objective, torch.arange(64)).targets
        step, tables = targets["step"], objective.tables(CPU)
        signal, sigma = (t[step].view(-1, 1, 1, 1) for t in (tables.signal, tables.sigma))
        clean = targets["clean"] + 0.1
        noisy = signal * targets["clean"] + sigma * targets["noise"]
        noise = (noisy - signal * clean) / sigma
        values = {"eps": noise, "x": clean, "v": signal * noise - sigma * clean}[kind]
        snr = tables.snr[step][:, None]
        expected = 0.01 * {"eps": snr, "v": snr + 1, "x": torch.ones_like(snr)}[kind]
        if gamma is not None:
            expected = 0.01 * snr.clamp(max=gamma)
        found[kind] = objective.loss(predicted(values.flatten(2)), targets)
        torch.testing.assert_close(
            found[kind], expected.expand_as(found[kind]), rtol=2e-3, atol=1e-6
        )
    if gamma is not None:
        torch.testing.assert_close(found["eps"], found["v"], rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("kind", ["v", "x"])
@pytest.mark.parametrize("sampler", [ddpm, ddim])
def test_the_same_network_draws_the_same_samples_whatever_it_predicts(kind, sampler):
    alpha_bars = torch.tensor(named("linear", 1000).alpha_bar, dtype=torch.float64)
    noise = torch.randn(2, 4, 12)

    def predicts_noise(x, timestep):
        values = by_channel(x, 3) * (timestep.view(-1, 1, 1, 1) / 1000).sqrt()
        return torch.cat((values, torch.tanh(by_channel(x, 3))), -1).flatten(2)

    def predicts_other(x, timestep):
        pixels = by_channel(predicts_noise(x, timestep), 6).double()
        eps, spread = pixels[..., :3], pixels[..., 3:]
        alpha_bar = alpha_bars[timestep.long()].view(-1, 1, 1, 1)
        signal, sigma = alpha_bar.sqrt(), (1 - alpha_bar).sqrt()
        clean = (by_channel(x, 3) - sigma * eps) / signal
        values = {"x": clean, "v": signal * eps - sigma * clean}[kind]
        return torch.cat((values, spread), -1).flatten(2).float()

    def fresh(step):
        return torch.randn(noise.shape, generator=torch.Generator().manual_seed(step))

    settings = Settings(20, 0.3, fresh)
    expected = sampler(of().process(predicts_noise), noise, settings)
    found = sampler(of(prediction=kind).process(predicts_other), noise, settings)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())


def test_the_bound_teaches_the_variance_and_the_error_the_prediction():
    objective = of()
    targets = prepare(objective, torch.arange(16)).targets
    values = (exact(objective, targets) + 0.1).requires_grad_()
    spread = torch.zeros_like(values).requires_grad_()
    prediction = torch.cat((values, spread), -1).flatten(2)
    terms = objective.terms(predicted(prediction), targets)
    for name, taught, untouched in (("mse", values, spread), ("vb", spread, values)):
        gradients = torch.autograd.grad(
            terms[name].sum(), (taught, untouched), allow_unused=True, retain_graph=True
        )
        assert gradients[0].abs().max() > 0
        assert gradients[1] is None or gradients[1].abs().max() == 0
    torch.testing.assert_close(
        objective.loss(predicted(prediction), targets), terms["mse"] + terms["vb"]
    )


def test_the_variance_lies_between_the_posterior_and_beta():
    objective, tables = of(), named("linear", 1000).tables(CPU)
    step = torch.tensor([0, 1, 500, 999])
    for spread, expected in (
        (-1.0, tables.posterior_log_variance[step]),
        (1.0, tables.log_beta[step]),
        (0.0, (tables.posterior_log_variance[step] + tables.log_beta[step]) / 2),
    ):
        found = objective.log_variance(torch.full((4, 2, 2, 3), spread), step, tables)
        torch.testing.assert_close(found, expected.view(-1, 1, 1, 1).expand(4, 2, 2, 3))


def test_channels_and_variance_are_told_apart_within_every_pixel():
    objective = of()
    assert objective.config.output_channels(3) == 6
    assert DDPMConfig(learn_sigma=False).output_channels(3) == 3
    prediction = torch.arange(2 * 6.0).view(1, 1, 12)  # Two pixels of three channels.
    values, spread = objective.split(prediction)
    assert values.flatten().tolist() == [0, 1, 2, 6, 7, 8]
    assert spread.flatten().tolist() == [3, 4, 5, 9, 10, 11]


def test_the_loss_of_a_token_does_not_depend_on_the_other_tokens():
    objective = of()
    targets = prepare(objective, torch.arange(8)).targets
    prediction = torch.randn(8, 6, 12)
    whole = objective.loss(predicted(prediction), targets)
    part = {k: v[:, 2:4] if v.ndim > 1 else v for k, v in targets.items()}
    torch.testing.assert_close(objective.loss(predicted(prediction[:, 2:4]), part), whole[:, 2:4])


def test_losses_are_taken_in_fp32():
    objective = of()
    targets = prepare(objective, torch.arange(8)).targets
    prediction = torch.randn(8, 6, 12).bfloat16()
    found = objective.loss(predicted(prediction), targets)
    assert found.dtype == torch.float32
    assert torch.equal(found, objective.loss(predicted(prediction.float()), targets))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("steps", 10, "at least 25"),
        ("min_snr_gamma", 0.0, "above 0"),
        ("condition_dropout", 1.5, "at most 1"),
    ],
)
def test_impossible_values_are_refused(key, value, words):
    with pytest.raises(UserError, match=r"\[objective\]") as caught:
        DDPMConfig(**{key: value})
    assert words in str(caught.value)
