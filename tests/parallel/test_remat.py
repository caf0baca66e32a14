"""Recomputation in one process: equal gradients, less saved."""

import sys
from functools import partial
from types import MethodType

import pytest
import torch
from commands import ROOT
from harness import on_ranks
from tiny import assert_same_gradients, graphs_alone, inputs_of, randomize, tiny_config
from tiny_bert import bert_config
from tiny_gpt import gpt_config
from torch.utils._pytree import tree_leaves

from titan_dit.config.layout import ActivationCheckpointConfig, CompileConfig
from titan_dit.data.loader import load_samples
from titan_dit.parallel import remat
from titan_dit.parallel.compile import compile_blocks
from titan_dit.rng import SampleRNG

sys.path.insert(0, str(ROOT / "benchmarks"))
import remat as benchmark

MODES = ("none", "attention", "selective", "full")


def gradients(mode, qk_norm=False, change=None, compiled=False, dtype=torch.float32):
    config = tiny_config(model={"qk_norm": qk_norm}).model
    model = config.build(1)
    randomize(dict(model.named_parameters()))
    model.to(dtype)
    names = list(dict(model.named_parameters()))
    remat.apply(model, ActivationCheckpointConfig(mode=mode))
    assert list(dict(model.named_parameters())) == names
    if change:
        change(model)
    compile_blocks(model, CompileConfig(enabled=compiled))
    model(inputs_of(config), config.static(torch.device("cpu"))).float().square().sum().backward()
    return {name: p.grad.float() for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("mode", MODES[1:])
def test_gradients_are_the_bits_of_those_without(mode, qk_norm, dtype):
    expected = gradients("none", qk_norm, dtype=dtype)
    for name, found in gradients(mode, qk_norm, dtype=dtype).items():
        assert torch.equal(found, expected[name]), name


def first_batch(config):
    """A model with random weights, and the first samples of its data."""
    source, section = config.data.open(), config.objective
    objective = section.build(config.model, source.facts)
    rows = [(number, number) for number in range(4)]
    batch = load_samples(source, rows, objective.inspect, torch.device("cpu"), 4.0)
    prepared = objective.prepare(batch, SampleRNG(0, batch.sample_numbers))
    model = section.model_spec(config.model).build()
    randomize(dict(model.named_parameters()))
    return model, prepared.inputs, prepared.side_inputs


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_outputs_without_gradients_keep_their_mask(family, mode):
    """Causal, or by lengths: evaluations and samples compute no gradients."""
    config = {"gpt": gpt_config, "bert": partial(bert_config, sentence_order=True)}[family]()
    model, *given = first_batch(config)
    with torch.no_grad():
        expected = model(*given)
        remat.apply(model, ActivationCheckpointConfig(mode=mode))
        found = model(*given)
    pairs = zip(tree_leaves(found), tree_leaves(expected), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def forwards(mode):
    """How often attention and the MLP's first layer run for each block, backward included."""
    counts = {"attention": 0, "up": 0}
    original = torch.nn.functional.scaled_dot_product_attention

    def change(model):
        def attend(*args):
            counts["attention"] += 1
            return original(*args)

        def up(*_):
            counts["up"] += 1

        for block in model.blocks.values():
            block.mlp.up.register_forward_pre_hook(up)
            block.attn.attend = attend
        # Again, around the counting function.
        if mode == "attention":
            remat.apply(model, ActivationCheckpointConfig(mode=mode))

    gradients(mode, change=change)
    return counts["attention"] / 3, counts["up"] / 3


def test_what_is_recomputed_runs_twice():
    assert forwards("none") == (1, 1)
    assert forwards("attention") == (2, 1)
    assert forwards("full") == (2, 2)


def test_selective_recomputes_no_product_and_no_attention(monkeypatch):
    recomputed = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            recomputed.append(str(func))
            return func(*args, **(kwargs or {}))

    original = remat.selective_contexts

    class Both:
        """Calls that miss the cache reach the outer mode."""

        def __init__(self, inner):
            self.modes = Watch(), inner

        def __enter__(self):
            for mode in self.modes:
                mode.__enter__()

        def __exit__(self, *details):
            for mode in reversed(self.modes):
                mode.__exit__(*details)

    def contexts():
        first, second = original()
        return first, Both(second)

    monkeypatch.setattr(remat, "selective_contexts", contexts)
    gradients("selective")
    assert "aten.gelu.default" in recomputed
    assert "aten.native_layer_norm.default" in recomputed
    assert not [name for name in recomputed if "mm" in name or "linear" in name or "dot" in name]


def other_numbers(model):
    """The recomputation uses other modulations than the forward."""

    def forward(block, stream, static):
        def run(stream, static):
            run.calls += 1
            x, condition = stream
            again = run.calls > 1
            return type(block).forward(block, (x, condition * (1 + 0.01 * again)), static)

        run.calls = 0
        return remat.recomputed(run, stream, static)

    for block in model.blocks.values():
        block.forward = MethodType(forward, block)


def test_the_comparison_catches_a_second_forward_with_other_numbers():
    expected = gradients("none")
    with pytest.raises(AssertionError):
        assert_same_gradients(gradients("full", change=other_numbers), expected)


def kept(mode, *, qk_norm=False, compiled=False):
    """At a width where saved per-sample tensors are negligible."""
    return benchmark.kept(mode, hidden=256, tokens=1024, qk_norm=qk_norm, compiled=compiled)


def test_storages_per_token_and_layer_are_within_the_bars():
    found = {mode: kept(mode) for mode in MODES}
    assert 19.9 <= found["none"] <= 20.1
    assert 10.9 <= found["selective"] <= 11.2
    assert 1.0 <= found["full"] <= 1.1
    # A fused kernel saves q, k, v and out, which the layers around it save too, and lse.
    assert found["none"] - 0.1 <= found["attention"] < found["none"]


def test_norms_of_queries_and_keys_cost_the_modes_that_recompute_them_nothing():
    assert kept("selective", qk_norm=True) == pytest.approx(kept("selective"))
    assert kept("full", qk_norm=True) == pytest.approx(kept("full"))


def test_the_measurement_sees_a_tensor_too_many(monkeypatch):
    monkeypatch.setattr(remat, "KEPT", (*remat.KEPT, "aten::gelu"))
    remat.kept_operators.cache_clear()
    try:
        assert kept("selective") > 15
    finally:
        monkeypatch.undo()
        remat.kept_operators.cache_clear()


def compiled_gradients(world):
    """Gradients by the compiler's graphs, and what they save for backward."""
    from torch._dynamo.utils import counters

    results = {}
    with graphs_alone():
        for mode in MODES[1:]:
            torch._dynamo.reset()
            counters.clear()
            results[mode] = gradients(mode, True, compiled=True), counters["stats"]["unique_graphs"]
        return results, {mode: kept(mode, compiled=True) for mode in ("selective", "full")}


def test_compiled_blocks_keep_as_little_and_are_one_graph():
    expected = gradients("none", True)
    [(results, elements)] = on_ranks(1, compiled_gradients)
    assert 10.9 <= elements["selective"] <= 11.2
    assert 1.0 <= elements["full"] <= 1.1
    assert set(results) == set(MODES[1:])
    for mode, (found, graphs) in results.items():
        assert graphs == 1, mode
        assert_same_gradients(found, expected)
