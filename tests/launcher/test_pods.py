"""The containers of launch/kubernetes/jobset.yaml, each on a host of tests/hosts.py.

There is no Kubernetes: the test does what it and JobSet would do with the pods.
"""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from accounts import COUNTED, assert_each_sample_once, fresh_clone, same_bits
from commands import ROOT
from hosts import Network, needs_hosts
from running import undisturbed_run

yaml = pytest.importorskip("yaml")
pytestmark = [
    needs_hosts,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

STEPS = 160
FLAGS = (*COUNTED, "--training.steps", STEPS, "--checkpoint.every", 20)


class Pods:
    """The two pods of the JobSet. A host stands for a pod's sandbox."""

    def __init__(self, net, clone):
        self.hosts, self.clone, self.starts = net.hosts, clone, 0
        jobset = yaml.safe_load((ROOT / "launch/kubernetes/jobset.yaml").read_text())
        [job] = jobset["spec"]["replicatedJobs"]
        [container] = job["template"]["spec"]["template"]["spec"]["containers"]
        given = {entry["name"]: entry["value"] for entry in container["env"]}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.variables = given | {"NGPU": 1, "PATH": path}
        self.words = [*container["command"], *FLAGS, "--job.hooks", "pace:Pace"]
        self.words += ["--job.dir", clone / "shared"]
        name, nodes = jobset["metadata"]["name"], job["name"]
        self.names = [f"{name}-{nodes}-0-{index}.{name}" for index in range(2)]

    def start(self, host):
        """Start a pod's container; the names of pods are known a while later."""
        self.starts += 1
        file = f"said-{host.name}-{self.starts}"
        return host.start(self.words, self.clone, file, **self.variables)

    def publish_names(self):
        """Publish the records of the headless service."""
        for host in self.hosts:
            with (host.folder / "hosts").open("a") as file:
                for name, pod in zip(self.names, self.hosts, strict=True):
                    file.write(f"{pod.address} {name}\n")


@pytest.fixture
def undisturbed(tmp_path):
    """The run directory of the same run on two ranks of one host."""
    return undisturbed_run(tmp_path / "undisturbed", *FLAGS)


def test_pods_save_when_one_is_evicted_and_go_on_when_one_is_lost(undisturbed, tmp_path):
    clone = fresh_clone(tmp_path)
    with Network(tmp_path, 2) as net:
        pods = Pods(net, clone)
        a, b = net
        with pods.start(a) as first, pods.start(b) as second:
            time.sleep(5)
            pods.publish_names()
            first.wait_for_step(30)
            # The kubelet signals process 1 of the container, which is the launcher.
            second.send(signal.SIGTERM)
            assert [first.end(), second.end()] == [75, 75]
            assert "stopped after step" in first.said
        # Both failures are ignored, and the pods created again.
        with pods.start(a) as first, pods.start(b) as second:
            first.wait_for_step(60)
            b.kill()
            b.boot()
            pods.publish_names()
            with pods.start(b) as third:
                assert [first.end(180), third.end()] == [0, 0], first.said
            assert "restarted: 2 ranks on 2 nodes" in first.said
    assert_each_sample_once(clone / "shared", STEPS)
    same, found = same_bits(clone / "shared", undisturbed)
    assert same, found
