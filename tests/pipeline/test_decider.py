"""The rules of a run-time order, on one rank by hand and on whole pipelines by chance."""

import itertools
import random

import pytest
from known import SCHEDULES
from order_text import from_csv, parse
from rule_book import drawn_order, played

from titan_dit.pipeline.schedules.decider import Decider, Waiting, windows
from titan_dit.pipeline.schedules.placement import pipeline_order
from titan_dit.pipeline.schedules.proof import check
from titan_dit.pipeline.schedules.schedule import (
    Kind,
    num_microbatches_of,
    num_stages_of,
    peak_activations,
)

MEMORY = (1.0, 1.0, 1.1, 1.25, 1.5, 2.0)


def rank_of(text, num_stages, memory=1.0, given=(), done=()):
    """The decider of one rank, told of arrivals, then of finished actions."""
    decider = Decider(from_csv(text)[0], num_stages, memory)
    for message in given:
        decider.arrived(parse(message))
    for action in done:
        decider.done(parse(action))
    return decider


def names(actions):
    return [str(action) for action in actions]


def test_a_rank_with_all_its_inputs_runs_its_plan():
    for schedule, m in itertools.product(SCHEDULES, (8, 16)):
        for actions in pipeline_order(schedule, num_ranks=4, num_microbatches=m):
            stages = {action.stage for action in actions}
            decider = Decider(actions, 8 if len(stages) == 2 else 4)
            for message in itertools.product("FI", range(8), range(m)):
                decider.arrived(parse("{1}{0}{2}".format(*message)))
            for action in actions:
                assert decider.next() == action
                decider.done(action)
            assert decider.finished
            assert decider.held == 0
            with pytest.raises(IndexError, match="Every action is done"):
                decider.next()


def test_a_rank_runs_what_has_arrived_and_the_first_in_plan_of_it():
    text = "1F0,1F1,3F0,1I0,1W0,3F1,3I0,3W0,1I1,1W1,3I1,3W1"
    assert rank_of(text, 5, given=["0F1"]).next() is Waiting.INPUT
    assert str(rank_of(text, 5, given=["2F0"]).next()) == "3F0"
    both = rank_of(text, 5, given=["2F0", "0F0"])
    assert [str(both.next()) for _ in range(3)] == ["1F0"] * 3
    late = rank_of(text, 5, given=["2F0", "4I0"], done=["3F0"])
    assert str(late.next()) == "3I0"
    late.arrived(parse("0F0"))
    assert str(late.next()) == "1F0"


def test_a_stage_takes_its_microbatches_in_sequence():
    text = "1F0,1F1,1I0,1I1,1W0,1W1"
    assert rank_of(text, 3, given=["0F1"]).next() is Waiting.INPUT
    both = rank_of(text, 3, given=["0F0", "0F1", "2I1"], done=["1F0", "1F1"])
    assert both.next() is Waiting.GRADIENT
    both.arrived(parse("2I0"))
    assert str(both.next()) == "1I0"
    with pytest.raises(AssertionError, match="1I1 is not the next of its stage"):
        both.done(parse("1I1"))


def test_a_full_backward_waits_for_the_weight_gradients_before_it():
    """The sum of a weight's gradients keeps its sequence, so it keeps its bits."""
    text = "1F0,1F1,1F2,1I0,1W0,1B1,1B2"
    decider = rank_of(text, 3, 2.0, ["0F0", "0F1", "0F2", "2I0", "2I1"], ["1F0", "1F1", "1I0"])
    assert str(decider.next()) == "1F2"
    decider.done(parse("1F2"))
    assert str(decider.next()) == "1W0"
    decider.done(parse("1W0"))
    assert str(decider.next()) == "1B1"


def test_the_causes_of_waiting_are_an_input_a_gradient_and_memory():
    text = "1F0,1F1,1B0,1F2,1B1,1B2"
    assert rank_of(text, 3).next() is Waiting.INPUT
    assert rank_of(text, 3, given=["0F0"], done=["1F0"]).next() is Waiting.GRADIENT
    full = rank_of(text, 3, given=["0F0", "0F1", "0F2"], done=["1F0", "1F1"])
    assert (full.window, full.held, full.next()) == (2, 2, Waiting.MEMORY)
    roomy = rank_of(text, 3, 1.5, given=["0F0", "0F1", "0F2"], done=["1F0", "1F1"])
    assert (roomy.window, str(roomy.next())) == (3, "1F2")
    full.arrived(parse("2I0"))
    assert str(full.next()) == "1B0"
    full.done(parse("1B0"))
    assert (full.held, str(full.next())) == (1, "1F2")


def test_the_window_counts_places_in_the_plan_not_what_is_held():
    """A forward that comes early must not take the place of one that others wait for."""
    text = "1F0,1F1,3F0,3F1,1B0,1B1,3B0,3B1"
    early = rank_of(text.replace("3B0,3B1", "1F2,3F2,3B0,3B1,1B2,3B2"), 5, given=["2F0"])
    assert early.window == 4
    early.done(parse("3F0"))
    early.arrived(parse("2F1"))
    early.done(parse("3F1"))
    early.arrived(parse("2F2"))
    # 3F2 is the sixth forward: two actions must be released before it, although only two are held.
    assert (early.held, early.next()) == (2, Waiting.MEMORY)
    early.arrived(parse("0F0"))
    assert str(early.next()) == "1F0"


def test_spare_memory_takes_turns_and_runs_weight_gradients_last():
    text = "1F0,1F1,1I0,1W0,1F2,1I1,1W1,1F3,1I2,1W2,1I3,1W3"
    given = [f"{stage}{kind}{n}" for stage, kind in ((0, "F"), (2, "I")) for n in range(4)]
    decider = rank_of(text, 3, 2.0, given)
    run = []
    while not decider.finished:
        run.append(decider.next())
        decider.done(run[-1])
    assert " ".join(names(run)) == "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3"
    assert [str(action) for action in run if action.kind is Kind.BACKWARD_WEIGHT] == [
        f"1W{n}" for n in range(4)
    ]
    tight = rank_of(text, 3, 1.0, given)
    for planned in text.split(","):
        assert str(tight.next()) == planned
        tight.done(parse(planned))


def test_a_weight_gradient_runs_where_memory_is_full():
    text = "1F0,1F1,1I0,1I1,1W0,1F2,1W1,1I2,1W2"
    given = ["0F0", "0F1", "0F2", "2I0", "2I1"]
    for memory in (1.0, 1.2):
        full = rank_of(text, 3, memory, given, ["1F0", "1F1", "1I0", "1I1"])
        assert (full.window, str(full.next())) == (2, "1W0")


def test_a_window_is_the_planned_peak_times_memory_rounded_down():
    order = pipeline_order("1f1b", num_ranks=3, num_microbatches=8)
    assert windows(order, 1.0) == peak_activations(order) == (3, 2, 1)
    assert windows(order, 1.5) == (4, 3, 1)
    assert windows(order, 1.999) == (5, 3, 1)
    wide = pipeline_order("gpipe", num_ranks=1, num_microbatches=25)
    # 25 x 1.16 is below 29 in floating point.
    assert windows(wide, 1.16) == (29,)


def test_inputs_may_arrive_within_the_window_and_one_beyond_for_each_stage():
    text = "1F0,1F1,3F0,3F1,1B0,1B1,1F2,1F3,3B0,3B1,3F2,3F3,1B2,1B3,3B2,3B3"
    decider = rank_of(text, 5)
    assert decider.window == 4
    # 0F2 and 2F2 are beyond the window of four forwards.
    assert names(decider.may_receive()) == ["0F0", "0F1", "0F2", "2F0", "2F1", "2F2"]
    assert decider.may_receive() == []
    for message, action in (("0F0", "1F0"), ("2I0", "1B0")):
        decider.arrived(parse(message))
        decider.done(parse(action))
    # A fifth forward, 1F2, is within the window: 0F3 may come, as the one beyond.
    assert "0F3" in names(decider.may_receive())


def test_a_gradient_may_arrive_once_its_forward_is_done_and_one_ahead():
    decider = rank_of("1F0,1F1,1F2,1F3,1B0,1B1,1B2,1B3", 3)
    assert names(decider.may_receive()) == ["0F0", "0F1", "0F2", "0F3"]
    for n in range(4):
        decider.arrived(parse(f"0F{n}"))
        decider.done(parse(f"1F{n}"))
    assert names(decider.may_receive()) == ["2I0", "2I1"]
    decider.arrived(parse("2I0"))
    assert decider.may_receive() == []
    decider.done(parse("1B0"))
    assert names(decider.may_receive()) == ["2I2"]


def test_messages_within_a_rank_need_no_transport():
    """Rank 1 of a V: the last stages of both directions meet on it."""
    order = pipeline_order("zbv_zero_bubble", num_ranks=2, num_microbatches=4)
    decider = Decider(order[1], 4)
    assert {(m.stage, m.kind) for m in decider.may_receive()} == {(0, Kind.FORWARD)}
    decider.arrived(parse("0F0"))
    decider.done(parse("1F0"))
    assert str(decider.next()) == "2F0"


def test_ranks_that_decide_never_wait_for_ever_nor_exceed_their_window():
    rng = random.Random(7)
    orders = [drawn_order(rng, [name]) for name in SCHEDULES for _ in range(40)]
    changed = 0
    for seed, order in enumerate(orders):
        found = played(order, rng.choice(MEMORY), seed)
        changed += tuple(map(tuple, found.run)) != order
    assert changed > 0.7 * len(orders)


@pytest.mark.long
def test_ten_thousand_pipelines_of_ranks_that_decide_finish():
    rng = random.Random(11)
    for seed in range(10_000):
        order = drawn_order(rng, SCHEDULES)
        found = played(order, rng.choice([1.0, rng.uniform(1, 2)]), seed)
        count = num_stages_of(order)
        ahead = num_microbatches_of(order)
        try:
            check(tuple(map(tuple, found.run)), num_stages=count, num_microbatches=ahead)
        except ValueError as error:
            # A rank may use messages of two stages in another sequence than they were sent.
            assert "was sent earlier" in str(error)  # noqa: PT017
