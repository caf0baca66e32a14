"""Hosts of Linux namespaces on this machine, with a network between them that can fail.

`with Network(tmp_path, 2) as net:` starts hosts "a" and "b". Each has its own network, host name,
process ids, /etc/hosts, /dev/shm and /var/tmp, and sees the files of this machine otherwise. Host
number i has the address 10.77.i.2 on eth0. A namespace between them routes, and drops what a test
says. No address of a host can be reached from outside, and none outside from a host.

The namespaces are unnamed: they live as long as their first processes, which the kernel kills with
this one (PR_SET_PDEATHSIG). So nothing is left after a failed test or a SIGKILL. Create a Network
in the main thread: for the kernel, the end of the thread that started them counts.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, environment
from running import Running

NAMES = "abcd"
TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv", "mount")
FOREVER = "while :; do sleep 1000; done"
WALL_CLOCK = ROOT / "tests" / "fixtures" / "wall_clock.c"


def missing():
    """What this machine lacks for hosts, as one line; empty if it has all."""
    if sys.platform != "linux":
        return "hosts are made of Linux namespaces"
    if os.geteuid():
        return "hosts need root"
    if absent := [tool for tool in TOOLS if not shutil.which(tool)]:
        return f"hosts need {', '.join(absent)} (iproute2, util-linux)"
    flags = ["--net", "--uts", "--mount", "--pid", "--ipc", "--fork"]
    tried = subprocess.run(["unshare", *flags, "true"], capture_output=True, text=True, check=False)
    return tried.stderr.strip()


NO_HOSTS = missing()
needs_hosts = pytest.mark.skipif(bool(NO_HOSTS), reason=NO_HOSTS)


def compiler():
    """The C compiler, which the library that shifts wall clocks needs; None without one."""
    return shutil.which("cc")


class Namespaces:
    """Namespaces with a first process; all their processes end with it."""

    def __init__(self, flags, script):
        script = f"{script}\necho ready\n{FOREVER}"
        words = ["setpriv", "--pdeathsig", "KILL", "unshare", *flags, "--fork", "--kill-child"]
        # The shell reaps orphans, as init does.
        self.process = subprocess.Popen(
            [*words, "sh", "-ec", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        said = self.process.stdout.readline()
        assert said == "ready\n", said + self.process.stdout.read()
        parent = self.process.pid
        [self.pid] = map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())

    def run(self, *words, **options):
        """Run a command inside to its end; return its output."""
        inside = ["nsenter", "-t", self.pid, "--all", *words]
        options = {"check": True, "capture_output": True, "text": True} | options
        return subprocess.run([str(word) for word in inside], **options).stdout

    def end(self):
        """Kill all processes at once."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


class Host:
    """One host: `start` starts a command on it. `kill` ends it as a power cut does."""

    def __init__(self, net, index, ahead_s=0, boot_s=0):
        self.net, self.name, self.index = net, NAMES[index], index + 1
        self.address = f"10.77.{self.index}.2"
        self.folder = net.folder / f"host-{self.name}"
        self.ahead_s, self.boot_s = ahead_s, boot_s
        self.space = None
        self.boot()

    def boot(self):
        """Start the host, after `kill` again: with an empty /dev/shm and the same disk."""
        assert self.space is None
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)
        lines = ["127.0.0.1 localhost", *(f"{address(i)} {NAMES[i]}" for i in range(len(NAMES)))]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        # No name server can be reached: asking for one would take 5 s.
        (self.folder / "nsswitch.conf").write_text("hosts: files\n")
        if self.ahead_s:
            library = self.folder / "wall_clock.so"
            subprocess.run([compiler(), "-shared", "-fPIC", "-o", library, WALL_CLOCK], check=True)
        flags = ["--net", "--uts", "--mount", "--pid", "--ipc", "--mount-proc"]
        if self.boot_s:
            seconds = str(int(self.boot_s))
            flags += ["--time", "--monotonic", seconds, "--boottime", seconds]
        self.space = Namespaces(
            flags,
            f"hostname {self.name}\n"
            "mount -t tmpfs tmpfs /dev/shm\n"
            f"mount --bind '{self.folder}/tmp' /var/tmp\n"
            f"mount --bind '{self.folder}/hosts' /etc/hosts\n"
            f"mount --bind '{self.folder}/nsswitch.conf' /etc/nsswitch.conf",
        )
        self.net.connect(self)

    def command(self, words, cwd):
        """The command line that runs a command on this host."""
        here = ["nsenter", "-t", self.space.pid, "--all", "env", "-C", cwd]
        if self.ahead_s:
            here += [f"LD_PRELOAD={self.folder / 'wall_clock.so'}", f"AHEAD_S={self.ahead_s}"]
        return [str(word) for word in (*here, *words)]

    def start(self, words, cwd, name=None, **variables):
        """Start a command in the background; its output is in the file `name` of `cwd`."""
        command = self.command(words, cwd)
        variables = {"FORK": "1", "GLOO_SOCKET_IFNAME": "eth0"} | variables
        return OnHost(command, cwd, name or f"said-{self.name}", **variables)

    def run(self, words, cwd="/", timeout=120):
        """Run a command to its end; returns what `subprocess.run` does."""
        return subprocess.run(
            self.command(words, cwd),
            env=environment(),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def kill(self):
        """End all processes at once. No connection is closed: the others hear nothing more."""
        # First: the kernel closes the connections of a dying process. They outlive it, and with
        # them its network, which would keep the link.
        self.net.router.run("ip", "link", "del", f"to-{self.name}")
        self.space.end()
        self.space = None

    def processes(self):
        """The pids of this host's processes, in the numbers of the machine."""
        mine = Path(f"/proc/{self.space.pid}/ns/pid").readlink()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (entry / "ns/pid").readlink() == mine:
                    found.append(int(entry.name))
        return found

    def stall(self):
        """Stop all processes, until `wake`."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def wake(self):
        """Let all processes go on."""
        for pid in (*self.processes(), *self.entering()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def entering(self):
        """The nsenter processes of `start`, which stop themselves with their child."""
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if words[:3] == [b"nsenter", b"-t", str(self.space.pid).encode()]:
                    yield int(entry.name)

    def hide(self, folder):
        """Have this host see an empty read-only folder in the place of a shared one."""
        self.space.run("mount", "-t", "tmpfs", "-o", "ro,size=4k", "none", folder)

    def show(self, folder):
        """Undo `hide`."""
        self.space.run("umount", folder)


class OnHost(Running):
    """A command on a host; `pid` is that of the command, where `process` is nsenter."""

    @property
    def pid(self):
        parent = self.process.pid
        found = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        return int(found[0])

    def send(self, number):
        os.kill(self.pid, number)

    def steps(self):
        """The steps on its console, of all attempts."""
        return [int(step) for step in re.findall(r"^step +(\d+)/", self.said, re.MULTILINE)]


class Network:
    """Hosts and the router between them. Packets that are cut are dropped without a word."""

    def __init__(self, folder, count=2, **clocks):
        """`clocks`: ahead_s or boot_s of host "b", "c", ... as in `Network(folder, 2, b={...})`."""
        self.folder, self.hosts, self.cuts = Path(folder), [], set()
        self.router = None
        self.count, self.clocks = count, clocks

    def __enter__(self):
        try:
            self.router = Namespaces(["--net"], "ip link set lo up")
            # Its own /proc/sys/net: the file belongs to the network of who opens it.
            self.router.run("sysctl", "-qw", "net.ipv4.ip_forward=1")
            for index in range(self.count):
                self.hosts.append(Host(self, index, **self.clocks.get(NAMES[index], {})))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for space in (*(host.space for host in self.hosts), self.router):
            if space:
                space.end()

    def __iter__(self):
        return iter(self.hosts)

    def connect(self, host):
        """Give a host its eth0, and the router the other end."""
        port, gateway = f"to-{host.name}", f"10.77.{host.index}.1"
        pair = ["type", "veth", "peer", "name", "eth0", "netns", host.space.pid]
        self.router.run("ip", "link", "add", port, *pair)
        self.router.run("ip", "addr", "add", f"{gateway}/24", "dev", port)
        self.router.run("ip", "link", "set", port, "up")
        for words in (
            ("link", "set", "lo", "up"),
            ("addr", "add", f"{host.address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("route", "add", "default", "via", gateway),
        ):
            host.space.run("ip", *words)

    def cut(self, sender, receiver, *, one_way=False):
        """Drop all packets between two hosts, or only those of the sender."""
        self._drop(sender, receiver)
        if not one_way:
            self._drop(receiver, sender)

    def _drop(self, sender, receiver):
        pair = sender.address, receiver.address
        if pair not in self.cuts:
            self.cuts.add(pair)
            self.router.run("ip", "rule", "add", *self._rule(pair))

    @staticmethod
    def _rule(pair):
        return ("from", pair[0], "to", pair[1], "priority", 10, "blackhole")

    def restore(self):
        """Undo all cuts."""
        for pair in tuple(self.cuts):
            self.router.run("ip", "rule", "del", *self._rule(pair))
            self.cuts.discard(pair)

    def unplug(self, host):
        """Take a host off the network: its eth0 has no carrier."""
        self.router.run("ip", "link", "set", f"to-{host.name}", "down")

    def plug(self, host):
        """Undo `unplug`."""
        self.router.run("ip", "link", "set", f"to-{host.name}", "up")

    def slow(self, host, rate="8mbit"):
        """Limit what a host receives, by a token bucket; skips a test if the kernel has none."""
        shape = ["tbf", "rate", rate, "burst", "32k", "latency", "400ms"]
        try:
            self.router.run("tc", "qdisc", "replace", "dev", f"to-{host.name}", "root", *shape)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"slow links need the kernel's tbf: {error.stderr.strip()}")

    def fast(self, host):
        """Undo `slow`."""
        self.router.run("tc", "qdisc", "del", "dev", f"to-{host.name}", "root")


def address(index):
    """The address of host number `index`, from 0."""
    return f"10.77.{index + 1}.2"
