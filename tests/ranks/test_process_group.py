"""Timeouts of all process groups, and groups that cannot be opened."""

import errno
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks

from titan_dit.config.section import UserError
from titan_dit.parallel.mesh import AxisSizes, Mesh
from titan_dit.ranks import process_group
from titan_dit.ranks.failure import INTERNAL_ERROR, Disruption, NetworkFailure, describe
from titan_dit.ranks.process_group import PATIENCE, Ranks
from titan_dit.ranks.watchdog import LAST_RESORT_S, SLOW_S, Watchdog


def timeouts():
    """Description -> timeout in seconds, of every group and backend of this rank."""
    return {
        group.group_desc: group._get_backend(device).options._timeout.total_seconds()
        for group in process_group.own_groups()
        for device in group._device_types
    }


def timeouts_of_a_run(world, folder, step_timeout_s):
    """At the start, in the first step, and after it, with a group that the step has opened."""
    Mesh(AxisSizes(dp_replicate=world.size), "cpu")
    Ranks.with_own_group()
    found = [timeouts()]
    with Watchdog(folder, world.rank, step_timeout_s, process_group.set_timeouts) as watchdog:
        dist.new_group([0, 1], group_desc="late")
        found.append(timeouts())
        watchdog.alive(1)
        found.append(timeouts())
    return found


@pytest.mark.parametrize("step_timeout_s", [300, 5000])
def test_no_group_ends_a_run_that_the_watchdog_allows(step_timeout_s, tmp_path):
    for start, first_step, later in on_ranks(2, timeouts_of_a_run, tmp_path, step_timeout_s):
        assert set(start) >= {"default_pg", "mesh_tp", "checkpoints"}
        for moment in (start, first_step, later):
            assert moment.pop(process_group.CHECKPOINTS) == PATIENCE.total_seconds()
        allowed = max(step_timeout_s, SLOW_S) + LAST_RESORT_S
        assert set(start.values()) == {process_group.STARTING.total_seconds()}
        late = first_step.pop("late")
        assert late != later["late"]
        (before,), (after,) = set(first_step.values()), set(later.values())
        assert before > after > allowed


def threads_of_collectives(world):
    """The threads of this rank that run gloo's collectives, and its groups, after some of each."""
    groups = [dist.group.WORLD, dist.new_group([0]), dist.new_group([0])]
    for group in groups:
        works = [dist.all_reduce(torch.zeros(1), group=group, async_op=True) for _ in range(8)]
        for work in works:
            work.wait()
    names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    return names.count("pt_gloo_runloop"), len(groups)


def own_options(world):
    """The threads of a group that somebody opens with options of his own."""
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._threads = [gloo.create_default_device()], 3
    return gloo(dist.HashStore(), 0, 1, options).options._threads


def test_options_of_ones_own_are_kept():
    assert on_ranks(1, own_options) == [3]


def test_one_thread_runs_the_collectives_of_a_gloo_group():
    """Two threads write the last collective's name at once, and the rank dies."""
    [(threads, groups)] = on_ranks(1, threads_of_collectives)
    assert threads == groups


def test_a_group_that_cannot_be_opened_is_one_line_and_may_be_tried_again(monkeypatch):
    where = {"RANK": "3", "WORLD_SIZE": "64", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    for name, value in where.items():
        monkeypatch.setenv(name, value)
    frames = "The client socket has timed out.\nException raised from ...\nframe #0: c10::Error"
    with (
        pytest.raises(NetworkFailure) as failed,
        process_group.opening("the group for checkpoints"),
    ):
        raise dist.DistNetworkError(frames)
    code, message = describe(failed.value)
    assert code == INTERNAL_ERROR
    assert message.startswith(
        "error: rank 3 of 64 could not open the group for checkpoints: The client socket has timed "
        "out. All nodes must reach node1:29500"
    )
    assert "\n" not in message


NCCL = """NCCL error in: ProcessGroupNCCL.cpp:94, unhandled system error, NCCL version 2.29.3
ncclSystemError: System call (e.g. socket, malloc) or external library call failed.
Last error:
socketStartConnect: Connect to 10.0.0.2<41553> failed : No route to host
Exception raised from ..."""


def test_a_group_that_nccl_cannot_open_is_reported_in_its_own_words():
    with (
        pytest.raises(NetworkFailure) as failed,
        process_group.opening("the default process group"),
    ):
        raise dist.DistBackendError(NCCL)
    assert (
        "unhandled system error, NCCL version 2.29.3: socketStartConnect: Connect to "
        "10.0.0.2<41553> failed : No route to host. All nodes"
    ) in str(failed.value)


def test_a_full_device_is_not_reported_as_a_network_failure():
    with pytest.raises(torch.OutOfMemoryError), process_group.opening("the default process group"):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_groups_that_do_not_close_keep_no_finished_job(monkeypatch, capsys):
    monkeypatch.setattr(process_group, "CLOSING_S", 0.1)
    monkeypatch.setattr(dist, "destroy_process_group", threading.Event().wait)
    process_group.close_groups()
    assert "did not close within 0.1 s" in capsys.readouterr().err


def outcomes_of_the_first(world):
    """The exceptions that each rank gets of actions of rank 0."""
    found = []
    for error in (
        UserError("tp=3"),
        Disruption("disk"),
        OSError(errno.EROFS, "Read-only file system", "a/file"),
    ):

        def action(error=error):
            raise error

        try:
            Ranks().run_on_first(action)
        except Exception as caught:
            found.append((type(caught).__name__, str(caught)))
    return found


def test_an_error_of_the_first_rank_is_raised_on_all_with_its_kind():
    first, second = on_ranks(2, outcomes_of_the_first)
    assert [kind for kind, _ in first] == ["UserError", "Disruption", "OSError"]
    assert second[:2] == first[:2]
    kind, line = second[2]
    assert kind == "Disruption"
    assert line.startswith("a/file: Read-only file system")
