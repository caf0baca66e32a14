"""The hosts of hosts.py are apart, their network fails as told, and nothing of them is left."""

import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT
from hosts import Network, compiler, needs_hosts
from running import have_ended, is_running

pytestmark = needs_hosts

ECHO = """
import socket, sys
server = socket.create_server(("", 7000))
print("listening", flush=True)
while True:
    peer, _ = server.accept()
    peer.sendall(peer.recv(1 << 20))
    peer.close()
"""
ASK = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000), timeout=1.0) as peer:
    peer.sendall(b"hello")
    print(peer.recv(9).decode())
"""


COUNT = ECHO.replace("peer.recv(1 << 20)", "b''.join(iter(lambda: peer.recv(65536), b''))[:1]")
SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 7000)) as peer:
    began = time.monotonic()
    peer.sendall(bytes(500_000))
    peer.shutdown(socket.SHUT_WR)
    assert len(peer.recv(1)) == 1
    print(time.monotonic() - began)
"""


def hears(host, other):
    return "hello" in host.run([sys.executable, "-c", ASK, other.name]).stdout


def test_hosts_are_apart_and_their_links_can_be_cut(tmp_path):
    with Network(tmp_path, 3) as net:
        a, b, c = net
        assert [host.run(["hostname"]).stdout.strip() for host in net] == ["a", "b", "c"]
        a.run(["touch", "/dev/shm/of-a", "/var/tmp/of-a"])
        assert not b.run(["ls", "/dev/shm", "/var/tmp"]).stdout.count("of-a")
        assert len(b.run(["ps", "-A"]).stdout.splitlines()) < 6
        with b.start([sys.executable, "-c", ECHO], tmp_path) as server:
            server.wait_for("listening")
            assert hears(a, b)
            assert hears(c, b)
            net.cut(a, b)
            assert not hears(a, b)
            assert hears(c, b)
            net.restore()
            assert hears(a, b)
            net.cut(b, a, one_way=True)
            assert not hears(a, b)
            net.restore()
            net.unplug(b)
            assert not hears(c, b)
            net.plug(b)
            assert hears(c, b)
            b.stall()
            assert not hears(a, b)
            b.wake()
            assert hears(a, b)
            b.kill()
            assert server.end(10)
            b.boot()
            assert b.run(["ls", "/dev/shm"]).stdout == ""
        with b.start([sys.executable, "-c", ECHO], tmp_path) as server:
            server.wait_for("listening")
            assert hears(a, b)
        outside = a.run([sys.executable, "-c", ASK, "192.0.2.1"])
        assert outside.returncode == 1


def test_a_disk_is_hidden_from_one_host_and_shown_again(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "file").touch()
    with Network(tmp_path, 2) as (a, b):
        b.hide(shared)
        assert (a.run(["ls", shared]).stdout, b.run(["ls", shared]).stdout) == ("file\n", "")
        assert b.run(["touch", shared / "other"]).returncode
        b.show(shared)
        assert b.run(["ls", shared]).stdout == "file\n"


def test_clocks_of_hosts_differ(tmp_path):
    print_times = "import time; print(time.time(), time.monotonic())"
    clocks = {"boot_s": 50_000} | ({"ahead_s": 7200} if compiler() else {})
    with Network(tmp_path, 2, b=clocks) as net:
        said = [host.run([sys.executable, "-c", print_times]).stdout.split() for host in net]
    (wall_a, steady_a), (wall_b, steady_b) = [list(map(float, each)) for each in said]
    assert abs(steady_b - steady_a - 50_000) < 10
    assert abs(wall_b - wall_a - clocks.get("ahead_s", 0)) < 10


def test_a_slow_link_takes_its_time(tmp_path):
    with Network(tmp_path, 2) as net:
        a, b = net
        net.slow(b, "4mbit")
        with b.start([sys.executable, "-c", COUNT], tmp_path) as server:
            server.wait_for("listening")
            assert float(a.run([sys.executable, "-c", SEND, "b"]).stdout) > 0.7
            net.fast(b)
            assert float(a.run([sys.executable, "-c", SEND, "b"]).stdout) < 0.7


WORK = """
import sys, time
sys.path[:0] = {paths}
from pathlib import Path
from hosts import Network
with Network(Path({folder!r}), 2) as net:
    work = net.hosts[1].start(["sleep", "1000"], Path({folder!r}))
    while not net.hosts[1].processes()[1:]:
        time.sleep(0.01)
    print(*(pid for host in net for pid in host.processes()), net.router.pid, flush=True)
    {body}
"""


@pytest.mark.parametrize("end", ["a failed test", "a kill"])
def test_nothing_is_left_of_hosts(end, tmp_path):
    body = "1 / 0" if end == "a failed test" else "time.sleep(1000)"
    paths = [str(ROOT / "tests"), str(ROOT / "tests/launcher")]
    script = WORK.format(paths=paths, folder=str(tmp_path), body=body)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        pids = list(map(int, process.stdout.readline().split()))
        assert len(pids) > 4
        if end == "a kill":
            assert all(map(is_running, pids))
            process.kill()
        process.wait(30)
    assert have_ended(pids)
    mounted = Path("/proc/mounts").read_text()
    assert str(tmp_path) not in mounted
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    assert "to-a" not in links
