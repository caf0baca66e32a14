"""Compiled, masked tokens are the same ones, in one graph."""

import pytest
import torch
from harness import on_ranks
from test_masked_token import PAIRS, WINDOWS, prepared_of, rng_of, sentences, windows
from tiny import graphs_alone

from titan_dit.config.layout import CompileConfig
from titan_dit.parallel.compile import compile_prepare, num_graphs


def differences(world, facts, batch):
    """Names of the tensors that differ, and the number of graphs for three batches."""
    objective, _ = prepared_of(facts, batch)
    found, start = [], num_graphs()
    with graphs_alone():
        prepare = compile_prepare(objective, CompileConfig(enabled=True), world.device)
        for seed in range(3):
            ours = prepare(batch, rng_of(batch, 7))
            plain = objective.prepare(batch, rng_of(batch, 7))
            for kind in ("inputs", "context", "targets", "static"):
                mine, other = getattr(ours, kind), getattr(plain, kind)
                found += [(seed, k) for k in other if not torch.equal(mine[k], other[k])]
    return found, num_graphs() - start


@pytest.mark.parametrize(("facts", "batch"), [(WINDOWS, windows(8)), (PAIRS, sentences(8))])
def test_compiled_draws_are_equal_and_one_graph(facts, batch):
    [(found, graphs)] = on_ranks(1, differences, facts, batch)
    assert found == []
    assert graphs == 1
