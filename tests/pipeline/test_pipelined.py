"""The order of a pass without backward."""

from collections import Counter

import pytest

from titan_dit.pipeline.pipelined import forward_order
from titan_dit.pipeline.schedules.proof import sequence_of


@pytest.mark.parametrize("stage_ranks", [[0, 1], [0, 1, 0, 1], [0, 1, 2, 2, 1, 0], [0, 1, 2] * 3])
def test_every_stage_runs_every_microbatch_once_and_after_the_stage_before_it(stage_ranks):
    order = forward_order(stage_ranks, 3)
    sequence = sequence_of(order)  # Raises on a deadlock.
    assert set(Counter(sequence).values()) == {1}
    assert len(sequence) == 3 * len(stage_ranks)
    assert all(stage_ranks[action.stage] == rank for rank, action in sequence)
