"""benchmarks/matrix.py: the layouts of the public table, and what its commands find."""

import json
import math
import sys
from dataclasses import replace

import pytest
from commands import ROOT, run

sys.path.insert(0, str(ROOT / "benchmarks"))
import matrix_page
import matrix_rows
import matrix_small
from matrix_ranks import Steps
from matrix_rows import Small

from titan_dit.config.section import UserError
from titan_dit.dry_run.memory import Peak, StorageKind
from titan_dit.plan import resolve

ROWS = matrix_rows.read()
SCRIPT = ROOT / "benchmarks" / "matrix.py"


def matrix(*flags, cwd, timeout=240):
    return run([sys.executable, SCRIPT, *flags], cwd, timeout)


def row_of(name):
    [row] = matrix_rows.chosen(ROWS, [name], None)
    return row


def test_the_table_has_eighteen_layouts_of_five_models():
    assert len({row.case for row in ROWS}) == 18
    assert {row.recipe for row in ROWS} == {
        "gpt_768x12",
        "gpt_1536x16",
        "gpt_2304x24",
        "gpt_3072x16",
        "gpt_3072x32",
    }
    row = row_of("2D_PP_2x4x4")
    assert (row.layout, row.ranks, row.heads) == ("dp 2 x tp 4 x pp 4", 32, 24)
    assert (row.megatron_ms, row.megatron_mib) == (15331.23, 10018)
    assert (row.oneflow_ms, row.oneflow_mib) == (13117.18, 11958)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.case)
def test_configs_have_the_layout_and_batch_of_the_row(row):
    full, small = matrix_rows.full_config(row), matrix_rows.small_config(row, Small())
    assert full.model.shape == (row.hidden, row.layers, row.heads)
    assert (full.precision.dtype, full.remat.mode) == ("fp16", "full")
    assert full.model.sequence_length == 2048
    assert small.model.shape == (8 * row.heads, row.layers, row.heads)
    for config in (full, small):
        plan = resolve(config, row.ranks)
        assert (plan.sizes.data, plan.sizes.tp, plan.sizes.pp) == (row.dp, row.tp, row.pp)
        assert plan.microbatch_size == row.microbatch_size
        assert plan.num_microbatches == row.num_microbatches
    one = matrix_rows.reference_config(row, Small())
    assert resolve(one, 1).sizes == resolve(one, 1).sizes.__class__()
    assert one.training.global_batch_size == row.global_batch_size
    assert one.remat.mode == "none"


def test_cases_are_chosen_by_name_and_ranks():
    assert [row.case for row in matrix_rows.chosen(ROWS, ["DP_1"], 8)] == ["DP_1x1x1_2_1536x16"]
    with pytest.raises(UserError, match="--only 3D: no such case"):
        matrix_rows.chosen(ROWS, ["3D"], None)
    with pytest.raises(UserError, match="--ranks 8: no chosen case"):
        matrix_rows.chosen(ROWS, ["2D_PP"], 8)


def peak_of(size):
    return Peak(dict.fromkeys(StorageKind, 0) | {StorageKind.PARAMETERS: size}, "")


ONE = Steps((6.0, 5.5), (2.0, 1.0), peak_of(1000), 0)
"""A process with 1,000 bytes at its peak."""


class Planned:
    """A dry run."""

    def __init__(self, size):
        self.ranks = [self]
        self.peak = peak_of(size)


@pytest.mark.parametrize(
    ("taken", "planned", "failure"),
    [
        (ONE, 1000, ""),
        (replace(ONE, losses=(6.0, 5.5002)), 1000, "loss differs by 3.6e-05"),
        (replace(ONE, losses=(6.0, math.nan)), 1000, "loss differs by inf"),
        (replace(ONE, norms=(2.0, 1.1)), 1000, "gradient norm differs by 1.0e-01"),
        (ONE, 950, "storages of pipeline rank 0 are 1.053 to 1.053 of the plan's"),
        (replace(ONE, peak=peak_of(1100)), 1000, ""),
        (
            replace(ONE, peak=peak_of(1300)),
            1000,
            "storages of pipeline rank 0 are 1.000 to 1.300 of the plan's",
        ),
        ("rank 3: no", 1000, "rank 3: no"),
    ],
)
def test_a_row_fails_that_differs_from_one_process_or_from_the_plan(
    monkeypatch, taken, planned, failure
):
    monkeypatch.setattr(matrix_small, "rehearsed", lambda *given: Planned(planned))
    of_ranks = taken if isinstance(taken, str) else [ONE, taken]
    found = matrix_small.compared(row_of("DP_8x1x1"), Small(), of_ranks, [ONE])
    assert found.failure == failure
    assert found.cells["result"] == (f"failed: {failure}" if failure else "ok")


def test_every_layout_on_eight_ranks_gives_the_loss_of_one_process(tmp_path):
    flags = ("--run", "--only", "2D_2x4x1", "MP_1x1x1", "--layers", "2", "--out", "run.json")
    done = matrix(*flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "run.json").read_text())
    assert [row["case"] for row in found["rows"]] == ["MP_1x1x1_8_768x12", "2D_2x4x1_16_1536x16"]
    for row in found["rows"]:
        assert row["result"] == "ok"
        assert float(row["off"]) <= 1e-5
        least, _, most = row["peak / planned"].split()
        assert float(least) == pytest.approx(1, abs=0.02)
        assert 1 <= float(most) < 1.2
    assert "| 2D_2x4x1_16_1536x16 | dp 2 x tp 4 | 8 |" in done.stdout
    # What the page says of it.
    text = matrix_page.page(matrix_rows.chosen(ROWS, ["2D_2x4x1"], None), [found])
    assert f"| {found['rows'][1]['peak MiB']} | {found['rows'][1]['planned MiB']} |" in text
    assert "`python benchmarks/matrix.py --run --only 2D_2x4x1" in text


def test_a_rank_that_fails_fails_its_row_alone(tmp_path):
    # 3 tokens do not divide by 2 tp ranks; the world of one rank is not concerned.
    flags = ("--run", "--only", "2D_4x2x1", "DP_1x1x1", "--layers", "1", "--tokens", "3")
    done = matrix(*flags, cwd=tmp_path)
    assert done.returncode == 1
    cells = {line.split(" | ")[0].strip("| "): line for line in done.stdout.splitlines()}
    assert cells["DP_1x1x1_2_1536x16"].endswith("| ok |")
    assert "failed: rank" in cells["2D_4x2x1_16_1536x16"]
    assert "tp" in cells["2D_4x2x1_16_1536x16"]
    assert "2D_4x2x1_16_1536x16 failed: " in done.stderr


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_all_eighteen_layouts_give_the_loss_of_one_process(tmp_path):
    done = matrix("--run", cwd=tmp_path, timeout=3500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("| ok |") == 18
    assert "  ETA " in done.stderr
