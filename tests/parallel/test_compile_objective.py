"""Compiled objectives draw and score as uncompiled ones, with a graph for each function."""

import contextlib
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from generated_triton import DEVICE, generating
from harness import on_ranks
from tiny import graphs_alone

from titan_dit.config.layout import CompileConfig
from titan_dit.config.section import UserError
from titan_dit.data.base import Batch
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.diffusion.sections import DDPMConfig, RectifiedFlowConfig
from titan_dit.execution import by_name, scored
from titan_dit.models.dit_config import DiTConfig
from titan_dit.objectives.base import Prepared
from titan_dit.parallel.compile import compile_function, compile_prepare, compile_score, num_graphs
from titan_dit.rng import SampleRNG

ENABLED = CompileConfig(enabled=True)
CPU = torch.device("cpu")
MODEL = DiTConfig(
    hidden_size=8,
    num_layers=1,
    num_heads=2,
    patch_size=2,
    latent_size=6,
    in_channels=3,
    num_classes=10,
)
PATHS = {
    "rectified flow": RectifiedFlowConfig(shift=3.0),
    "ddpm": DDPMConfig(min_snr_gamma=5.0),
    "ddpm v": DDPMConfig(prediction="v", learn_sigma=False),
}


def batch_of(rows, first):
    generator = torch.Generator().manual_seed(first)
    # Channels twice: a mean and a std, from which the latent is drawn.
    latent = torch.rand(rows, 2 * MODEL.in_channels, 6, 6, generator=generator)
    numbers = torch.arange(first, first + rows)
    fields = {"latent": latent, "label": numbers % 10}
    return Batch(fields, numbers, torch.ones(rows), float(rows))


def both(how):
    """Of every path: (largest differences, graphs by moment)."""
    found = {}
    for name, path in PATHS.items():
        torch._dynamo.reset()
        facts = LatentFacts(count=99, shape=(6, 6, 6), num_classes=10)
        objective = path.build(MODEL, facts)
        start, differences, graphs = num_graphs(), {}, []
        with how():
            prepare = compile_prepare(objective, ENABLED, CPU)
            compiled = compile_score(scored, objective, ENABLED, CPU)
            loss = by_name(objective.loss, ("prediction",), 9)
            for first in (0, 2**33, 77):
                batch = batch_of(5, first)
                rng = SampleRNG(3, batch.sample_numbers)
                ours, plain = prepare(batch, rng), objective.prepare(batch, rng)
                assert ours.total_tokens == plain.total_tokens
                tensors = {**plain.inputs, **plain.targets, **plain.static}
                mine = {**ours.inputs, **ours.targets, **ours.static}
                differences |= {
                    (first, key): (mine[key].double() - value.double()).abs().max().item()
                    for key, value in tensors.items()
                }
                graphs.append(num_graphs() - start)
                results = [score(path, f, loss, plain, first) for f in (compiled, scored)]
                differences |= {(first, key): value for key, value in compare(*results)}
                graphs.append(num_graphs() - start)
        found[name] = differences, graphs
    return found


def score(path, function, loss, prepared, seed):
    """The share of the loss, the factor of its gradient, and the prediction's gradient."""
    values = 4 * path.output_channels(MODEL.in_channels)
    drawn = torch.randn(5, 9, values, generator=torch.Generator().manual_seed(seed % 1000))
    share, factor = function(loss, drawn.requires_grad_(), prepared)
    torch.autograd.backward(share, factor)
    return share.detach(), factor, drawn.grad


def compare(ours, wanted):
    """The largest relative differences."""
    for key, mine, its in zip(("loss", "factor", "gradient"), ours, wanted, strict=True):
        yield key, ((mine - its).abs().max() / its.abs().max()).item()


TO_THE_END = [pytest.mark.long, pytest.mark.compiler]


def alone(world, how):
    return both(how), shares_of_totals()


def shares_of_totals():
    """Shares of a loss of 24 in steps with other totals, and the graphs that they take."""

    def own(prediction, targets):
        return prediction.sum(-1)

    with graphs_alone():
        score = compile_score(
            scored, SimpleNamespace(constants=(), modules=lambda: None), ENABLED, CPU
        )
        start, shares = num_graphs(), []
        for total in (8.0, 9.0, 10.0, 8.0):
            given = Prepared({}, {}, torch.ones(2), total)
            shares.append(score(own, torch.ones(2, 4, 3), given)[0].item())
        return shares, num_graphs() - start


@pytest.mark.parametrize(
    "how", [graphs_alone, pytest.param(contextlib.nullcontext, marks=TO_THE_END)]
)
def test_a_compiled_objective_draws_and_scores_alike_with_one_graph_for_each(how):
    [(results, of_totals)] = on_ranks(1, alone, how)
    assert of_totals == ([3, pytest.approx(24 / 9), pytest.approx(2.4), 3], 1)
    assert results.keys() == PATHS.keys()
    for name, (differences, graphs) in results.items():
        # prepare, loss; the next batches compile nothing.
        assert graphs == [1, 2, 2, 2, 2, 2], name
        for key, difference in differences.items():
            exact = key[-1] in ("labels", "step", "factor")
            limit = 0 if exact else 1e-3 if key[-1] == "timestep" else 1e-5
            assert difference <= limit, (name, key)


def factors_of(world, values, device):
    """The factor of a compiled loss of each value, and whether its gradient is finite."""

    def own(prediction, targets):
        return (prediction - targets["x"]).abs().mean(-1)

    score = compile_score(
        scored, SimpleNamespace(constants=(), modules=lambda: None), ENABLED, device
    )
    found = []
    for value in values:
        target, prediction = torch.full((2, 4, 3), value), torch.ones(2, 4, 3, requires_grad=True)
        share, factor = score(own, prediction, Prepared({}, {"x": target}, torch.ones(2), 8.0))
        torch.autograd.backward(share, factor)
        found.append((factor.item(), prediction.grad.isfinite().all().item()))
    return found


@pytest.mark.long
@pytest.mark.compiler
@pytest.mark.parametrize("settings_of", ["cpu", "cuda"])
def test_the_compiler_keeps_the_factor_of_a_loss_that_is_not_finite(settings_of):
    values, device = (0.0, torch.inf, torch.nan), torch.device(settings_of)
    [found] = on_ranks(1, factors_of, values, device)
    assert found[0] == (1.0, True)
    assert all(factor != factor and not finite for factor, finite in found[1:])


def generated(world, name, channels):
    """What a GPU would run of `prepare` and of the loss, whose total is once a constant, too.

    In the order of compilation: `prepare`, the loss with its backward, the loss of a constant.
    """
    path, model = PATHS[name], replace(MODEL, latent_size=32)
    facts = LatentFacts(count=99, shape=(channels, 32, 32), num_classes=10)
    objective, batch = path.build(model, facts), batch_of(2, 0)
    batch.fields["latent"] = torch.rand(2, channels, 32, 32)
    loss = by_name(objective.loss, ("prediction",), 256)
    with generating() as found:
        rng = SampleRNG(3, batch.sample_numbers)
        prepared = compile_prepare(objective, ENABLED, DEVICE)(batch, rng)
        prediction = torch.randn(2, 256, 4 * path.output_channels(3), requires_grad=True)
        share, factor = compile_score(scored, objective, ENABLED, DEVICE)(
            loss, prediction, prepared
        )
        torch.autograd.backward(share, factor)
        compile_function(scored, objective, DEVICE)(loss, prediction.detach(), prepared)
    return found


@pytest.mark.skipif(
    torch.__version__ >= "2.14", reason="replaces parts of Inductor as they are in 2.11 to 2.13"
)
@pytest.mark.parametrize(
    ("name", "channels"),
    # Twice the channels: latents are drawn from a mean and a std.
    [("rectified flow", 3), pytest.param("ddpm", 6, marks=pytest.mark.long)],
)
def test_what_a_gpu_would_run_is_a_few_kernels_none_of_them_too_long_to_compile(name, channels):
    [(prepare, forward, backward, constant)] = on_ranks(1, generated, name, channels)
    # In one kernel of 4,500 lines torch 2.11 lowers `prepare` of an H100 in 53 s, and Triton
    # compiles it in 64 s, for every new shape of a batch. Measured now: 6 kernels, 381 lines, 3 s.
    assert 1 < len(prepare.kernels) <= 9
    assert prepare.most_lines < 800
    assert prepare.num_nodes < 900
    assert prepare.seconds < 20
    for part in (forward, backward):
        assert len(part.kernels) <= 4
        assert part.most_lines < 300
        assert part.seconds < 10
    # The factor of the gradient is 1 + (value - value). Of a product a GPU could subtract the
    # value in one fused multiply-add, before it is rounded: the factor would be 1 plus a rounding
    # error of the loss. A quotient is not fused, but by a constant it becomes a product: that is
    # why the total is a tensor. (torch 2.13 writes a `where` instead of the difference.)
    assert operator_of_the_value(forward) == "/"
    assert operator_of_the_value(constant) == "*"


def operator_of_the_value(part):
    """The operator whose result a kernel subtracts from itself."""
    for kernel in part.kernels.values():
        found = re.search(r"= (tmp\d+) - \1$|isnan\((tmp\d+)\)", kernel, re.MULTILINE)
        if found:
            value = found[1] or found[2]
            return re.search(rf"\b{value} = \(?tmp\d+ (.) tmp\d+", kernel)[1]
    raise AssertionError("no value is subtracted from itself")


def test_a_loss_of_another_shape_is_refused_in_a_compiled_step_too():
    objective = PATHS["ddpm v"].build(MODEL, LatentFacts(count=9, shape=(6, 6, 6), num_classes=10))
    with graphs_alone():
        score = compile_score(scored, objective, ENABLED, CPU)
        loss = by_name(lambda predictions, _: predictions["x"].sum(), ("x",), 4)
        prediction = torch.ones(2, 4, 3, requires_grad=True)
        with pytest.raises(UserError, match=r"it must return one value per token, \[2, 4\]"):
            score(loss, prediction, Prepared({}, {}, torch.ones(2), 8.0))


def test_what_is_not_asked_for_stays_as_it_is():
    objective = SimpleNamespace(prepare=object(), modules=lambda: object())
    for config in (CompileConfig(), CompileConfig(enabled=True, objective=False)):
        assert compile_prepare(objective, config, CPU) is objective.prepare
        assert compile_score(scored, objective, config, CPU) is scored
    # FSDP2 gathers its modules in hooks.
    assert compile_score(scored, objective, ENABLED, CPU) is scored
