"""Two hosts train into the bucket of a third one, whose S3 server dies and comes back."""

import contextlib
import re
import signal
import sys
import time

import pytest
from accounts import COUNTED, PACE, assert_each_sample_once, same_bits
from hosts import Network, needs_hosts
from running import undisturbed_run

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")
pytestmark = [
    needs_hosts,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

STEPS = 200
BUCKET = "s3://bucket"
# The server that dies. Its disk is Moto, which keeps objects in memory and does not die. In the
# middle of an upload it ends if there is a file `die` in its folder; a file `pause` it removes.
FRONT = """
import asyncio, os, sys
from pathlib import Path

uploaded = 0

async def forward(reader, writer, is_upload):
    global uploaded
    while data := await reader.read(65536):
        if is_upload and (Path("die").exists() or Path("pause").exists()):
            uploaded += len(data)
            if uploaded > 300_000:
                uploaded = 0
                Path("pause").unlink(missing_ok=True)
                if Path("die").exists():
                    os._exit(1)
        writer.write(data)
        await writer.drain()
    writer.close()

async def serve(reader, writer):
    other_reader, other_writer = await asyncio.open_connection("127.0.0.1", 5001)
    ways = forward(reader, other_writer, True), forward(other_reader, writer, False)
    await asyncio.gather(*ways, return_exceptions=True)

async def main():
    server = await asyncio.start_server(serve, "0.0.0.0", 5000)
    print("listening", flush=True)
    await server.serve_forever()

asyncio.run(main())
"""
MAKE = f"import fsspec; fsspec.filesystem('s3').mkdir('{BUCKET}')"
FETCH = "import fsspec, sys; fsspec.filesystem('s3').get(sys.argv[1], sys.argv[2], recursive=True)"
VARIABLES = {
    "AWS_ENDPOINT_URL": "http://c:5000",
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "no_proxy": "*",
}
FLAGS = (*COUNTED, "--checkpoint.every", 20, "--training.steps", STEPS)


class Store:
    """The S3 server of the host `c`."""

    def __init__(self, net, folder):
        self.net, self.folder, self.host = net, folder, net.hosts[2]
        self.starts = 0

    def start_disk(self):
        words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", 5001]
        return self.host.start(words, self.folder, "moto")

    def start(self):
        self.starts += 1
        (self.folder / "die").unlink(missing_ok=True)
        name = f"front-{self.starts}"
        front = self.host.start([sys.executable, "-c", FRONT], self.folder, name)
        front.wait_for("listening")
        return front

    def be_silent_in_a_save(self, seconds):
        """Take the host off the network in the middle of the next save."""
        file = self.folder / "pause"
        file.touch()
        wait_until(lambda: not file.exists())
        self.net.unplug(self.host)
        time.sleep(seconds)
        self.net.plug(self.host)

    def call(self, code, *words):
        """Run Python with the store, on the host `a`."""
        variables = [f"{name}={value}" for name, value in VARIABLES.items()]
        done = self.net.hosts[0].run(["env", *variables, sys.executable, "-c", code, *words])
        assert done.returncode == 0, done.stderr


class Launch:
    """A launcher on each of the hosts `a` and `b`."""

    def __init__(self, net, folder, number):
        flags = (*FLAGS, "--checkpoint.dir", f"{BUCKET}/run", "--job.hooks", "pace:Pace")
        words = (sys.executable, "-m", "titan_dit", "train", *flags)
        given = VARIABLES | {"NNODES": 2, "NGPU": 1, "RDZV_ENDPOINT": "a:29500"}
        self.runs = [
            host.start(words, folder, f"said-{host.name}-{number}", **given)
            for host in net.hosts[:2]
        ]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for each in self.runs:
            each.__exit__(*error)

    @property
    def said(self):
        return "".join(each.said for each in self.runs)

    def saved(self):
        """The newest step that was saved, by the console; 0 without."""
        steps = re.findall(r"^saved \S+/step-(\d+)$", self.said, re.MULTILINE)
        return int(steps[-1]) if steps else 0

    def wait_for_save(self):
        """Wait for one more save; return its step."""
        before = self.saved()
        wait_until(lambda: self.saved() > before)
        return self.saved()

    def wait_for_steps_after(self, step):
        wait_until(lambda: max(each.step for each in self.runs) >= step + 5)


def wait_until(done, seconds=120):
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


@pytest.fixture
def undisturbed(tmp_path):
    """The run directory of the same run on two ranks of one host, into a folder."""
    return undisturbed_run(tmp_path / "undisturbed", *FLAGS)


def test_a_run_of_two_hosts_goes_on_when_its_store_fails_in_a_save(undisturbed, tmp_path):
    (tmp_path / "pace.py").write_text(PACE)
    last = f"step-{STEPS:08d}"
    found = tmp_path / "outputs" / "digits"
    with Network(tmp_path, 3) as net, contextlib.ExitStack() as stack:
        store = Store(net, tmp_path)
        stack.enter_context(store.start_disk()).wait_for("Running on")
        server = stack.enter_context(store.start())
        store.call(MAKE)
        first = stack.enter_context(Launch(net, tmp_path, 1))
        first.wait_for_save()
        store.be_silent_in_a_save(20)
        first.wait_for_save()
        (tmp_path / "die").touch()
        server.end(90)
        wait_until(lambda: "was not saved in s3://bucket/run" in first.said)
        stack.enter_context(store.start())
        step = first.wait_for_save()
        first.wait_for_steps_after(step)
        for each in first.runs:
            each.send(signal.SIGKILL)
        for each in first.runs:
            each.end()
        second = stack.enter_context(Launch(net, tmp_path, 2))
        assert [each.end(300) for each in second.runs] == [0, 0], second.said
        assert f"resumed from {BUCKET}/run/step-{step:08d}" in second.said
        store.call(FETCH, f"{BUCKET}/run/{last}/", f"{found}/checkpoints/{last}/")
    assert_each_sample_once(found, STEPS)
    same, difference = same_bits(found, undisturbed)
    assert same, difference
