"""Slurm on the hosts of hosts.py: slurmctld on the last one, slurmd on each other one.

Each node has one GPU, whose device is /dev/zero. Nothing is authenticated, and jobs run as root.
"""

import contextlib
import os
import shutil
import sys
import time
from pathlib import Path

import pytest
from hosts import NO_HOSTS, Network

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
ABSENT = ", ".join(program for program in PROGRAMS if not shutil.which(program))
NO_SLURM = NO_HOSTS or (ABSENT and f"Slurm is not installed (slurm-wlm): {ABSENT}")
needs_slurm = pytest.mark.skipif(bool(NO_SLURM), reason=NO_SLURM)

# cred_expire: a requeued job waits until the credential of its last start has expired.
CONF = """
ClusterName=hosts
SlurmctldHost={controller.name}({controller.address})
SlurmUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
StateSaveLocation={folder}/slurmctld
SlurmdSpoolDir=/var/tmp/slurmd
SlurmctldPidFile=/var/tmp/slurmctld.pid
SlurmdPidFile=/var/tmp/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
GresTypes=gpu
MpiDefault=none
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=main Nodes=ALL Default=YES State=UP
PartitionName=urgent Nodes=ALL State=UP PriorityTier=2
"""


class Slurm:
    """A cluster. `submit` submits a job from the controller's host; `job` is its state."""

    def __init__(self, net):
        *self.nodes, self.controller = net.hosts
        self.folder, self.daemons = net.folder / "slurm", []
        (self.folder / "slurmctld").mkdir(parents=True)
        node = "NodeName={0.name} NodeAddr={0.address} CPUs=2 Gres=gpu:1"
        nodes = "\n".join(map(node.format, self.nodes))
        conf = CONF.format(controller=self.controller, folder=self.folder, nodes=nodes)
        (self.folder / "slurm.conf").write_text(conf)
        (self.folder / "gres.conf").write_text("Name=gpu File=/dev/zero\n")
        self.conf = f"SLURM_CONF={self.folder / 'slurm.conf'}"

    def start(self):
        """Start all daemons and wait until the nodes are idle."""
        self._daemon(self.controller, "slurmctld")
        for host in self.nodes:
            host.run(["mkdir", "-p", "/var/tmp/slurmd"])
            self._daemon(host, "slurmd", "-N", host.name)
        wait_until(lambda: self._states().count("idle") == len(self.nodes), 60)

    def _daemon(self, host, program, *words):
        words = ["env", self.conf, program, "-D", "-v", *words]
        self.daemons.append(host.start(words, self.folder, f"{program}-{host.name}"))

    def _states(self):
        done = self.controller.run(
            ["env", self.conf, "sinfo", "-h", "-N", "-p", "main", "-o", "%T"]
        )
        return done.stdout.split()

    def run(self, *words, cwd="/", **variables):
        """Run a command of Slurm on the controller's host; return its output."""
        # The environment of a user's shell, which sbatch hands on to the job.
        path = f"PATH={Path(sys.executable).parent}:{os.environ['PATH']}"
        given = [f"{name}={value}" for name, value in variables.items()]
        done = self.controller.run(["env", "-u", "FORK", self.conf, path, *given, *words], cwd)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    def submit(self, clone, *words, **variables):
        """Run sbatch in the folder `clone`; return the job's number."""
        return int(self.run("sbatch", "--parsable", *words, cwd=clone, **variables))

    def job(self, number):
        """The fields that `scontrol show job` prints of a job."""
        words = self.run("scontrol", "show", "job", "-o", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def lose(self, host):
        """Cut a node's power, and tell Slurm, which would see it after SlurmdTimeout."""
        host.kill()
        self.run("scontrol", "update", f"nodename={host.name}", "state=down", "reason=lost")

    def wait_for_job(self, number, *states, seconds=200):
        """Wait for one of these states; return the job's fields."""
        wait_until(lambda: self.job(number)["JobState"] in states, seconds)
        return self.job(number)


@contextlib.contextmanager
def cluster(folder, nodes):
    """A Slurm with so many nodes, until the end of the block."""
    with Network(folder, nodes + 1) as net, contextlib.ExitStack() as stack:
        slurm = Slurm(net)
        slurm.start()
        for daemon in slurm.daemons:
            stack.enter_context(daemon)
        yield slurm


def wait_until(done, seconds):
    """Wait until `done()`; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.2)
