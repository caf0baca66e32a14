import pytest
from known import INTERLEAVED, SCHEDULES, V_SHAPED
from torch.distributed.pipelining._utils import generate_rank_to_stage_mapping

from titan_dit.config.layout import PipelineConfig
from titan_dit.config.section import UserError
from titan_dit.pipeline.schedules.looped import round_size
from titan_dit.pipeline.schedules.placement import (
    check_schedule,
    rank_of_stage,
    stages_of_rank,
    stages_per_rank,
)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("p", [1, 2, 5])
@pytest.mark.parametrize("virtual_stages", [1, 2, 3])
def test_layouts_are_those_of_torch(schedule, p, virtual_stages):
    v = virtual_stages if schedule in INTERLEAVED else 1
    num_stages = p * stages_per_rank(schedule, v)
    style = "v" if schedule in V_SHAPED else "loop"
    expected = generate_rank_to_stage_mapping(p, num_stages, style=style)
    for rank in range(p):
        stages = stages_of_rank(schedule, rank, p, v)
        assert list(stages) == expected[rank]
        assert [rank_of_stage(schedule, stage, p) for stage in stages] == [rank] * len(stages)


@pytest.mark.parametrize("schedule", V_SHAPED)
def test_a_v_holds_two_stages_per_rank(schedule):
    assert stages_per_rank(schedule) == stages_per_rank(schedule, 2) == 2
    with pytest.raises(UserError, match=r"always has two stages per rank, but virtual_stages=3"):
        stages_per_rank(schedule, 3)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_schedules_without_virtual_stages_name_the_one_with(schedule):
    with pytest.raises(UserError, match=r'virtual_stages=2\. Set schedule="interleaved_1f1b"'):
        stages_per_rank(schedule, 2)


def test_unknown_schedules_are_answered_with_the_known():
    with pytest.raises(UserError, match=r'schedule="1f1c" is unknown. Did you mean 1f1b'):
        stages_per_rank("1f1c")
    with pytest.raises(UserError, match=r'schedule="1f1c" is not one of "gpipe", "1f1b", '):
        PipelineConfig(schedule="1f1c")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_virtual_stages_are_refused(schedule):
    with pytest.raises(UserError, match=r"\[pipeline\] virtual_stages=0 must be at least 1"):
        stages_per_rank(schedule, 0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_without_microbatches_is_refused(schedule):
    with pytest.raises(UserError, match="needs at least one microbatch, not 0"):
        check_schedule(schedule, num_ranks=2, num_microbatches=0)


def test_dualpipev_says_how_many_microbatches_it_needs():
    check_schedule("dualpipev", num_ranks=4, num_microbatches=8)
    with pytest.raises(UserError) as error:
        check_schedule("dualpipev", num_ranks=4, num_microbatches=7)
    text = str(error.value)
    assert '[pipeline] schedule="dualpipev" on [parallel] pp=4 needs at least' in text
    assert "8 microbatches, but microbatches=7. Set a smaller [training] microbatch_size" in text


@pytest.mark.parametrize("schedule", [name for name in INTERLEAVED if name != "looped_bfs"])
@pytest.mark.parametrize(("m", "fewer", "more"), [(7, None, None), (9, 8, 10), (13, 12, 15)])
def test_unequal_rounds_are_answered_with_the_nearest_equal_ones(schedule, m, fewer, more):
    def run(num_microbatches, virtual_stages=2):
        check_schedule(
            schedule,
            num_ranks=4,
            num_microbatches=num_microbatches,
            virtual_stages=virtual_stages,
        )

    run(m, virtual_stages=1)
    if fewer is None:
        return run(m)
    run(fewer)
    run(more)
    with pytest.raises(UserError, match=rf"microbatches={m}.*has {fewer} or {more}, "):
        run(m)
    return None


def test_rounds_are_as_long_as_there_are_ranks_or_a_little_longer():
    assert [round_size(4, m) for m in (1, 3, 4, 6, 7, 8, 10, 12)] == [1, 3, 4, 6, 7, 4, 5, 4]
