import itertools
import subprocess
import sys

import pytest
from commands import ROOT
from known import INTERLEAVED, SCHEDULES, SPLIT_BACKWARD

from titan_dit.config.section import UserError
from titan_dit.pipeline.schedules.placement import pipeline_order, stages_of_rank, stages_per_rank
from titan_dit.pipeline.schedules.proof import check
from titan_dit.pipeline.schedules.schedule import Kind, peak_activations


def cases(schedule, ranks=(1, 2, 3, 4, 6), microbatches=(1, 2, 3, 4, 5, 6, 8, 10, 12, 13)):
    """Every (p, v, m) of a grid that the schedule can run, with its order."""
    for p, m in itertools.product(ranks, microbatches):
        for v in (1, 2, 3) if schedule in INTERLEAVED else (1,):
            try:
                order = pipeline_order(schedule, num_ranks=p, num_microbatches=m, virtual_stages=v)
            except UserError:
                continue
            yield p, stages_per_rank(schedule, v), m, order


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_order_is_proven_right(schedule):
    count = 0
    for p, v, m, order in cases(schedule):
        check(order, num_stages=p * v, num_microbatches=m)
        count += 1
    assert count >= 15


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
    assert peaks("looped_bfs", 3) == (3 * m,) * p
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
