"""A launch without a console reader, and a second launch into its run directory."""

import json
import os
import signal
from types import SimpleNamespace

import forked
import pytest
import torch.distributed as dist
from commands import environment, only_error, run
from running import Running, alone, checkpoints, trainer

from titan_dit.checkpoint.run_lock import FILE, Holder
from titan_dit.launcher.agent import Agent

ENDLESS = ("--training.steps", 100_000, "--checkpoint.every", 20)


class Unread(Running):
    """As `command 2>&1 | head -1`."""

    said = ""

    def __init__(self, command, cwd):
        os.mkfifo(cwd / "pipe")
        self.process = forked.start(command, cwd, environment(), cwd / "pipe")
        with (cwd / "pipe").open() as pipe:
            self.said = pipe.readline()


@pytest.mark.timeout(300)
def test_a_launch_goes_on_unread_and_a_second_one_into_its_run_is_refused(tmp_path):
    folder = tmp_path / "outputs" / "digits"

    def rows():
        file = folder / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
        return [json.loads(line)["step"] for line in lines if line.endswith("\n")]

    with Unread(trainer(*ENDLESS, ranks=1), tmp_path) as first:
        assert "titan_dit" in first.said
        first.wait_until(lambda: len(rows()) > 5)
        holder = Holder.of((folder / FILE).read_text())
        (rank,) = first.children()
        assert holder.pid == rank
        assert holder.launch
        os.kill(rank, signal.SIGSTOP)  # Leave the core to the second launch.
        message = only_error(run(alone(*ENDLESS), tmp_path))
        os.kill(rank, signal.SIGCONT)
        assert message == (
            f"error: [job] outputs/digits: in use by {holder} since {holder.since}. "
            "Wait for it, stop it, or choose another --job.name.\n"
        )
        taken = len(rows())
        first.wait_until(lambda: len(rows()) > taken + 5)
        first.send(signal.SIGTERM)
        assert first.end() == 0
    assert rows() == list(range(1, rows()[-1] + 1))
    assert checkpoints(tmp_path)[-1] >= rows()[-1]
    assert not list(folder.rglob(FILE))


def test_launchers_that_meet_give_their_ranks_one_name_and_others_another():
    def names(store, run_id="a"):
        handler = SimpleNamespace(_store=store, get_run_id=lambda: run_id)
        group = SimpleNamespace(spec=SimpleNamespace(rdzv_handler=handler))
        return [Agent.launch_name(None, group) for _ in range(2)]

    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True) for _ in range(2)]
    (first, again), (other, _) = map(names, stores)
    assert first == again != other
    assert first not in names(stores[0], run_id="b")
    assert names(None) == ["", ""]
