import pytest

from titan_dit.pipeline.schedules.schedule import (
    ANY_STAGE,
    Action,
    Kind,
    peak_activations,
    with_microbatches,
)

F, B, I, W = Kind  # noqa: E741


def test_an_action_reads_as_torch_writes_it():
    assert str(Action(F, 2, 0)) == f"{Action(F, 2, 0)}" == "2F0"
    assert str(Action(W, 11, 40)) == "11W40"


def test_microbatches_are_numbered_by_stage_and_direction():
    numbered = with_microbatches([(F, 0), (F, 0), (F, 3), (B, 0), (I, 0), (W, 0)])
    assert " ".join(map(str, numbered)) == "0F0 0F1 3F0 0B0 0I1 0W1"


def test_a_weight_gradient_belongs_to_the_oldest_input_gradient():
    inputs = [(I, 0), (I, 3), (I, 0)]
    any_stage = with_microbatches([*inputs, *[(W, ANY_STAGE)] * 3])
    assert " ".join(map(str, any_stage[3:])) == "0W0 3W0 0W1"
    by_stage = with_microbatches([*inputs, (W, 0), (W, 0), (W, 3)])
    assert " ".join(map(str, by_stage[3:])) == "0W0 0W1 3W0"


def test_a_weight_gradient_without_an_input_gradient_is_a_fault():
    with pytest.raises(StopIteration):
        with_microbatches([(F, 0), (W, 0)])


def test_activations_live_until_the_weight_gradient():
    split = with_microbatches([(F, 0), (I, 0), (F, 0), (I, 0), (W, 0), (W, 0), (F, 0), (B, 0)])
    full = with_microbatches([(F, 0), (B, 0), (F, 0), (B, 0)])
    assert peak_activations((split, full, ())) == (2, 1, 0)
