import itertools
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch.distributed.pipelining.schedules as theirs
from commands import ROOT
from known import INTERLEAVED, SCHEDULES, SPLIT_BACKWARD
from order_text import render

from titan_dit.config.section import UserError
from titan_dit.pipeline.schedules.looped import rounds_are_equal
from titan_dit.pipeline.schedules.placement import pipeline_order, stages_of_rank, stages_per_rank
from titan_dit.pipeline.schedules.proof import check
from titan_dit.pipeline.schedules.schedule import Kind, peak_activations

CLASSES = {
    "gpipe": theirs.ScheduleGPipe,
    "1f1b": theirs.Schedule1F1B,
    "interleaved_1f1b": theirs.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": theirs.ScheduleInterleavedZeroBubble,
    "zbv_zero_bubble": theirs.ScheduleZBVZeroBubble,
    "dualpipev": theirs.ScheduleDualPipeV,
}


def cases(schedule, ranks=(1, 2, 3, 4, 6), microbatches=(1, 2, 3, 4, 5, 6, 8, 10, 12, 13)):
    """Every (p, v, m) of a grid that the schedule can run, with its order."""
    for p, m in itertools.product(ranks, microbatches):
        for v in (1, 2, 3) if schedule in INTERLEAVED else (1,):
            try:
                order = pipeline_order(schedule, num_ranks=p, num_microbatches=m, virtual_stages=v)
            except UserError:
                continue
            yield p, stages_per_rank(schedule, v), m, order


def as_torch_runs_it(schedule, p, m):
    """The actions of torch's single-stage schedules, rank by rank."""
    rows = []
    for rank in range(p):
        row = []
        stage = MagicMock(stage_index=rank)
        stage.forward_one_chunk = lambda i, *_, r=row, s=rank, **__: r.append(f"{s}F{i}")
        stage.backward_one_chunk = lambda i, r=row, s=rank, **__: r.append(f"{s}B{i}")
        for ops in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
            getattr(stage, ops).return_value = []
        run = MagicMock(_stage=stage, _n_microbatches=m, _num_stages=p)
        run._check_inputs.return_value = ([()] * m, [{}] * m)
        CLASSES[schedule]._step_microbatches(run)
        rows.append(row)
    return rows


def as_torch_plans_it(schedule, p, v, m):
    """The order of torch's multi-stage schedules, with overlapped pairs one after the other."""
    rounds = max(1, m // p)
    plan = SimpleNamespace(
        n_local_stages=v,
        pp_group_size=p,
        num_stages=p * v,
        _n_microbatches=m,
        number_of_rounds=rounds,
        microbatches_per_round=m // rounds,
    )
    make = CLASSES[schedule]._calculate_single_rank_operations
    return [
        [
            str(part)
            for action in make(plan, rank)
            if action
            for part in action.sub_actions or [action]
        ]
        for rank in range(p)
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_order_is_proven_right(schedule):
    count = 0
    for p, v, m, order in cases(schedule):
        check(order, num_stages=p * v, num_microbatches=m)
        count += 1
    assert count >= 15


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_orders_of_one_stage_per_rank_are_what_torch_runs(schedule):
    for p, _, m, order in cases(schedule, ranks=(1, 2, 4), microbatches=(1, 3, 4, 8)):
        # torch's 1F1B refuses fewer microbatches than ranks.
        if schedule == "gpipe" or m >= p:
            assert render(order) == as_torch_runs_it(schedule, p, m), (p, m)


@pytest.mark.parametrize("schedule", [*CLASSES][2:])
def test_orders_of_several_stages_per_rank_are_what_torch_plans(schedule):
    for p, v, m, order in cases(schedule):
        # With one stage per rank we take any number of microbatches, torch only equal rounds.
        if schedule not in INTERLEAVED or rounds_are_equal(p, m):
            assert render(order) == as_torch_plans_it(schedule, p, v, m), (p, v, m)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_rank_computes_on_the_stages_of_the_layout(schedule):
    for p, v, _, order in cases(schedule, ranks=(2, 3)):
        for rank, actions in enumerate(order):
            virtual = v if schedule in INTERLEAVED else 1
            stages = stages_of_rank(schedule, rank, p, virtual)
            assert {action.stage for action in actions} == set(stages)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_only_split_schedules_split_the_backward(schedule):
    kinds = {a.kind for *_, order in cases(schedule) for actions in order for a in actions}
    assert (Kind.BACKWARD_WEIGHT in kinds) == (schedule in SPLIT_BACKWARD)


@pytest.mark.parametrize(("p", "m"), list(itertools.product((1, 2, 4, 7), (1, 3, 8, 16))))
def test_activations_held_are_those_of_the_papers(p, m):
    def peaks(schedule, v=1):
        return peak_activations(
            pipeline_order(schedule, num_ranks=p, num_microbatches=m, virtual_stages=v)
        )

    assert peaks("gpipe") == (m,) * p
    assert peaks("1f1b") == tuple(min(m, p - rank) for rank in range(p))
    assert peaks("interleaved_zero_bubble") == (min(m, p),) * p
    assert max(peaks("zbv_zero_bubble")) <= 2 * min(m, p)
    if m % p == 0:
        for v in (2, 3):
            expected = [min(v * m, (v - 1) * p + 2 * (p - 1 - rank) + 1) for rank in range(p)]
            assert peaks("interleaved_1f1b", v) == tuple(expected)
    if m >= 2 * p:
        assert peaks("dualpipev") == (2 * p + 1,) * p


def test_schedules_but_for_torchs_classes_load_no_torch():
    folder = ROOT / "titan_dit/pipeline/schedules"
    names = {path.stem for path in folder.glob("*.py")} - {"torch_classes"}
    modules = [f"titan_dit.pipeline.schedules.{name}" for name in sorted(names)]
    assert len(modules) > 5
    program = f"import sys, {', '.join(modules)}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
