"""benchmarks/matrix.py: the layouts of the public table, and what its commands find."""

import json
import math
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import commands
import forked
import pytest
from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import matrix
import matrix_page
import matrix_rows
import matrix_small
from matrix_full import Storages
from matrix_ranks import Steps, Task, run
from matrix_rows import Small

from titan_dit.config.section import UserError
from titan_dit.dry_run.memory import Peak, StorageKind
from titan_dit.plan import resolve

ROWS = matrix_rows.read()


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
    assert (full.precision.dtype, full.activation_checkpoint.mode) == ("fp16", "full")
    assert full.model.sequence_length == 2048
    assert small.model.shape == (8 * row.heads, row.layers, row.heads)
    for config in (full, small):
        plan = resolve(config, row.ranks)
        assert (plan.sizes.data, plan.sizes.tp, plan.sizes.pp) == (row.dp, row.tp, row.pp)
    assert resolve(full, row.ranks).num_microbatches == row.num_microbatches
    assert resolve(small, row.ranks).num_microbatches == min(row.num_microbatches, 8)
    assert resolve(full, row.ranks).microbatch_size == row.microbatch_size
    assert resolve(small, row.ranks).microbatch_size == max(1, row.microbatch_size // 8)
    one = matrix_rows.reference_config(row, Small())
    assert str(resolve(one, 1).sizes) == "one rank"
    assert one.training.global_batch_size == small.training.global_batch_size
    assert one.activation_checkpoint.mode == "none"


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


@pytest.mark.parametrize(
    ("taken", "planned", "failure"),
    [
        (ONE, 1000, ""),
        (replace(ONE, losses=(6.0, 5.5002)), 1000, "loss differs by 3.6e-05"),
        (replace(ONE, losses=(6.0, math.nan)), 1000, "loss differs by inf"),
        (replace(ONE, norms=(2.0, 1.1)), 1000, "gradient norm differs by 1.0e-01"),
        (ONE, 950, "storages of pipeline rank 0 are 1.053 to 1.053 of the dry run's"),
        (replace(ONE, peak=peak_of(1100)), 1000, ""),
        (
            replace(ONE, peak=peak_of(1300)),
            1000,
            "storages of pipeline rank 0 are 1.000 to 1.300 of the dry run's",
        ),
        ("rank 3: no", 1000, "rank 3: no"),
    ],
)
def test_a_row_fails_that_differs_from_one_process_or_from_the_plan(
    monkeypatch, taken, planned, failure
):
    monkeypatch.setattr(matrix_small, "planned", lambda *given: [Storages(planned, 0)])
    of_ranks = taken if isinstance(taken, str) else [ONE, taken]
    found = matrix_small.compared(row_of("DP_8x1x1"), Small(), of_ranks, [ONE])
    assert found.failure == failure
    assert found.cells["result"] == (f"failed: {failure}" if failure else "ok")


@pytest.fixture
def elsewhere(monkeypatch):
    """Dry runs in another process: the shape checks of the tests reject sharded tokens."""
    with ProcessPoolExecutor(1, forked.context()) as pool:
        planned = matrix_small.planned
        monkeypatch.setattr(
            matrix_small, "planned", lambda *given: pool.submit(planned, *given).result()
        )
        yield


def test_a_layout_on_eight_ranks_gives_the_loss_of_one_process(
    elsewhere, monkeypatch, tmp_path, capsys
):
    flags = ["--run", "--only", "2D_2x4x1", "--layers", "2", "--tokens", "16"]
    out = ["--out", str(tmp_path / "run.json")]
    monkeypatch.setattr(sys, "argv", ["matrix.py", *flags, *out])
    monkeypatch.setattr(matrix.signal, "signal", lambda *_: None)  # It would outlive the test.
    assert matrix.main() == 0
    found = json.loads((tmp_path / "run.json").read_text())
    [row] = found["rows"]
    assert (row["case"], row["result"]) == ("2D_2x4x1_16_1536x16", "ok")
    assert float(row["off"]) <= 1e-5
    assert 0 < float(row["norm off"]) <= 1e-5  # Other ranks add in another order.
    least, _, most = row["peak / dry run"].split()
    assert float(least) == pytest.approx(1, abs=0.02)
    assert 1 <= float(most) < 1.2
    assert float(row["formula MiB"]) == pytest.approx(float(row["dry run MiB"]), rel=0.05)
    said = capsys.readouterr()
    assert "| 2D_2x4x1_16_1536x16 | dp 2 x tp 4 | 8 |" in said.out
    assert "2D_2x4x1_16_1536x16  ok" in said.err
    # What the page says of it.
    text = matrix_page.page(matrix_rows.chosen(ROWS, ["2D_2x4x1", "2D_4x2x1"], None), [found])
    assert f"| {row['peak MiB']} | {row['dry run MiB']} | {row['formula MiB']} |" in text
    assert "| dp 4 x tp 2 | 593.68 | 9642 | 543.88 | 7368 | - | - | - | - | - | - |" in text
    assert f"`python benchmarks/matrix.py {' '.join(flags)}`, commit " in text


@dataclass(frozen=True, kw_only=True)
class Dies(matrix_rows.RandomTokens):
    """Data that end the process which opens them."""

    name = "test_matrix_benchmark:Dies"

    def open(self):
        os._exit(3)


def test_a_task_that_fails_leaves_the_others_alone():
    forked.context()
    tables = matrix_rows.small_tables(row_of("DP_1x1x1"), Small(layers=1, tokens=8, steps=1))
    wide = tables | {"model": tables["model"] | {"hidden_size": 129}}
    dies = tables | {"data": tables["data"] | {"name": Dies.name}}
    tasks = [Task("wide", wide, 1), Task("dies", dies, 1), Task("good", tables, 1)]
    steps = []
    found = run(tasks, 1, 60, lambda task: steps.append(task.name))
    assert found["wide"].startswith("rank 0: UserError: [model] hidden_size=129 is not divisible")
    assert found["dies"] == "rank 0 has died"
    [good] = found["good"]
    assert len(good.losses) == 1
    assert steps == ["good"]
    assert run(tasks[2:], 1, 0.01, steps.append) == {"good": "no step has ended in 0 s"}


def matrix_in(folder, *flags, timeout=240):
    script = ROOT / "benchmarks" / "matrix.py"
    return commands.run([sys.executable, script, *flags], folder, timeout=timeout)


@pytest.mark.long
def test_the_planned_memory_is_that_of_the_rehearsal(tmp_path):
    files = tmp_path / "planned.json", tmp_path / "rehearsed.json"
    modes = ("--plan", "v100_16"), ("--rehearse",)
    for what, file in zip(modes, files, strict=True):
        done = matrix_in(tmp_path, *what, "--only", "MP_1x1x1", "--out", file)
        assert done.returncode == 0, done.stderr
    planned, rehearsed = (json.loads(file.read_text()) for file in files)
    [plan], [rehearsal] = planned["rows"], rehearsed["rows"]
    assert float(plan["allocated GiB"]) == pytest.approx(float(rehearsal["peak GiB"]), rel=0.03)
    assert float(plan["allocated GiB"]) < float(plan["in total GiB"])
    assert plan["fits"] == "yes"
    # Eight samples of 3 x 0.26 TFLOP and recomputation: a V100 with 125 TFLOP/s needs 68 ms.
    assert 68 < float(plan["planned ms"]) < 1000
    kinds = [float(rehearsal[kind]) for kind in StorageKind]
    assert sum(kinds) == pytest.approx(float(rehearsal["peak GiB"]), abs=0.05)
    text = matrix_page.page([row_of("MP_1x1x1")], [planned, rehearsed])
    cells = [plan["planned ms"], plan["in total GiB"], rehearsal["peak GiB"]]
    assert f"| 525.21 | 7416 | {' | '.join(cells)} |" in text
    assert "- v100_16 ms, v100_16 GiB: `python benchmarks/matrix.py --plan v100_16" in text
    others = planned | {"rows": [plan | {"case": "DP_1x1x1_2_1536x16", "planned ms": "7"}]}
    both = [row_of("DP_1x1x1"), row_of("MP_1x1x1")]
    merged = matrix_page.page(both, [planned, others])
    assert f"| 525.21 | 7416 | {plan['planned ms']} | {plan['in total GiB']} |" in merged
    assert f"| 406.16 | 11066 | 7 | {plan['in total GiB']} |" in merged
    assert merged.count("- v100_16 ms, v100_16 GiB of 1 cases: ") == 2
    document = "# A page\n\n| case |\n|---|\n| old |\n\n- old: 1\n\n## More\n\n- 2\n"
    renewed = matrix_page.renew(document, text)
    assert renewed == f"# A page\n\n{text}\n\n## More\n\n- 2\n"
    assert matrix_page.renew(renewed, text) == renewed


def test_an_unknown_device_is_one_line(tmp_path):
    done = matrix_in(tmp_path, "--plan", "v101")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith("error: --device v101: unknown device.")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_all_eighteen_layouts_give_the_loss_of_one_process(tmp_path):
    # A layer for each of up to four stages: 32 ranks share this machine's cores.
    done = matrix_in(tmp_path, "--run", "--layers", "4", timeout=3500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("| ok |") == 18
    assert "  ETA " in done.stderr
