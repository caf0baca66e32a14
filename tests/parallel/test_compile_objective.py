"""Compiled objectives draw and score as uncompiled ones, with a graph for each function."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from harness import on_ranks
from tiny import graphs_alone

from titan_dit.config.layout import CompileConfig
from titan_dit.data.base import Batch
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.diffusion.ddpm import DDPM
from titan_dit.diffusion.rectified_flow import RectifiedFlow
from titan_dit.models.dit import DiTConfig
from titan_dit.parallel.compile import num_graphs
from titan_dit.parallel.compile_objective import compile_loss, compile_prepare
from titan_dit.rng import SampleRNG

ENABLED = CompileConfig(enabled=True)
MODEL = DiTConfig(hidden=8, layers=1, heads=2, patch=2, latent_size=6, channels=3, num_classes=10)
PATHS = {
    "rectified flow": RectifiedFlow(shift=3.0),
    "ddpm": DDPM(min_snr_gamma=5.0),
    "ddpm v": DDPM(prediction="v", learn_sigma=False),
}


def batch_of(rows, first):
    generator = torch.Generator().manual_seed(first)
    # Channels twice: a mean and a std, from which the latent is drawn.
    latent = torch.rand(rows, 2 * MODEL.channels, 6, 6, generator=generator)
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
            prepare = compile_prepare(objective, ENABLED)
            loss = compile_loss(objective, ENABLED)
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
                for rows in (5, 3) if first == 77 else (5,):
                    score(path, objective, loss, plain, rows, first, differences, graphs, start)
        found[name] = differences, graphs
    return found


def score(path, objective, loss, prepared, rows, first, differences, graphs, start):
    """Values and gradients of the loss; with fewer rows than in training, without gradients."""
    part = prepared.select(slice(rows))
    values = 4 * path.output_channels(MODEL.channels)
    drawn = torch.randn(rows, 9, values, generator=torch.Generator().manual_seed(rows))
    results = []
    for function in (loss, objective.loss):
        given = {"prediction": drawn.clone().requires_grad_(rows == 5)}
        with torch.set_grad_enabled(rows == 5):
            value = function(given, part.targets)
        if rows == 5:
            value.square().sum().backward()
        results.append((value.detach(), given["prediction"].grad))
    (value, gradient), (wanted, wanted_gradient) = results
    differences[first, rows, "loss"] = ((value - wanted) / wanted).abs().max().item()
    if rows == 5:
        scale = wanted_gradient.abs().max()
        differences[first, "gradient"] = ((gradient - wanted_gradient).abs().max() / scale).item()
    graphs.append(num_graphs() - start)


TO_THE_END = [pytest.mark.long, pytest.mark.compiler]


def alone(world, how):
    return both(how)


@pytest.mark.parametrize(
    "how", [graphs_alone, pytest.param(contextlib.nullcontext, marks=TO_THE_END)]
)
def test_a_compiled_objective_draws_and_scores_alike_with_one_graph_for_each(how):
    [results] = on_ranks(1, alone, how)
    assert results.keys() == PATHS.keys()
    for name, (differences, graphs) in results.items():
        # prepare, loss; the next batches and a validation of another size compile nothing.
        assert graphs == [1, 2, 2, 2, 2, 2, 2], name
        for key, difference in differences.items():
            exact = key[-1] in ("labels", "step")
            limit = 0 if exact else 1e-3 if key[-1] == "timestep" else 1e-5
            assert difference <= limit, (name, key)


def test_what_is_not_asked_for_stays_as_it_is():
    objective = SimpleNamespace(prepare=object(), loss=object(), modules=lambda: object())
    for config in (CompileConfig(), CompileConfig(enabled=True, objective=False)):
        assert compile_prepare(objective, config) is objective.prepare
        assert compile_loss(objective, config) is objective.loss
    # FSDP2 gathers its modules in hooks.
    assert compile_loss(objective, ENABLED) is objective.loss
