"""Short attention: as precise as flash, and saves no more for backward."""

import shutil
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from harness import on_ranks
from tiny import gradients, graphs_alone, randomize, tiny_config

from titan_dit.config.layout import ActivationCheckpointConfig, CompileConfig, PrecisionConfig
from titan_dit.kernels import short_attention
from titan_dit.models import layers
from titan_dit.parallel.compile import num_graphs
from titan_dit.trainer import Trainer


def inputs(tokens=64, spread=3.0):
    """q, k and v with the strides of a layer and scores of up to 30; and a gradient."""
    generator = torch.Generator().manual_seed(0)
    projected = spread * torch.randn(2, tokens, 4, 3, 16, generator=generator)
    q, k, v = (x.transpose(1, 2).bfloat16() for x in projected.unbind(3))
    return (q, k, v), torch.randn(q.shape, generator=generator).bfloat16()


def results(attend, tensors, d_out):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = attend(*leaves)
    return [x.double() for x in (out.detach(), *torch.autograd.grad(out, leaves, d_out))]


def errors(found, exact):
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [4, 2])
def test_output_and_gradients_are_as_exact_as_those_of_flash(causal, groups):
    (q, k, v), d_out = inputs()
    tensors = q, k[:, :groups], v[:, :groups]
    reference, short = (partial(x.attend, causal=causal) for x in (layers, short_attention))
    exact = results(reference, [x.double() for x in tensors], d_out.double())
    flash = errors(results(reference, tensors, d_out), exact)
    mine = errors(results(short, tensors, d_out), exact)
    assert max(flash) < 0.01
    assert all(m < 1.5 * f for m, f in zip(mine, flash, strict=True))


def test_scores_rounded_to_bf16_would_be_seen(monkeypatch):
    tensors, d_out = inputs()
    exact = results(F.scaled_dot_product_attention, [x.double() for x in tensors], d_out.double())
    good = errors(results(short_attention.attend, tensors, d_out), exact)
    monkeypatch.setattr(torch, "baddbmm", lambda base, *_, **__: torch.zeros_like(base))
    bad = errors(results(short_attention.attend, tensors, d_out), exact)
    assert all(b > 2 * g for b, g in zip(bad, good, strict=True))


def test_many_tokens_are_left_to_flash(monkeypatch):
    monkeypatch.setattr(short_attention, "MAX_TOKENS", 63)
    monkeypatch.setattr(short_attention, "products", None)
    tensors, _ = inputs()
    found = short_attention.attend(*tensors)
    assert torch.equal(found, F.scaled_dot_product_attention(*tensors))


def test_what_is_masked_by_lengths_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(short_attention, "products", None)
    (tensors, _), mask = inputs(), {"lengths": torch.tensor([5, 64])}
    found = short_attention.attend(*tensors, **mask)
    assert torch.equal(found, layers.attend(*tensors, **mask))
    assert not torch.equal(found, layers.attend(*tensors))


def test_it_is_for_compiled_bf16_on_a_cpu_alone():
    bf16, compiled = PrecisionConfig(dtype="bf16"), CompileConfig(enabled=True)
    suits = short_attention.suits
    assert suits("cpu", bf16, ActivationCheckpointConfig(), compiled)
    assert not suits("cuda", bf16, ActivationCheckpointConfig(), compiled)
    assert not suits("cpu", PrecisionConfig(dtype="fp32"), ActivationCheckpointConfig(), compiled)
    assert not suits(
        "cpu", PrecisionConfig(attention="flash"), ActivationCheckpointConfig(), compiled
    )
    assert not suits("cpu", bf16, ActivationCheckpointConfig(mode="attention"), compiled)
    assert not suits("cpu", bf16, ActivationCheckpointConfig(), CompileConfig())


LAYOUTS = [{"dp_shard": 2}, {"tp": 2}, {"cp": 2, "cp_method": "ulysses"}]


def in_layout(world, layout):
    torch._dynamo.reset()
    config = tiny_config(
        precision={"dtype": "bf16"},
        compile={"enabled": True},
        parallel=layout,
        training={"microbatch_size": 4},
    )
    trainer = Trainer(config, world)
    randomize(trainer.parameters)
    before = num_graphs()
    return (*gradients(trainer), num_graphs() - before)


def all_layouts(world):
    with graphs_alone():
        return {str(layout): in_layout(world, layout) for layout in LAYOUTS}


def one_process(world):
    with graphs_alone():
        graph = in_layout(world, {})
    return graph, in_layout(world, {}) if shutil.which("g++") else None


@pytest.fixture(scope="module")
def alone():
    return on_ranks(1, one_process)[0]


def assert_close(result, expected):
    """bf16: three digits, and another order of summation. One graph for all blocks."""
    largest = max(float(gradient.abs().max()) for gradient in expected[1].values())
    assert result[2] == expected[2] == 3  # And those of the batch as prepared and of the loss.
    assert result[0] == pytest.approx(expected[0], rel=2e-3)
    for name, gradient in result[1].items():
        assert float((gradient - expected[1][name]).abs().max()) < 0.02 * largest, name


@pytest.mark.long
def test_bf16_graphs_agree_on_every_layout(alone):
    for found in on_ranks(2, all_layouts):
        assert len(found) == len(LAYOUTS)
        for result in found.values():
            assert_close(result, alone[0])


@pytest.mark.compiler
def test_the_compiled_code_does_what_the_graphs_do(alone):
    graph, compiled = alone
    assert_close(compiled, graph)
