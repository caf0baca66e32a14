"""[profile] from the command line, and its overhead if disabled."""

import contextlib
import gzip
import json
import time

import pytest
import torch
from commands import train
from PIL import Image

from titan_dit.config.operation import ProfileConfig
from titan_dit.observe.profile import MARK, SLOWED, StepProfiler, summarize

CPU = torch.device("cpu")


def table_of(text):
    """{kind: ms per step} of a summary."""
    rows = [line.rsplit(maxsplit=2) for line in text.splitlines() if line.endswith("%")]
    return {what: float(value) for what, value, _ in rows}


def test_a_run_writes_the_profiles_of_its_ranks(tmp_path):
    flags = ("--training.steps", 6, "--training.global_batch_size", 8, "--sampling.every", 0,
             "--checkpoint.every", 0, "--metrics.tensorboard", "false", "--metrics.every", 0,
             "--profile.enabled", "true", "--profile.start", 3, "--profile.steps", 2,
             "--profile.memory", "true")  # fmt: skip
    done = train(*flags, "--profile.ranks", 0, 1, "--job.dir", "run", cwd=tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    names = [f"rank-{rank}-steps-3-4" for rank in range(2)]
    expected = [f"{name}.json.gz" for name in names]
    expected += [f"summary-{name}.{end}" for name in names for end in ("png", "txt")]
    folder = tmp_path / "run" / "profile"
    assert sorted(path.name for path in folder.iterdir()) == sorted(expected)
    assert "a CPU's allocator records no history" in done.stdout
    for name in names:
        text = (folder / f"summary-{name}.txt").read_text()
        table = table_of(text)
        whole, hidden = table.pop("all"), table.pop("communication hidden")
        assert sum(table.values()) == pytest.approx(whole, rel=0.01)
        for kind in ("GEMM", "attention", "elementwise", "optimizer", "data wait", "idle"):
            assert table[kind] > 0, text
        assert table["communication exposed"] + hidden > 0, text
        with gzip.open(folder / f"{name}.json.gz", "rt") as file:
            events = json.load(file)["traceEvents"]
        marks = [e["name"] for e in events if str(e["name"]).startswith(MARK)]
        sent = {e["name"] for e in events if str(e["name"]).startswith("gloo:")}
        assert {"gloo:all_gather", "gloo:all_reduce"} <= sent
        assert sorted(marks) == [MARK + "data wait"] * 2 + [MARK + "optimizer"] * 2 + [
            MARK + "steps"
        ]
        if name == names[0]:
            assert text in done.stdout
        with Image.open(folder / f"summary-{name}.png") as page:
            assert page.size[0] == 960


def profile_steps(folder, config, steps, work=lambda: None):
    """Drive a `StepProfiler` like the trainer; return it and the steps at which `is_over`."""
    profile, over = StepProfiler(config, folder, 0, CPU), []
    for step in range(11, 11 + steps):
        profile.begin(step)
        with profile.mark("data wait"):
            work()
        if profile.is_over():
            over.append(step)
            profile.write()
    return profile, over


def wall_and_clock(folder):
    """The summary of two profiled steps, and their time on the host's clock."""
    ticks = []

    def work():
        ticks.append(time.perf_counter())
        time.sleep(0.2)
        ticks.append(time.perf_counter())

    config = ProfileConfig(enabled=True, start=2, steps=2)
    _, over = profile_steps(folder, config, 4, work)
    assert over == [13]
    with gzip.open(folder / "profile" / "rank-0-steps-12-13.json.gz", "rt") as file:
        summary = summarize(json.load(file)["traceEvents"])
    # From the start of the second step to the end of the third.
    return summary, 1e3 * (ticks[5] - ticks[2])


def test_the_kinds_add_up_to_what_the_clock_of_the_host_says(tmp_path):
    """Best of several, because other processes may run between the two clock reads."""
    for attempt in range(4):
        summary, clock_ms = wall_and_clock(tmp_path / str(attempt))
        assert sum(summary.ms.values()) == pytest.approx(summary.wall_ms, rel=1e-6)
        assert clock_ms <= summary.wall_ms
        if summary.wall_ms <= 1.01 * clock_ms:
            break
    assert summary.wall_ms <= 1.01 * clock_ms
    assert summary.ms["data wait"] == pytest.approx(clock_ms, rel=0.01)


def test_a_launch_that_ends_early_writes_what_it_has(tmp_path):
    config = ProfileConfig(enabled=True, start=1, steps=5)
    profile, over = profile_steps(tmp_path, config, 2, lambda: torch.ones(3) + 1)
    assert over == []
    assert profile.is_over(stopped=True)
    assert "steps 11 to 12" in profile.write()[0]
    assert (tmp_path / "profile" / "summary-rank-0-steps-11-12.png").is_file()
    assert not profile.is_over(stopped=True)


def test_steps_that_are_done_anew_count_as_often_as_they_are_done(tmp_path):
    profile = StepProfiler(ProfileConfig(enabled=True, start=1, steps=3), tmp_path, 0, CPU)
    for step in (8, 6, 7):  # back to a checkpoint
        profile.begin(step)
        time.sleep(0.01)
    assert profile.is_over()
    table = table_of("\n".join(profile.write()))
    with gzip.open(tmp_path / "profile" / "rank-0-steps-8-7.json.gz", "rt") as file:
        wall_ms = summarize(json.load(file)["traceEvents"]).wall_ms
    assert table["all"] == pytest.approx(wall_ms / 3, abs=1e-3)


def test_a_launch_that_never_came_to_its_profile_says_so(tmp_path):
    profile, _ = profile_steps(tmp_path / "none", ProfileConfig(enabled=True, start=10), 3)
    assert not profile.is_over(stopped=True)
    assert profile.missed() == (
        "[profile] start=10: nothing was profiled, this launch took only 3 steps. Lower start."
    )
    assert not (tmp_path / "none").exists()


class Pipeline:
    """Notes what it is asked for."""

    def __init__(self):
        self.asked = []

    def begin(self):
        self.asked.append("begin")

    def step(self, step):
        self.asked.append(step)

    def outside(self, name):
        self.asked.append(name)
        return contextlib.nullcontext()

    def write(self, folder, note):
        self.asked.append("write")
        return [f"timeline in {folder.name}, {note or 'clean'}"]


def timelines(folder, num_steps, stops=False, **config):
    """What is asked of a pipeline in a launch of so many steps; the lines about its timeline."""
    pipeline, lines = Pipeline(), []
    given = ProfileConfig(enabled=True, ranks=(1,), **config)  # Not of this rank.
    profile = StepProfiler(given, folder, 0, CPU, pipeline)
    for step in range(1, num_steps + 1):
        profile.begin(step)
        with profile.mark("optimizer"):
            pass
        if profile.is_over():
            lines += profile.write()
    if stops and profile.is_over(stopped=True):
        lines += profile.write()
    return pipeline.asked, [line for line in lines if line.startswith("timeline")]


def test_the_timeline_of_a_pipeline_is_of_the_steps_after_the_profiled_ones(tmp_path):
    asked, lines = timelines(tmp_path, 9, start=3, steps=2, stops=True)
    profiled = ["begin", 3, "optimizer", 4, "optimizer"]
    assert asked == [*profiled, "begin", 5, "optimizer", 6, "optimizer", "write"]
    assert lines == ["timeline in profile, clean"]


def test_a_launch_that_ends_within_the_timeline_writes_what_it_has(tmp_path):
    asked, lines = timelines(tmp_path, 5, start=3, steps=2, stops=True)
    assert asked[-4:] == ["begin", 5, "optimizer", "write"]
    assert lines == ["timeline in profile, clean"]


@pytest.mark.parametrize("steps", [3, 4])
def test_a_launch_that_ends_before_the_timeline_has_one_of_the_profiled_steps(tmp_path, steps):
    asked, lines = timelines(tmp_path, steps, start=3, steps=2, stops=True)
    assert asked.count("begin") == 1
    assert asked[-1] == "write"
    assert lines == [f"timeline in profile, {SLOWED}"]


def test_a_rank_that_cannot_write_its_profile_still_takes_part_in_the_timeline(tmp_path):
    pipeline = Pipeline()
    config = ProfileConfig(enabled=True, start=1, steps=5)
    profile = StepProfiler(config, tmp_path, 0, CPU, pipeline)
    profile.begin(1)
    assert profile.is_over(stopped=True)
    (tmp_path / "profile").write_text("no folder")
    with pytest.raises(FileExistsError):
        profile.write()
    assert pipeline.asked == ["begin", 1, "write"]
    profile._stop(tmp_path / "trace.json")


def test_disabled_it_does_nothing(tmp_path):
    profile, over = profile_steps(tmp_path / "none", ProfileConfig(start=1, steps=1), 3)
    assert (over, profile.taken, profile.profiler, profile.missed()) == ([], 0, None, None)
    assert not (tmp_path / "none").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_and_memory_of_a_gpu(tmp_path):
    device = torch.device("cuda")
    a = torch.randn(2048, 2048, device=device)
    profile = StepProfiler(ProfileConfig(enabled=True, start=2, memory=True), tmp_path, 0, device)
    for step in (1, 2, 3, 4):
        profile.begin(step)
        with profile.mark("optimizer"):
            b = a * 2
        (a @ b).relu()
    assert profile.is_over()
    table = table_of("\n".join(profile.write()))
    assert min(table["GEMM"], table["optimizer"], table["elementwise"]) > 0
    assert (tmp_path / "profile" / "memory-rank-0-steps-2-4.pickle").stat().st_size > 0
