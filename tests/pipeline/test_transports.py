"""Transports between ranks: equal bytes in any interleaving, nothing beyond what was posted."""

import gc
import os
import random
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import RankFailed, on_ranks
from joined import CPU, STREAM, Operators, content, forward, gradient, pair, same

from titan_dit.parallel.mesh import AxisSizes, Mesh
from titan_dit.pipeline.schedules.schedule import Kind
from titan_dit.pipeline.transports import choice
from titan_dit.pipeline.transports.base import Lane, Sender, lanes
from titan_dit.pipeline.transports.meeting import meet
from titan_dit.pipeline.transports.shared_memory import SharedReceiver

MICROBATCHES = 7
LOOPED, RING, V = (0, 1, 0, 1), (0, 1, 2, 3, 0), (0, 1, 2, 3, 3, 2, 1, 0)


def test_lanes_join_neighbouring_stages_on_different_ranks():
    assert lanes((0, 1, 1, 0)) == (
        Lane(Kind.FORWARD, 0, 0, 1),
        Lane(Kind.BACKWARD_INPUT, 1, 1, 0),
        Lane(Kind.FORWARD, 2, 1, 0),
        Lane(Kind.BACKWARD_INPUT, 3, 0, 1),
    )


class Pass:
    """A rank's messages of a pass, sent and posted in a random interleaving."""

    def __init__(self, transport, every, rank, seed):
        self.transport, self.draw = transport, random.Random(100 * seed + rank)
        self.left = {lane: 0 for lane in every if rank in (lane.source, lane.target)}
        self.rank, self.posted, self.held = rank, set(), []
        self.num_taken = 0

    def run(self):
        """Until everything is sent, posted and taken; the number of messages taken."""
        while self.left or self.posted:
            if self.left and self.draw.random() < 0.8:
                self.step(self.draw.choice(list(self.left)))
            elif self.posted:
                self.transport.wait(0.01 if self.left else 20)
            for message in self.transport.arrived():
                self.posted.remove(message)  # Not posted: an error.
                tensors = self.transport.take(message)
                assert same(tensors, content(message)), message
                self.held.append((message, tensors))
                self.num_taken += 1
            if len(self.held) > 3:
                message, tensors = self.held.pop(self.draw.randrange(3))
                assert same(tensors, content(message)), f"{message} was overwritten"
        self.transport.flush()
        return self.num_taken

    def step(self, lane):
        """Send or post the next message of a lane."""
        message = lane.message(self.left[lane])
        if lane.source == self.rank:
            self.transport.send(message, content(message))
        else:
            self.transport.post(message)
            self.posted.add(message)
        self.left[lane] += 1
        if self.left[lane] == MICROBATCHES:
            del self.left[lane]


def random_passes(world, cases):
    """Console line and number of messages of each case; the same transport for two passes."""
    mesh, found = Mesh(AxisSizes(pp=world.size), "cpu"), []
    for name, stage_ranks, across_hosts in cases:
        choice.meet = partial(meet, across_hosts=across_hosts)
        arguments = (mesh.p2p, stage_ranks, STREAM, CPU, name, "")
        transport, line = choice.open_transport(*arguments)
        every = lanes(stage_ranks)
        taken = [Pass(transport, every, world.rank, seed).run() for seed in range(2)]
        expected = MICROBATCHES * sum(lane.target == world.rank for lane in every)
        assert taken == [expected] * 2
        dist.barrier()
        transport.close()
        found.append(line)
    return found


def test_messages_of_two_ranks_keep_their_bytes_in_any_interleaving():
    cases = [(name, LOOPED, False) for name in ("auto", "shared_memory", "process_group")]
    cases += [("auto", LOOPED, True), ("shared_memory", (0, 1), True)]
    for lines in on_ranks(2, random_passes, cases, timeout=100):
        assert [line.removeprefix("pipeline transport: ") for line in lines] == [
            "shared memory within a host (1 link)",
            "shared memory within a host (1 link)",
            "process group within a host (1 link)",
            "process group between hosts (1 link)",
            "process group between hosts (1 link)",
        ]


def test_messages_of_four_ranks_keep_their_bytes_in_any_interleaving():
    cases = [("process_group", RING, True), ("shared_memory", V, False)]
    for lines in on_ranks(4, random_passes, cases, timeout=100):
        assert lines == [
            "pipeline transport: process group between hosts (4 links)",
            "pipeline transport: shared memory within a host (3 links)",
        ]


def test_the_line_counts_each_way():
    ways = {(0, 1): ("shared memory", True), (1, 2): ("shared memory", True)}
    ways |= {(2, 3): ("process group", False)}
    assert choice.line(ways) == (
        "pipeline transport: shared memory within a host (2 links), "
        "process group between hosts (1 link)"
    )


def num_files():
    """Open files of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def credits_and_rest(world):
    """What must hold of both transports; rank 0 sends to rank 1."""
    mesh, found = Mesh(AxisSizes(pp=2), "cpu"), {}
    choice.open_transport(mesh.p2p, (0, 1), STREAM, CPU, "process_group", "")[0].close()
    for name in ("process_group", "shared_memory"):
        files = num_files()
        arguments = (mesh.p2p, (0, 1), STREAM, CPU, name, "")
        transport, _ = choice.open_transport(*arguments)
        facts = sending(transport) if world.rank == 0 else receiving(transport)
        dist.barrier()
        transport.close()
        del transport
        gc.collect()
        facts["files"] = num_files() - files
        found[name] = facts
    return found


def sending(transport):
    """Send three messages at once and one when they were taken."""
    start = time.perf_counter()
    for number in range(3):
        transport.send(forward(number), content(forward(number)))
    seconds = time.perf_counter() - start
    (outgoing,) = transport.outgoing.values()
    waiting = len(outgoing.waiting)
    dist.barrier()  # Rank 1 has posted nothing.
    while outgoing.waiting:
        transport.wait(20)
    dist.barrier()  # It has taken three.
    transport.send(forward(3), content(forward(3)))
    while outgoing.waiting:
        transport.wait(20)
    kept = len(getattr(outgoing.sender, "flying", ()))
    transport.flush()
    return {"seconds": seconds, "waiting": waiting, "kept": kept}


def receiving(transport):
    """Nothing comes before it is posted, and not more than that."""
    transport.wait(0.05)
    early = transport.arrived()
    dist.barrier()
    came = []
    for number in range(3):
        transport.post(forward(number))
        transport.wait(20)
        transport.wait(0.02)
        came.append(transport.arrived())
        transport.take(forward(number))
    cpu = time.process_time()
    transport.wait(0.5)
    cpu = time.process_time() - cpu
    dist.barrier()
    transport.post(forward(3))
    last = transport.take(forward(3))  # Waits for it.
    return {"early": early, "came": came, "cpu": cpu, "last": same(last, content(forward(3)))}


def test_nothing_comes_that_was_not_posted_and_a_send_never_waits():
    sender, receiver = on_ranks(2, credits_and_rest, timeout=60)
    for name in ("process_group", "shared_memory"):
        sent, received = sender[name], receiver[name]
        assert received["early"] == []
        assert received["came"] == [[forward(number)] for number in range(3)]
        assert received["last"]
        assert received["cpu"] < 0.1, "wait() spins"
        assert sent["waiting"] == 3
        assert sent["seconds"] < 0.5
        assert sent["kept"] <= 1, "tensors are kept after they were taken"
        assert sent["files"] == received["files"] == 0, "files are left open"


def test_a_message_that_was_not_posted_cannot_be_taken():
    _, target = pair()
    with pytest.raises(AssertionError, match="0F0 was not posted"):
        target.take(forward(0))


class Noting(Sender):
    """Notes when a message is made, and takes what it should send."""

    def __init__(self, end, log):
        super().__init__(end)
        self.log, self.sent = log, []

    def made(self, number):
        self.log.append("made")

    def send(self, number, tensors, credit):
        self.sent.append(tensors)


def test_senders_get_contiguous_tensors_that_were_computed_before_the_message_was_made():
    operators, senders = Operators(), []

    def noting(end):
        senders.append(Noting(end, operators.log))
        return senders[-1]

    source, target = pair(ends=(noting, SharedReceiver))
    target.post(forward(0))
    tensors = content(forward(0))
    assert not tensors[0].is_contiguous()
    learning = tuple(t.requires_grad_(t.is_floating_point()) for t in tensors)
    with operators:
        source.send(forward(0), learning)
        source.poll()
    assert operators.log == ["aten.clone.default"] * 2 + ["made"]
    [sent] = senders[0].sent
    assert same(sent, content(forward(0)))
    assert all(t.is_contiguous() and not t.requires_grad for t in sent)


def test_messages_of_a_lane_are_sent_in_the_sequence_in_which_they_were_posted():
    source, target = pair()
    target.post(forward(1))
    with pytest.raises(AssertionError, match="0F: 0 after"):
        source.send(forward(0), content(forward(0)))


def test_a_wait_ends_when_a_message_that_waited_has_gone():
    source, target = pair()
    source.send(forward(0), content(forward(0)))
    source.wait(0.01)
    assert source.outgoing[0].waiting
    target.post(forward(0))
    source.wait(5)
    assert not source.outgoing[0].waiting
    target.send(gradient(0), content(gradient(0)))
    target.wait(5)
    assert target.arrived() == [forward(0)]


def killed(world, note):
    """Rank 1 ends by a signal while rank 0 waits for it."""
    mesh = Mesh(AxisSizes(pp=2), "cpu")
    transport, _ = choice.open_transport(mesh.p2p, (0, 1), STREAM, CPU, "auto", "")
    if world.rank == 1:
        if os.fork():  # The harness would end rank 0 at once: a child holds the sockets.
            for peer in transport.peers.values():
                peer.socket.close()
            time.sleep(60)
        time.sleep(0.2)
        os.kill(os.getpid(), 9)
    transport.post(gradient(0))
    try:
        transport.wait(30)
    except Exception as error:
        Path(note).write_text(f"{type(error).__name__}: {error}")
        raise


def test_a_killed_rank_ends_the_wait_of_its_neighbour_and_leaves_nothing(tmp_path):
    start = time.monotonic()
    with pytest.raises(RankFailed, match="rank 0 ended"):
        on_ranks(2, killed, str(tmp_path / "note"), timeout=50)
    assert time.monotonic() - start < 25
    assert (tmp_path / "note").read_text() == (
        "NetworkFailure: Connection closed by peer: pipeline rank 1 has ended."
    )
    assert not list(Path("/dev/shm").glob("*titan_dit*"))


def test_gradients_have_the_floating_point_tensors_only():
    source, target = pair()
    source.post(gradient(0))
    target.send(gradient(0), content(gradient(0)))
    source.wait(5)
    (message,) = source.arrived()
    dtypes = [tensor.dtype for tensor in source.take(message)]
    assert dtypes == [torch.bfloat16, torch.float32, torch.float64]
