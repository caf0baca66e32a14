"""The last line of a dry run: a layout with fewer axes that fits the same device."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from tiny import tiny_config
from unchecked import unchecked

from titan_dit.config import catalog, config_file
from titan_dit.config.layout import ParallelConfig
from titan_dit.config.section import UserError
from titan_dit.dry_run import report, simpler
from titan_dit.dry_run.command import dry_run
from titan_dit.parallel import mesh
from titan_dit.parallel.mesh import AxisSizes
from titan_dit.plan import resolve

GIB = 2**30


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def planned(world, **sections):
    config = tiny_config(**sections)
    return config, resolve(config, world)


def recipe(name, world, *flags):
    config = config_file.load(["--config", name, *flags], catalog.variant)
    return config, resolve(config, world)


TP4_PP4 = ("--parallel.dp_replicate", "1", "--parallel.tp", "4", "--parallel.pp", "4")


def test_axes_are_dropped_from_pp_to_cp_and_the_simplest_layout_comes_first():
    axes = {"pp": 2, "tp": 2, "cp": 2}
    found = [*simpler.candidates(*planned(8, parallel=axes, training={"microbatch_size": 2}))]
    assert [str(one.plan.sizes) for one in found] == [
        "dp_shard 8",
        "dp_shard 4 x cp 2",
        "dp_shard 2 x cp 2 x tp 2",
    ]
    assert [one.flags for one in found] == [
        "--parallel.tp 1 --parallel.cp 1 --parallel.pp 1",
        "--parallel.tp 1 --parallel.pp 1",
        "--parallel.pp 1",
    ]


def test_the_flags_name_the_candidate_and_keep_batch_and_microbatch():
    config, plan = planned(4, parallel={"pp": 2, "dp_shard": 2}, training={"microbatch_size": None})
    [found] = simpler.candidates(config, plan)
    # Without a pipeline the microbatch would be the whole share of a rank.
    assert found.flags == "--parallel.dp_shard -1 --parallel.pp 1 --training.microbatch_size 1"
    assert found.plan.microbatch_size == plan.microbatch_size == 1
    assert found.plan.global_batch_size == plan.global_batch_size


@dataclass(frozen=True, kw_only=True)
class SixAxes(AxisSizes):
    dp_far: int = mesh.axis(samples=True, copies=True, loss=True)


@dataclass(frozen=True, kw_only=True)
class SixKeys(ParallelConfig):
    dp_far: int = 1


def test_an_axis_that_is_not_dropped_keeps_its_ranks(monkeypatch):
    """docs/adding/mesh-axis.md: a sixth axis is two fields, and `simpler` has no row of it."""
    config, plan = planned(4, parallel={"pp": 2}, training={"microbatch_size": 4})
    monkeypatch.setattr(mesh, "AxisSizes", SixAxes)
    monkeypatch.setattr(simpler, "LARGEST_SHARD", 2)
    six = SixKeys(**{**vars(config.parallel), "dp_far": 2})
    plan = replace(plan, sizes=mesh.solve(six, 8), world_size=8)
    found = simpler.without(replace(config, parallel=six), plan, ["pp"])
    assert (found.parallel.dp_replicate, found.parallel.dp_far) == (2, 2)
    assert math.prod(vars(mesh.solve(found.parallel, 8)).values()) == 8
    assert found.training.microbatch_size == 2


def test_async_tp_is_dropped_with_tp():
    parallel = {"tp": 2, "async_tp": True}
    [found] = simpler.candidates(*planned(2, parallel=parallel, compile={"enabled": True}))
    assert found.flags.startswith("--parallel.tp 1 --parallel.async_tp false")


def test_keys_of_run_time_order_are_dropped_with_pp():
    pipeline = {"order": "run_time", "memory": 1.5, "transport": "process_group"}
    sections = {"parallel": {"pp": 2}, "training": {"microbatch_size": 2}}
    [found] = simpler.candidates(*planned(2, pipeline=pipeline, **sections))
    words = "--pipeline.order planned --pipeline.memory 1.0 --pipeline.transport auto"
    assert words in found.flags
    assert simpler.word("") == '""'


def test_a_layout_that_the_optimizer_refuses_is_not_named():
    def refused(*_):
        raise UserError("[optimizer] no.")

    [line] = simpler.lines(*planned(2, parallel={"tp": 2}), GIB, refused)
    assert line.endswith("fits a GPU of 80 GB: dp_shard 2 is refused: [optimizer] no.")


def test_many_data_ranks_become_replicas_of_shards():
    first, *_ = simpler.candidates(*recipe("dit_7b", 1024, *TP4_PP4))
    assert str(first.plan.sizes) == "dp_replicate 8 x dp_shard 128"
    assert "--parallel.dp_replicate 8" in first.flags


def test_a_batch_that_more_data_ranks_cannot_share_keeps_its_axes():
    # 64 samples: 256 ranks need cp or pp.
    sizes = [str(one.plan.sizes) for one in simpler.candidates(*recipe("dit_3b", 256))]
    assert sizes == ["dp_replicate 2 x dp_shard 32 x cp 4"]
    [line] = simpler.lines(*recipe("dit_3b", 1024), GIB, lambda *_: GIB)
    assert line.endswith("fits a GPU of 80 GB: none can run this model and batch")


def peaks(*gib):
    given = iter(gib)
    return lambda *_: next(given) * GIB


def test_every_known_device_gets_a_verdict():
    header, *rows = report.verdicts(60 * GIB)
    assert header == ["device", "usable", "needed", "fits"]
    fits = {name: verdict for name, *_, verdict in rows}
    assert fits["L40S, 48 GB"] == "no"
    assert fits["A100, H100, 80 GB"] == "yes"
    assert fits["H200, 141 GB"] == "yes"
    assert set(report.DEVICE_WORDS) == set(report.StorageKind)


@pytest.mark.parametrize(
    ("own", "others", "words"),
    [
        (10, (25,), "simpler dp_shard 8 needs 25.00 GiB and fits a GPU of 80 GB, too: --parallel"),
        (10, (90, 30), "simpler dp_shard 4 x cp 2 needs 30.00 GiB and fits a GPU of 80 GB"),
        # The layout itself needs a larger GPU.
        (100, (120,), "simpler dp_shard 8 needs 120.00 GiB and fits a GPU of 141 GB"),
        (10, (90, 80, 75), "fits a GPU of 80 GB: dp_shard 8 needs 90.00 GiB; dp_shard 4 x cp 2 ne"),
    ],
)
def test_the_first_that_fits_the_device_is_named_with_its_peak(own, others, words):
    given = planned(8, parallel={"pp": 2, "tp": 2, "cp": 2}, training={"microbatch_size": 2})
    [line] = simpler.lines(*given, own * GIB, peaks(*others))
    assert words in line


def test_there_is_no_line_where_nothing_is_simpler_or_nothing_holds_the_layout():
    assert [*simpler.lines(*planned(4), GIB, peaks())] == []
    assert [*simpler.lines(*planned(2, parallel={"tp": 2}), 400 * GIB, peaks())] == []


def test_the_memory_of_this_machines_gpu_decides(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(simpler, "rank_memory", lambda: (20 * GIB, "the GPU"))
    assert simpler.device_for(10 * GIB) == ("the GPU", 18 * GIB)
    assert simpler.device_for(19 * GIB) is None


def test_a_dry_run_ends_with_the_simpler_layout(capsys):
    with unchecked():
        dry_run(tiny_config(parallel={"tp": 2}), 2)
    *lines, verdict, line = capsys.readouterr().out.splitlines()
    for column in ("parameters", "activations", "all-gather", "peak"):
        assert any(row.startswith(f"  {column} ") for row in lines), column
    assert any(row.split() == ["H200,", "141", "GB", "125.7", "0.00", "yes"] for row in lines)
    assert verdict.startswith("a device needs ")
    assert line.startswith("simpler dp_shard 2 needs 0.00 GiB and fits a GPU of 80 GB, too: ")
    assert "--parallel.tp 1" in line
    assert line.endswith("which is faster: see `plan`)")
