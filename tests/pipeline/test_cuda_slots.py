"""Slots in device memory: on simulated devices, and two ranks on one GPU."""

import gc

import pytest
import torch
from harness import on_ranks
from joined import Operators
from simulated_cuda import Cuda, F, World, two_ends
from torch import distributed as dist

from titan_dit.pipeline.schedules.schedule import Action
from titan_dit.pipeline.transports.base import End, Transport, lanes
from titan_dit.pipeline.transports.cuda_slots import CudaReceiver, CudaSender
from titan_dit.pipeline.transports.meeting import meet

LIKE = (
    torch.empty(3, 5, device="meta"),
    torch.empty(0, 2, device="meta"),
    torch.empty(7, dtype=torch.int64, device="meta"),
    torch.empty(2, 3, dtype=torch.bfloat16, device="meta"),
)


class Pair:
    """Two ranks, each with a device."""

    def __init__(self, *, are_peers=True):
        self.world = World()
        self.here = Cuda(self.world, are_peers=are_peers)
        self.there = Cuda(self.world)
        self.source, self.target = two_ends(
            lambda end: CudaSender(end, self.here),
            lambda end: CudaReceiver(end, self.there),
            LIKE,
        )
        self.sender = self.source.outgoing[0].sender
        self.receiver = self.target.receivers[0]

    def send(self, number):
        self.target.post(Action(F, 0, number))
        sent = stream(number)
        self.source.send(Action(F, 0, number), sent)
        return sent

    def arrived(self):
        """What the receiver sees, after the sender has had its turn."""
        self.source.arrived()
        return self.target.arrived()

    def take(self, number):
        return self.target.take(Action(F, 0, number))


def stream(number):
    generator = torch.Generator().manual_seed(number)
    return tuple(torch.randn(t.shape, generator=generator).mul(100).to(t.dtype) for t in LIKE)


def equal(found, wanted):
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in wanted]
    return all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("are_peers", [True, False])
def test_messages_arrive_whole_in_a_few_slots_used_again_and_again(are_peers):
    pair, held = Pair(are_peers=are_peers), {}
    for number in range(60):
        sent = pair.send(number)
        for _ in range(3):  # Out of host memory the receiver has a copy of its own to make.
            pair.world.run()
            found = pair.arrived()
            if found:
                break
        assert found == [Action(F, 0, number)]
        held[number] = sent, pair.take(number)
        if number % 4 == 3:
            assert all(equal(taken, sent) for sent, taken in held.values())
            held.clear()
    assert len(pair.receiver.slots) == 4
    assert len(pair.sender.pinned) == (0 if are_peers else 1)
    pair.source.close(), pair.target.close()
    assert not pair.here.pinned
    assert not pair.there.pinned


def test_a_message_is_announced_at_once_and_has_arrived_when_the_device_has_copied():
    pair = Pair()
    computing = []
    pair.here.stream.work.append(lambda: bool(computing))
    pair.send(0)
    pair.world.run()
    assert pair.arrived() == []
    assert [c.number for c in pair.receiver.coming] == [0]
    computing.append("done")
    assert pair.arrived() == []
    pair.world.run()
    assert pair.arrived() == [Action(F, 0, 0)]


@pytest.mark.parametrize("are_peers", [True, False])
def test_nothing_of_a_message_is_computed_after_the_event_that_says_it_is(are_peers, monkeypatch):
    pair, operators = Pair(are_peers=are_peers), Operators()
    record = pair.here.record

    def noted(event, stream):
        operators.log.append("recorded")
        return record(event, stream)

    monkeypatch.setattr(pair.here, "record", noted)
    pair.target.post(Action(F, 0, 0))
    sent = tuple(t.t().contiguous().t() if t.dim() == 2 else t for t in stream(0))
    with operators:
        pair.source.send(Action(F, 0, 0), sent)
    computed = operators.log.index("recorded")
    assert "aten.clone.default" in operators.log[:computed]
    assert "aten.clone.default" not in operators.log[computed:]
    for _ in range(3):
        pair.world.run()
        pair.arrived()
    assert equal(pair.take(0), sent)


def test_a_slot_is_filled_again_only_after_its_last_use_on_the_device():
    pair = Pair()
    first = pair.send(0)
    pair.world.run()
    pair.arrived()
    taken, seen, computing = pair.take(0), [], []
    memory = pair.there.memory[pair.receiver.slots[0].address]
    pair.there.stream.work.append(lambda: bool(computing))
    used = torch.frombuffer(memory.numpy(), dtype=torch.float32)[:15].view(3, 5)
    pair.there.stream.work.append(lambda: seen.append(used.clone()))
    assert equal(taken, first)
    del taken
    # The host has no view of the slot left, but its device still reads it.
    second = pair.send(1)
    pair.world.run()
    assert pair.arrived() == []
    computing.append("done")
    pair.world.run()
    assert torch.equal(seen[0], first[0])
    assert pair.arrived() == [Action(F, 0, 1)]
    assert equal(pair.take(1), second)
    assert len(pair.receiver.slots) == 1


def test_a_slot_is_not_given_back_while_one_tensor_or_view_of_it_lives():
    pair = Pair()
    pair.send(0)
    pair.world.run()
    pair.arrived()
    view = pair.take(0)[2][:2].detach()
    gc.collect()
    assert not pair.receiver.free
    pair.send(1)
    assert len(pair.receiver.slots) == 2
    assert torch.equal(view, stream(0)[2][:2])
    del view
    assert list(pair.receiver.free) == [0]


@pytest.mark.parametrize("are_peers", [True, False])
def test_sent_tensors_live_until_they_are_copied(are_peers):
    pair = Pair(are_peers=are_peers)
    pair.target.post(Action(F, 0, 0))
    sent = stream(0)
    wanted, address = [t.clone() for t in sent], sent[0].data_ptr()
    pair.source.send(Action(F, 0, 0), sent)
    del sent
    # Freed memory would be taken by one of these.
    others = [torch.zeros(3, 5) for _ in range(8)]
    assert address not in [other.data_ptr() for other in others]
    for _ in range(3):
        pair.world.run()
        pair.arrived()
    assert equal(pair.take(0), wanted)
    assert not pair.sender.flying
    assert not pair.sender.leaving


def test_host_memory_is_filled_again_only_when_the_receiver_has_copied_it():
    pair = Pair(are_peers=False)
    sent = [pair.send(0)]
    pair.source.flush()  # Announces what is copied.
    assert pair.target.arrived() == []  # The receiver's copy is under way.
    sent.append(pair.send(1))
    assert len(pair.sender.pinned) == 2
    pair.source.flush()
    found = pair.arrived()
    pair.world.run()
    assert found + pair.arrived() == [Action(F, 0, 0), Action(F, 0, 1)]
    assert equal(pair.take(0), sent[0])
    assert equal(pair.take(1), sent[1])
    pair.send(2)
    assert len(pair.sender.pinned) == 2
    assert len(pair.sender.idle) == 1


def test_a_wait_naps_while_a_device_copies():
    pair = Pair()
    pair.send(0)
    pair.target.wait(timeout_s=0.01)
    assert pair.target.arrived() == []
    pair.world.run()
    pair.target.wait()
    assert pair.target.arrived() == [Action(F, 0, 0)]


def exchange(world, may_reach, num_messages):
    """Two ranks send each other streams between computations; whether all bits were right."""
    device, rank = torch.device("cuda", 0), world.rank
    torch.cuda.set_device(device)
    peer = meet(dist.group.WORLD, [1 - rank])[1 - rank]
    senders, receivers = {}, {}
    for index, lane in enumerate(lanes([0, 1])):
        end = End(lane, index, peer, None, LIKE, device)
        if lane.source == rank:
            senders[index] = CudaSender(end, may_reach=may_reach)
        else:
            receivers[index] = CudaReceiver(end)
    transport = Transport({1 - rank: peer}, senders, receivers)
    (outgoing,), (incoming,) = senders.values(), receivers.values()
    right, held = torch.ones((), dtype=torch.bool, device=device), []
    for number in range(num_messages):
        transport.post(incoming.end.lane.message(number))
        torch.cuda._sleep(2 * 10**6)  # The device lags behind its host.
        made = tuple(t.to(device, non_blocking=True).clone() for t in stream(2 * number + rank))
        transport.send(outgoing.end.lane.message(number), made)
        del made
        message = incoming.end.lane.message(number)
        while message not in transport.arrived():
            transport.wait(timeout_s=30)
        taken = transport.take(message)
        torch.cuda._sleep(10**6)
        for tensor, wanted in zip(taken, stream(2 * number + 1 - rank), strict=True):
            right &= (tensor == wanted.to(device)).all()
        held = [*held, taken][-2:]  # Two messages are in use at once.
        del taken
    transport.flush()
    result = bool(right), len(incoming.slots), len(outgoing.slots), len(outgoing.pinned)
    dist.barrier()
    transport.close()
    return result


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("may_reach", [True, False])
def test_two_ranks_on_one_gpu_exchange_streams_to_the_bit(may_reach):
    for right, slots, reached, pinned in on_ranks(2, exchange, may_reach, 200, timeout=120):
        assert right
        assert slots <= 4
        assert reached == (slots if may_reach else 0)
        assert (pinned == 0) == may_reach
