"""The rank that needs most is found without composing the memory of every rank."""

import pytest
from hand_made import easy
from made_up_counts import counts_of
from tiny import tiny_config

from titan_dit.planner import memory as memory_of
from titan_dit.planner.candidates import Candidate, Space

SCHEDULES = {"1f1b": 1, "gpipe": 1, "interleaved_1f1b": 2, "zbv_zero_bubble": 2, "dualpipev": 2}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layers", [16, 21])
def test_ranks_that_an_earlier_one_exceeds_do_not_change_the_highest(schedule, layers, monkeypatch):
    config = tiny_config(
        model={"hidden_size": 64, "num_heads": 4, "num_layers": layers, "latent_size": 64},
        training={"global_batch_size": 32},
    )
    candidate = Candidate(
        8, 1, 2, 1, 1, "ring", True, "auto", schedule, SCHEDULES[schedule], 1, "none", "off"
    )
    plan = Space(config, 16, easy()).plan(candidate)
    counts, composed = counts_of(plan), []
    every = memory_of.memory(plan, counts)
    at_peak = memory_of.at_peak
    monkeypatch.setattr(
        memory_of, "at_peak", lambda *given: composed.append(given) or at_peak(*given)
    )
    fewer = memory_of.memory(plan, counts, only_fullest=True)
    most, found = (max(sum(rank.values()) for rank in each) for each in (every, fewer))
    assert found == most
    assert len(fewer) == len(every) == 8
    assert all(sum(a.values()) >= sum(b.values()) for a, b in zip(fewer, every, strict=True))
    if schedule == "1f1b" and layers == 16:
        assert len(composed) < 5
