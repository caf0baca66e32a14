"""From the command line: torch's schedule classes run a pipeline, and our loop goes on with it."""

import re

import pytest
from commands import metrics, train

FLAGS = ("--metrics.every", 1, "--metrics.tensorboard", "false")
FLAGS += ("--sampling.every", 0, "--model.hidden_size", 32, "--precision.dtype", "fp32")
FLAGS += ("--training.microbatch_size", 4, "--training.global_batch_size", 16)
FLAGS += ("--parallel.pp", 2, "--pipeline.schedule", "Interleaved1F1B")
FLAGS += ("--pipeline.virtual_stages", 2, "--checkpoint.every", 2)

SEEN = """
import collections
from torch.distributed.pipelining import stage
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B
from titan_dit.hooks import Hook
from titan_dit.pipeline.schedules.torch_classes import DrivenStage
from titan_dit.pipeline.torch_runtime import LoopDriver

calls = collections.Counter()

def count(kind, name, stage_of):
    method = getattr(kind, name)

    def counted(self, *args, **kwargs):
        found = stage_of(self)
        assert isinstance(found, stage.PipelineStage)
        if isinstance(found.driver, LoopDriver):  # Not while it is recorded.
            calls[name] += 1
        return method(self, *args, **kwargs)

    setattr(kind, name, counted)

count(ScheduleInterleaved1F1B, "step", lambda self: self._stages[0])
for name in ("forward_one_chunk", "backward_one_chunk"):
    count(DrivenStage, name, lambda self: self)

class Seen(Hook):
    def step_ended(self, run):
        names = "step", "forward_one_chunk", "backward_one_chunk"
        # One write: ranks share their output.
        print("seen " + " ".join(str(calls[name]) for name in names) + "|\\n", end="")
        calls.clear()
"""
"""A module with a hook that says what torch's class has run in each step."""


def launched(folder, steps, runtime):
    """Train on two ranks; returns the output."""
    (folder / "seen.py").write_text(SEEN)
    flags = [*FLAGS, "--training.steps", steps, "--job.hooks", "seen:Seen"]
    flags += ["--pipeline.runtime", runtime] if runtime else []
    done = train(*flags, cwd=folder, ranks=2)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    said = launched(folder, 4, "own")
    assert 'pipeline: own loop (runtime="own")' in said
    # Four steps of two ranks, and nothing of torch's.
    assert re.findall(r"seen ([0-9 ]*)\|", said) == ["0 0 0"] * 8
    return [(row["loss"], row["grad_norm"]) for row in metrics(folder / "outputs" / "digits")]


def test_torchs_step_runs_every_microbatch_and_another_runtime_goes_on_with_its_run(own, tmp_path):
    said = launched(tmp_path, 2, "torch")
    assert 'pipeline: torch\'s ScheduleInterleaved1F1B (runtime="torch")' in said
    # Two stages of a rank, four microbatches.
    assert re.findall(r"seen ([0-9 ]*)\|", said) == ["1 8 8"] * 4
    said = launched(tmp_path, 3, "own")
    assert "resumed from" in said
    assert re.findall(r"seen ([0-9 ]*)\|", said) == ["0 0 0"] * 2
    said = launched(tmp_path, 4, None)
    assert "torch's ScheduleInterleaved1F1B: within 2% of the own loop's step (simulated)" in said
    assert re.findall(r"seen ([0-9 ]*)\|", said) == ["1 8 8"] * 2
    rows = metrics(tmp_path / "outputs" / "digits")
    assert [(row["loss"], row["grad_norm"]) for row in rows] == own
