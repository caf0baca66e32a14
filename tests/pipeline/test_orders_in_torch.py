import re
from unittest import mock

import pytest
from known import SCHEDULES
from order_text import from_csv, render, to_csv
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    _Action,
    _PipelineScheduleRuntime,
    _simulate_comms_compute,
)

from titan_dit.pipeline.schedules.placement import pipeline_order, rank_of_stage, stages_per_rank

P, M = 4, 8


@pytest.fixture(params=SCHEDULES)
def schedule(request):
    return request.param


@pytest.fixture
def order(schedule):
    return pipeline_order(schedule, num_ranks=P, num_microbatches=M)


def test_torch_reads_every_action(order):
    for actions, row in zip(order, render(order), strict=True):
        for action, text in zip(actions, row, strict=True):
            read = _Action.from_str(text)
            assert (read.computation_type.value, read.stage_index, read.microbatch_index) == action


def test_torchs_runtime_loads_the_csv_and_comes_to_the_end(schedule, order, tmp_path):
    num_stages = P * stages_per_rank(schedule)
    # The defaults of this torch's options, without stages.
    with mock.patch.object(PipelineScheduleMulti, "__init__", return_value=None):
        runtime = _PipelineScheduleRuntime()
    runtime.pp_group_size, runtime._num_stages, runtime._n_microbatches = P, num_stages, M
    runtime._stages, runtime.pipeline_order = [], {}
    path = tmp_path / "order.csv"
    path.write_text(to_csv(order))
    assert from_csv(path.read_text()) == order
    runtime._load_csv(str(path), format="compute_only")
    places = {stage: rank_of_stage(schedule, stage, P) for stage in range(num_stages)}
    assert runtime.stage_index_to_group_rank == places

    # torch's simulator supports computations and messages, but not FSDP's actions.
    messages = {
        rank: [a for a in actions if not re.search("UNSHARD|RESHARD|REDUCE", str(a))]
        for rank, actions in runtime.pipeline_order_with_comms.items()
    }
    done = _simulate_comms_compute(messages, places.__getitem__, num_stages)
    assert [[str(a) for a in done[r] if a and a.is_compute_op] for r in range(P)] == render(order)
