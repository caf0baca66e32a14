"""What `plan` prints of its choice: flags, origins, equals."""

import sys
from dataclasses import replace

import pytest
from commands import ROOT
from hand_made import easy
from made_up_counts import counts_of
from tiny import tiny_config
from tiny_joint import joint_config

from titan_dit.config.section import UserError
from titan_dit.opening import bucket_facts
from titan_dit.plan import resolve
from titan_dit.planner import report
from titan_dit.planner.candidates import Space
from titan_dit.planner.choice import search, with_buckets_timed
from titan_dit.planner.hardware import device_of
from titan_dit.planner.search import CostModel, equally_fast, tp_crosses_nodes
from titan_dit.planner.step import Estimate

sys.path.insert(0, str(ROOT / "benchmarks"))
import matrix_plan
import matrix_rows

# Nodes of 6: of the groups of 4 ranks every third is on two nodes.
DEVICE = easy(gpus_per_node=6, inner_gb_per_s={2: 50.0}, error=0.1)
MODEL = CostModel(counts=counts_of)


def no_fake_step(plan, rank):
    raise UserError("no fake step in this test")


def choice_of(gpus, fixed, device=DEVICE, **parallel):
    config = tiny_config(
        model={"hidden_size": 64, "num_heads": 4, "num_layers": 4, "latent_size": 64},
        training={"global_batch_size": 24, "steps": 10},
        parallel=parallel,
    )
    space = Space(config, gpus, device, fixed)
    return search(space, MODEL, counts_of, no_fake_step, 3)


@pytest.fixture(scope="module")
def across():
    return choice_of(12, ["parallel.tp"], tp=4)


def test_every_layout_whose_tp_leaves_a_node_says_so(across):
    assert across.runner_up
    assert all(tp_crosses_nodes(row.plan.sizes, DEVICE) for row in across.rows)
    lines = list(report.lines(across, 3, "tiny.toml"))
    table = [line for line in lines if "tp 4" in line and " x " in line and "none" in line]
    assert len(table) >= 3
    said = [line for line in lines if line.startswith(("best ", "runner-up "))]
    assert len(said) == 2
    for line in (*table, *said):
        assert report.ACROSS in line, line
    assert sum(line.startswith(f"note    {report.ACROSS}: groups leave") for line in lines) == 1
    found = report.as_json(across, 3, "tiny.toml")
    assert all(row["tp_crosses_nodes"] for row in (found["best"], *found["layouts"]))


def test_a_layout_whose_tp_stays_inside_says_nothing():
    inside = choice_of(12, ["parallel.tp"], tp=2)
    assert report.ACROSS not in "\n".join(report.lines(inside, 3, "tiny.toml"))
    assert not report.as_json(inside, 3, "tiny.toml")["best"]["tp_crosses_nodes"]


def test_the_matrix_flags_its_rows_with_tp_across_nodes():
    device, flagged = device_of("h100"), []
    for row in matrix_rows.read():
        plan = resolve(matrix_rows.full_config(row), row.ranks)
        cells = matrix_plan.plan_row(row, plan, counts_of(plan), device)
        assert float(cells["planned ms"].split()[0]) > 0
        if cells["planned ms"].endswith(f"({report.ACROSS})"):
            flagged.append(row.case)
    assert flagged == ["MP_1x16x1_16_3072x16", "MP_1x32x1_16_3072x32"]


def test_a_device_is_calibrated_if_it_has_rows(across):
    rows, versions = {"one": "measured 1 ms"}, {"torch": "2.13.0"}
    assert report.origin(replace(DEVICE, rows=rows)).startswith("calibrated")
    assert "not calibrated" in report.origin(replace(DEVICE, versions=versions))


def test_the_verdict_counts_the_equals_and_names_their_rule(across):
    alike = len(equally_fast(across.rows, DEVICE.error))
    _, why = report.verdict(across)
    assert ("fewest axes" in why) == (alike > 1)
    assert alike == 1 or f"of {alike} equals" in why


def test_short_times_have_three_digits():
    assert [report.milliseconds(s) for s in (0.00868, 0.013, 0.2834, 2.8)] == [
        "8.68", "13.0", "283", "2,800",
    ]  # fmt: skip


def test_a_step_of_each_bucket_is_timed_once_for_as_many_tokens_and_costs_count_their_mean():
    # 8, 4 and again 8 tokens a sample; 21 rows each.
    config = joint_config(
        data={"others": [[4, 4], [8, 4]]},
        training={"global_batch_size": None, "tokens_per_step": 64, "batch_multiple": 1},
    )
    space = Space(config, 1, DEVICE)
    choice = search(space, MODEL, counts_of, no_fake_step, 1)
    facts, timed = bucket_facts(config), []

    def time_of(plan, model):
        timed.append((plan.spec.num_tokens, model.latent_size))
        seconds = plan.spec.num_tokens**2 / 1e3
        return Estimate(seconds=seconds, terms={}, critical=0, idle=())

    models = [each for _, each in config.objective.sized_models(config.model, facts)]
    found = with_buckets_timed(choice, models, facts.bucket_counts, time_of)
    assert timed == [(8, (4, 8)), (4, (4, 4))]
    shares = [each.share for each in found.buckets]
    assert shares == pytest.approx([2 / 5, 1 / 5, 2 / 5])  # Steps of 8, 16 and 8 samples.
    assert found.mean_seconds == pytest.approx((2 * 64 + 16 + 2 * 64) / 5 / 1e3)
    lines = list(report.buckets(found))
    assert [line.split()[0] for line in lines[2:6]] == ["2x4x8", "2x4x4", "2x8x4", "mean"]
    assert lines[2].split()[1:6] == ["8", "8", "40.0%", "64.0", "8.00"]
    assert lines[5].split() == ["mean", "100.0%", "54.4"]
    told = report.as_json(found, 1, "tiny.toml")
    assert [each["tokens"] for each in told["buckets"]] == [8, 4, 8]
    assert told["gpu_hours"] == pytest.approx(4 * 0.0544 / 3600)
    assert list(report.buckets(choice)) == []
