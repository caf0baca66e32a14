import itertools
import random

import pytest
from known import SCHEDULES
from order_text import from_csv

from titan_dit.pipeline.schedules.placement import pipeline_order, stages_per_rank
from titan_dit.pipeline.schedules.proof import check, sequence_of
from titan_dit.pipeline.schedules.schedule import Action, Kind, inputs_of, num_stages_of, output_of

P, M = 3, 6


def planted(order, rank, change):
    """The order with one rank's actions changed."""
    actions = list(order[rank])
    change(actions)
    return (*order[:rank], tuple(actions), *order[rank + 1 :])


def faulty(schedule, order):
    check(order, num_stages=P * stages_per_rank(schedule), num_microbatches=M)


def has_a_cycle(order):
    """Kahn's algorithm on the graph of all waits: an independent, slower check for deadlocks."""
    num_stages = num_stages_of(order)
    maker = {output_of(action): action for actions in order for action in actions}
    waits = {a: {maker[n] for n in inputs_of(a, num_stages)} for row in order for a in row}
    for actions in order:
        for before, after in itertools.pairwise(actions):
            waits[after].add(before)
    while free := [action for action, on in waits.items() if not on]:
        for action in free:
            del waits[action]
        for on in waits.values():
            on.difference_update(free)
    return bool(waits)


@pytest.fixture(params=SCHEDULES)
def schedule(request):
    return request.param


@pytest.fixture
def order(schedule):
    return pipeline_order(schedule, num_ranks=P, num_microbatches=M)


def test_every_single_action_is_needed(schedule, order):
    for rank in range(P):
        for i in range(len(order[rank])):
            with pytest.raises(ValueError, match=r"times|has stages"):
                faulty(schedule, planted(order, rank, lambda actions, i=i: actions.pop(i)))


def test_no_action_may_come_twice(schedule, order):
    with pytest.raises(ValueError, match="forward 2 times"):
        faulty(schedule, planted(order, 1, lambda actions: actions.append(actions[0])))


def test_a_backward_before_its_forward_is_a_deadlock(schedule, order):
    def hurry(actions):
        back = next(a for a in actions if a.kind is not Kind.FORWARD)
        actions.remove(back)
        actions.insert(actions.index(back._replace(kind=Kind.FORWARD)), back)

    for rank in range(P):
        with pytest.raises(ValueError, match=rf"Deadlock: .*rank {rank} at"):
            faulty(schedule, planted(order, rank, hurry))


def test_a_weight_gradient_before_its_input_gradient_is_a_deadlock():
    order = pipeline_order("zbv_zero_bubble", num_ranks=P, num_microbatches=M)

    def swap(actions):
        i = next(i for i, a in enumerate(actions) if a.kind is Kind.BACKWARD_WEIGHT)
        actions[i - 1], actions[i] = actions[i], actions[i - 1]

    with pytest.raises(ValueError, match="Deadlock"):
        faulty("zbv_zero_bubble", planted(order, 0, swap))


def test_microbatches_out_of_sequence_are_found(schedule, order):
    first, second = (Action(Kind.FORWARD, P - 1, i) for i in (0, 1))

    def swap(actions):
        i, j = actions.index(first), actions.index(second)
        actions[i], actions[j] = second, first

    with pytest.raises(ValueError, match=rf"{first} comes after {second}"):
        faulty(schedule, planted(order, P - 1, swap))


def test_an_action_on_another_rank_is_found(schedule, order):
    moved = order[0][-1]
    without = planted(order, 0, lambda actions: actions.pop())
    with pytest.raises(ValueError, match=rf"Stage {moved.stage} is on several ranks: \[0, 1\]"):
        faulty(schedule, planted(without, 1, lambda actions: actions.append(moved)))


def test_a_stage_or_a_microbatch_too_many_is_found(schedule, order):
    num_stages = P * stages_per_rank(schedule)
    with pytest.raises(ValueError, match=f"not 0 to {num_stages}"):
        check(order, num_stages=num_stages + 1, num_microbatches=M)
    with pytest.raises(ValueError, match="forward 0 times"):
        check(order, num_stages=num_stages, num_microbatches=M + 1)
    with pytest.raises(ValueError, match=f"only {M - 1} microbatches"):
        check(order, num_stages=num_stages, num_microbatches=M - 1)


def test_input_and_weight_gradients_may_not_be_mixed_with_full_ones():
    check(from_csv("0F0,0I0,0W0\n"), num_stages=1, num_microbatches=1)
    for text in ("0F0,0I0\n", "0F0,0B0,0W0\n", "0F0,0I0,0W0,0B0\n", "0F0,0W0\n"):
        with pytest.raises(ValueError, match="times"):
            check(from_csv(text), num_stages=1, num_microbatches=1)


def test_messages_used_in_another_sequence_than_sent_are_found():
    # Rank 0 sends 0F0, 2F0, 0F1, 2F1; rank 1 wants both microbatches of stage 1 first.
    rows = "0F0,{},0B0,2B0,0B1,2B1\n1F0,1F1,3F0,3F1,3B0,1B0,3B1,1B1\n"
    sent = from_csv(rows.format("0F1,2F0,2F1").replace("0B0,2B0,0B1,2B1", "2B0,0B0,2B1,0B1"))
    check(sent, num_stages=4, num_microbatches=2)
    other = from_csv("0F0,2F0,0F1,2F1,2B0,0B0,2B1,0B1\n" + rows.splitlines()[1] + "\n")
    assert not has_a_cycle(other)
    with pytest.raises(ValueError, match=r"Rank 1 uses 0F1 of rank 0 before 2F0, which was sent"):
        check(other, num_stages=4, num_microbatches=2)


def test_deadlocks_are_found_just_where_waits_form_a_cycle(schedule, order):
    rng = random.Random(0)
    verdicts = []
    for _ in range(30):
        shuffled = order
        for _ in range(rng.choice([1, 3])):

            def swap(actions):
                i = rng.randrange(len(actions) - 1)
                actions[i], actions[i + 1] = actions[i + 1], actions[i]

            shuffled = planted(shuffled, rng.randrange(P), swap)
        verdicts.append(has_a_cycle(shuffled))
        if verdicts[-1]:
            with pytest.raises(ValueError, match="Deadlock"):
                sequence_of(shuffled)
        else:
            assert len(sequence_of(shuffled)) == sum(map(len, order))
    assert len(set(verdicts)) == 2
