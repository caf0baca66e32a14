"""Launches on hosts whose names are unknown, or addresses that other hosts cannot reach."""

import os
import shutil
import socket
import subprocess
import sys
import uuid

import pytest
from commands import environment, run
from running import free_port

from titan_dit.config.section import UserError
from titan_dit.launcher import rendezvous
from titan_dit.ranks import hosts, process_group
from titan_dit.ranks.failure import NetworkFailure

KNOWN = {"localhost": "127.0.0.1", "node2": "10.0.0.2", "storage2": "10.1.0.2"}
OWN = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "ib0": "10.1.0.1"}
MULTI = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint"]


class Hosts:
    """This host, node1, with the network interfaces OWN; what it knows of names may change."""

    def __init__(self):
        self.known = dict(KNOWN)

    def getaddrinfo(self, host, *rest, **more):
        address = self.known.get(host) or (host if host[0].isdigit() else None)
        if address is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

    @staticmethod
    def towards(address):
        same_network = [own for own in OWN.values() if own.rpartition(".")[0] in address]
        return address if address.startswith("127.") else (same_network or ["10.0.0.1"])[0]


@pytest.fixture
def this_host(monkeypatch):
    fake = Hosts()
    is_own = lambda a: a if a in OWN.values() or a.startswith("127.") else None  # noqa: E731
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    monkeypatch.setattr(socket, "getaddrinfo", fake.getaddrinfo)
    monkeypatch.setattr(hosts, "address_of", is_own)
    monkeypatch.setattr(hosts, "interfaces", lambda: OWN)
    monkeypatch.setattr(hosts, "address_towards", fake.towards)
    monkeypatch.setattr(hosts, "WAIT_S", 0.0)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    return fake


def options(endpoint, *more):
    given = [*MULTI, endpoint, *more, "-m", "x"] if endpoint else ["--standalone", "-m", "x"]
    return hosts.torchrun_options(given, endpoint)


@pytest.mark.parametrize("own_name", [None, "127.0.1.1", "10.0.0.1", "10.77.0.1"])
def test_a_single_node_meets_at_loopback_whatever_its_name_is(own_name, this_host):
    this_host.known["node1"] = own_name
    assert options(None) == ["--local-addr", "127.0.0.1", "--standalone", "-m", "x"]
    process_group.wait_for_address("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


# Unknown, loopback in its own /etc/hosts as on Debian, an address of another host.
BAD = [None, "127.0.1.1", "10.77.0.1"]


@pytest.mark.parametrize("own_name", BAD)
@pytest.mark.parametrize(
    ("endpoint", "own", "interface"),
    [("node2:1", "10.0.0.1", "eth0"), ("10.1.0.2:1", "10.1.0.1", "ib0"), ("node1:1", "", "")],
)
def test_a_node_without_a_good_name_takes_its_address_towards_the_endpoint(
    endpoint, own, interface, own_name, this_host
):
    this_host.known["node1"] = own_name
    found = options(endpoint)
    assert found[:2] == ["--local-addr", own or "10.0.0.1"]
    if own_name or endpoint.startswith("node1"):
        assert "is_host=0" not in found
    else:
        assert found[found.index("--rdzv-conf") + 1] == "is_host=0"
    is_here = endpoint == "node1:1"
    assert found[found.index("--rdzv-endpoint") + 1] == ("127.0.0.1:1" if is_here else endpoint)
    hosts.choose_interface(hosts.split(endpoint)[0])
    assert os.environ["GLOO_SOCKET_IFNAME"] == (interface or "eth0")


def test_a_node_with_a_good_name_keeps_it_and_what_was_set(this_host, monkeypatch):
    this_host.known["node1"] = "10.0.0.1"
    assert options("node2:1", "--rdzv-conf", "timeout=9") == [
        *(*MULTI, "node2:1", "--rdzv-conf", "timeout=9", "-m", "x"),
    ]
    hosts.choose_interface("node2")
    assert not os.environ["GLOO_SOCKET_IFNAME"]
    # An address of a second network: torchrun compares those of the host's name only.
    assert "127.0.0.1:1" in options("10.1.0.1:1")
    assert "10.1.0.1:1" in options("10.1.0.1:1", "--rdzv-conf", "is_host=1")
    this_host.known["node1"] = None
    assert "timeout=9,is_host=0" in options("node2:1", "--rdzv-conf", "timeout=9")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    hosts.choose_interface("node2")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"


def test_an_unknown_name_is_one_line_that_names_host_variable_and_fix(this_host):
    with pytest.raises(NetworkFailure) as failed:
        options("node9:29500")
    assert str(failed.value) == (
        "RDZV_ENDPOINT=node9:29500: this host, node1, does not know the host node9. Correct it, "
        "add the name to /etc/hosts, or give the address: RDZV_ENDPOINT=ADDRESS:29500."
    )
    with (
        pytest.raises(NetworkFailure) as failed,
        process_group.opening("the default process group"),
    ):
        process_group.wait_for_address("node9")
    words = "MASTER_ADDR=node9: this host, node1, does not know the name. Correct"
    assert words in str(failed.value)
    assert rendezvous.state_of("node9:1") == "this machine does not know the host node9"
    assert "cannot be reached" in rendezvous.state_of(f"node1:{free_port()}")
    del this_host.known["localhost"]
    with pytest.raises(UserError, match="does not know the name localhost"):
        options(None)


def test_a_name_that_becomes_known_is_waited_for(this_host, monkeypatch):
    monkeypatch.setattr(hosts, "WAIT_S", 9.0)
    monkeypatch.setattr(hosts.time, "sleep", lambda s: this_host.known.update(node9="10.0.0.9"))
    assert "node9:1" in options("node9:1")


@pytest.mark.parametrize(
    ("endpoint", "parts"),
    [
        ("node1:1", ("node1", 1)),
        ("node1", ("node1", 29400)),
        ("[fe80::1]:7", ("fe80::1", 7)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        *((wrong, None) for wrong in ("node1:port", "node1:65536", "a b:1", "", ":1")),
    ],
)
def test_an_endpoint_is_split_as_torch_does_and_a_wrong_one_refused(endpoint, parts):
    if parts:
        assert hosts.split(endpoint) == parts
    else:
        with pytest.raises(UserError, match=r"RDZV_ENDPOINT=.*: set (host:port|a port)"):
            hosts.split(endpoint)


LAUNCHER = """
import socket, sys
known = socket.getaddrinfo
def getaddrinfo(host, *rest, **more):
    if str(host).startswith("nosuchhost"):
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    return known(host, *rest, **more)
socket.getaddrinfo, socket.gethostname = getaddrinfo, lambda: "nosuchhost1"
from titan_dit.ranks import hosts; from titan_dit.launcher import launch
hosts.WAIT_S = 0.0
sys.exit(launch.main())
"""
RANK = """
import os, torch, torch.distributed as dist
from titan_dit.ranks import failure, process_group
def main():
    with process_group.start("cpu") as world:
        total = torch.ones(1)
        dist.all_reduce(total)
        if world.rank == 0:
            print(total.item(), os.environ["MASTER_ADDR"], os.environ.get("GLOO_SOCKET_IFNAME"))
failure.run_and_exit(main)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    (tmp_path / "rank.py").write_text(RANK)
    return tmp_path


def test_a_launch_on_a_host_with_an_unknown_name_works_or_is_one_line(folder):
    launch = [sys.executable, folder / "launcher.py"]
    done = run([*launch, "--standalone", "--nproc-per-node", 2, folder / "rank.py"], folder)
    assert (done.returncode, done.stdout) == (0, "2.0 127.0.0.1 lo\n"), done.stderr
    there = [*MULTI, f"nosuchhost2:{free_port()}", folder / "rank.py"]
    done = run([*launch, *there], folder)
    assert done.returncode == 1
    assert done.stderr.startswith("error: RDZV_ENDPOINT=nosuchhost2:")
    assert done.stderr.count("\n") == 1
    assert "nosuchhost1, does not know the host nosuchhost2" in done.stderr


NODE = """
hostname "$1"
mount --bind "$2" /etc/hosts
mount --bind /dev/null /etc/resolv.conf
exec "$3" -m titan_dit.launcher.launch --nnodes 2 --rdzv-backend c10d --rdzv-endpoint "$4" \\
    --rdzv-conf last_call_timeout=1 rank.py
"""


def can_make_hosts():
    words = ["unshare", "--uts", "--mount", "--net", "true"]
    tools = shutil.which("unshare") and shutil.which("ip") and os.geteuid() == 0
    return bool(tools) and subprocess.run(words, capture_output=True, check=False).returncode == 0


@pytest.fixture
def two_networks():
    """Two network namespaces with a cable, 10.9.0.1 and 10.9.0.2."""
    if not can_make_hosts():
        pytest.skip("needs root, unshare and ip")
    names = [f"titan{uuid.uuid4().hex[:6]}{end}" for end in "ab"]
    ip = lambda *words: subprocess.run(["ip", *words], check=True)  # noqa: E731
    made = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        ends = ["name", "end", "netns", names[0], "type", "veth", "peer"]
        ip("link", "add", *ends, "name", "end", "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.9.0.{number}/24", "dev", "end")
            for device in ("lo", "end"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this kernel or container has no such networks: {error}")
    finally:
        for name in made:
            ip("netns", "delete", name)


@pytest.mark.parametrize(
    ("endpoint", "own_lines"),
    [
        # Names that nobody knows.
        ("10.9.0.1:29500", ("", "")),
        # Debian's installer: the own name is a loopback address.
        ("node1:29500", ("127.0.1.1 node1\n10.9.0.2 node2", "127.0.1.1 node2\n10.9.0.1 node1")),
    ],
)
def test_two_hosts_with_bad_names_of_their_own_meet(endpoint, own_lines, two_networks, folder):
    (folder / "node.sh").write_text(NODE)
    nodes = []
    for number, (network, lines) in enumerate(zip(two_networks, own_lines, strict=True), 1):
        (folder / f"hosts{number}").write_text(f"127.0.0.1 localhost\n{lines}\n")
        words = ["ip", "netns", "exec", network, "unshare", "--uts", "--mount", "bash", "node.sh"]
        words += [f"node{number}", f"hosts{number}", sys.executable, endpoint]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        nodes.append(subprocess.Popen(words, cwd=folder, env=environment(), **pipes))
    said = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert any("2.0 10.9.0." in text for text in said)
