"""launch/slurm.sbatch in a real Slurm, whose nodes are hosts of tests/hosts.py."""

import re
import time

import pytest
from accounts import COUNTED, assert_each_sample_once, fresh_clone, losses, same_bits, same_curve
from running import undisturbed_run
from slurm import cluster, needs_slurm, wait_until

pytestmark = [needs_slurm, pytest.mark.long, pytest.mark.alone]

STEPS = 160
NODE = ("--cpus-per-task=1", "--gpus-per-node=1")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The run directory of the same run on two ranks of one host, without Slurm."""
    flags = (*COUNTED, "--training.steps", STEPS, "--checkpoint.every", STEPS)
    return undisturbed_run(tmp_path_factory.mktemp("undisturbed"), *flags)


class Job:
    """A job of launch/slurm.sbatch, submitted in a fresh clone. Its steps take STEP_S, 0.1 s."""

    def __init__(self, slurm, folder, *options, every=20, steps=STEPS, **variables):
        self.slurm, self.clone = slurm, fresh_clone(folder)
        flags = (*COUNTED, "--job.hooks", "pace:Pace", "--checkpoint.every", every)
        flags += ("--training.steps", steps)
        words = (*NODE, "--time=10", *options, "launch/slurm.sbatch", *flags)
        self.number = slurm.submit(self.clone, *words, **variables)
        self.run = self.clone / "outputs" / "digits"

    @property
    def said(self):
        file = self.clone / f"slurm-{self.number}.out"
        return file.read_text() if file.exists() else ""

    def wait_for_steps(self, number):
        """Wait until all attempts together have printed so many steps."""
        wait_until(lambda: len(re.findall(r"^step ", self.said, re.MULTILINE)) >= number, 200)

    def finish(self, seconds=200):
        """Wait for its end; return the times that it was requeued."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        ended = self.slurm.wait_for_job(self.number, *ends, seconds=seconds)
        assert ended["JobState"] == "COMPLETED", self.said
        return int(ended["Restarts"])

    def resumed_steps(self):
        """The steps from which attempts went on."""
        return [int(step) for step in re.findall(r"resumed from \S+step-(\d+)", self.said)]


def test_a_job_saves_before_its_time_limit_and_goes_on_when_requeued(undisturbed, tmp_path):
    """The shortest limit of Slurm is a minute; it warns up to half a minute too early.

    All steps together take longer than a minute on any machine.
    """
    with cluster(tmp_path, 2) as slurm:
        limit = ("--time=1", "--signal=B:USR1@10")
        job = Job(slurm, tmp_path, *limit, every=1000, STEP_S=0.4)
        assert job.finish(500) >= 1
    stopped = [int(step) for step in re.findall(r"stopped after step (\d+)", job.said)]
    assert stopped
    assert job.resumed_steps() == stopped
    assert_each_sample_once(job.run, STEPS)
    same, found = same_bits(job.run, undisturbed)
    assert same, found


@pytest.mark.parametrize(
    "lost",
    [
        pytest.param(1, id="the-second-node"),
        # The one of the batch script, of the rendezvous and of the locks.
        pytest.param(0, id="the-first-node"),
    ],
)
def test_a_job_is_requeued_on_other_nodes_when_one_is_lost(lost, undisturbed, tmp_path):
    with cluster(tmp_path, 3) as slurm:
        job = Job(slurm, tmp_path)
        job.wait_for_steps(30)
        began = time.monotonic()
        slurm.lose(slurm.nodes[lost])
        job.wait_for_steps(len(losses(job.run)) + 1)
        print(f"kill to next step: {time.monotonic() - began:.0f} s")
        assert job.finish() == 1
    assert job.resumed_steps()[0] in (20, 40)
    assert_each_sample_once(job.run, STEPS)
    same, found = same_bits(job.run, undisturbed)
    assert same, found


def test_an_elastic_job_keeps_its_allocation_when_a_node_is_lost(undisturbed, tmp_path):
    with cluster(tmp_path, 2) as slurm:
        job = Job(slurm, tmp_path, "--no-kill", NNODES="1:2")
        job.wait_for_steps(30)
        slurm.lose(slurm.nodes[1])
        assert job.finish() == 0
    assert "restarted: 1 ranks on one node" in job.said
    assert_each_sample_once(job.run, STEPS)
    same, found = same_curve(job.run, undisturbed)
    assert same, found


def test_a_preempted_job_goes_on_and_a_cancelled_one_does_not(tmp_path):
    with cluster(tmp_path, 2) as slurm:
        job = Job(slurm, tmp_path, every=1000, steps=10_000)
        job.wait_for_steps(20)
        urgent = slurm.submit(tmp_path, "-p", "urgent", "-N2", "--exclusive", "--wrap", "sleep 2")
        slurm.wait_for_job(urgent, "COMPLETED")
        slurm.wait_for_job(job.number, "RUNNING")
        [stopped] = map(int, re.findall(r"stopped after step (\d+)", job.said))
        job.wait_for_steps(stopped + 20)
        assert job.resumed_steps() == [stopped]
        slurm.run("scancel", job.number)
        slurm.wait_for_job(job.number, "CANCELLED")
        # A requeued job would be pending now, and run after 5 s.
        time.sleep(8)
        ended = slurm.job(job.number)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "1")
    last = int(re.findall(r"stopped after step (\d+)", job.said)[-1])
    assert last >= stopped + 20
    assert_each_sample_once(job.run, last)
