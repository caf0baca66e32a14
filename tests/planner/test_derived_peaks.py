"""Peaks of derived counts: which moment is the highest changes with the microbatch."""

from dataclasses import replace

import pytest
from made_up_counts import counts_of
from tiny import tiny_config

from titan_dit.plan import resolve
from titan_dit.planner.counts import between
from titan_dit.planner.work import AllocatedBytes

# Weights' gradients, 100 bytes, come first; later the activations, 20 a sample, are freed late.
SIZES = 2, 3


def counts(size):
    moments = AllocatedBytes(
        forward=(5.0 * size, 30.0 * size, 10.0 * size),
        backward=(0.0, 100.0 + size, 20.0 * size),
        gradients=(0.0, 100.0, 0.0),
    )
    own = counts_of(resolve(tiny_config(), 1))
    return with_block(own, moments, kept=10.0 * size)


def with_block(own, moments, kept):
    block = replace(own.block, allocated=moments, kept=kept, **moments.peaks(kept))
    return replace(own, blocks={"": block})


@pytest.mark.parametrize(
    ("size", "peak", "gradients"), [(2, 2.0, 100.0), (3, 3.0, 100.0), (8, 160.0, 0.0)]
)
def test_a_larger_microbatch_peaks_at_another_moment(size, peak, gradients):
    small, large = map(counts, SIZES)
    block = between(small, large, size - SIZES[0]).block
    assert block.kept == 10.0 * size
    assert block.forward_peak == 20.0 * size
    assert (block.backward_peak, block.backward_gradients) == (peak, gradients)


def test_parts_with_other_moments_have_the_peaks_on_a_line():
    small, large = map(counts, SIZES)
    fewer = AllocatedBytes(forward=(3.0,), backward=(100.0,), gradients=(100.0,))
    block = between(small, with_block(large, fewer, kept=30.0), 2.0).block
    assert block.allocated is None
    assert block.forward_peak == 40.0 + 2.0 * (0.0 - 40.0)
