"""Lanes of shared memory: slots, their lifetime, and what is left of them."""

import gc
import os
import resource
import weakref
from pathlib import Path

import pytest
import torch
from joined import STREAM, content, forward, gradient, pair, same

from titan_dit.config.section import UserError
from titan_dit.pipeline.transports import shared_memory
from titan_dit.pipeline.transports.shared_memory import Layout, new_slot


def pass_on(source, target, message, stream=STREAM):
    """Send a message that is posted; return what the other rank takes."""
    source.send(message, content(message, stream))
    target.wait(5)
    assert target.arrived() == [message]
    return target.take(message)


def slots_of(transport):
    """Slots of all lanes."""
    return sum(len(receiver.slots) for receiver in transport.receivers.values())


def traces():
    """What a transport could leave: open files, threads, shared memory."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("titan_dit-slot")
    files, threads = (len(list(Path("/proc/self", it).iterdir())) for it in ("fd", "task"))
    return files, threads, maps, list(Path("/dev/shm").glob("*titan_dit*"))


def test_a_slot_is_free_when_its_last_view_dies():
    source, target = pair()
    for number in range(2):
        target.post(forward(number))
    kept = pass_on(source, target, forward(0))
    assert same(pass_on(source, target, forward(1)), content(forward(1)))
    # A view of one tensor keeps the slot of all.
    kept = kept[0][1:, 2:]
    for number in range(2, 9):
        target.post(forward(number))
        assert same(pass_on(source, target, forward(number)), content(forward(number)))
        assert same((kept,), (content(forward(0))[0][1:, 2:],))
    assert slots_of(target) == 2
    del kept
    for number in (9, 10):
        target.post(forward(number))
    assert slots_of(target) == 2


def test_autograd_keeps_the_slot_of_what_it_saved():
    source, target = pair()
    target.post(forward(0))
    weight = torch.ones(33, 7, dtype=torch.bfloat16, requires_grad=True)
    stream = pass_on(source, target, forward(0))[0].requires_grad_()
    loss = (stream * weight).sum()
    del stream
    for number in range(1, 4):
        target.post(forward(number))
        pass_on(source, target, forward(number))
    loss.backward()
    assert torch.equal(weight.grad, content(forward(0))[0])
    assert slots_of(target) == 2


def test_streams_are_read_in_place():
    source, target = pair()
    target.post(forward(0))
    taken = pass_on(source, target, forward(0))
    sender = source.outgoing[0].sender
    (slot,) = sender.slots.values()
    sender.layout.views(slot)[0].fill_(3)
    assert (taken[0] == 3).all()


def test_messages_of_another_bucket_use_the_same_slots():
    source, target = pair()
    small = tuple(tensor[: len(tensor) // 2].contiguous() for tensor in content(forward(0)))
    like = tuple(tensor.to("meta") for tensor in small)
    for number in range(6):
        wanted = small if number % 2 else content(forward(number))
        for transport in (source, target):
            transport.use(like if number % 2 else STREAM)
        target.post(forward(number))
        source.send(forward(number), wanted)
        found = target.take(forward(number))
        assert same(found, wanted)
        del found
    assert slots_of(target) == 1
    with pytest.raises(AssertionError, match="must be the largest"):
        source.use(tuple(torch.empty(10**6, device="meta") for _ in STREAM))


def test_memory_is_what_was_posted_or_is_held():
    source, target = pair()
    held = []
    for number in range(40):
        target.post(forward(number))
        held.append(pass_on(source, target, forward(number)))
        del held[:-3]
    assert slots_of(target) == 3 + 1


def test_the_last_slot_used_is_used_first():
    source, target = pair()
    for number in range(3):
        target.post(forward(number))
    for number in range(3):
        pass_on(source, target, forward(number))
    for number in range(3, 9):
        target.post(forward(number))
        pass_on(source, target, forward(number))
    (receiver,) = target.receivers.values()
    assert len(receiver.slots) == 3
    assert receiver.free[-1] == 2


def test_nothing_is_left_after_close():
    pair()  # What Python opens once.
    before = traces()
    source, target = pair((0, 1, 0, 1))
    for number in range(3):
        target.post(forward(number))
        source.post(gradient(number))
    stream = pass_on(source, target, forward(0))
    pass_on(target, source, gradient(0))
    assert traces()[2] > before[2]
    for transport in (source, target):
        transport.flush()
        transport.close()
    assert same(stream, content(forward(0)))
    died = weakref.ref(source)
    del stream, source, target, transport
    assert traces() == before
    assert died() is None


def test_empty_tensors_and_messages_without_any_need_no_memory():
    assert Layout(()).num_bytes == shared_memory.ALIGNMENT
    integers = STREAM[1:2]
    source, target = pair(stream=integers)
    source.post(gradient(0))
    assert pass_on(target, source, gradient(0), integers) == ()


def test_a_host_without_memory_for_a_slot_is_told_so_at_the_start():
    # As ENOSPC of a full host, which no test can have.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(
            UserError, match="no memory for 1,048,576 bytes of messages 1I to"
        ) as was:
            pair(stream=(torch.empty(1 << 18, device="meta"),))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert '"process_group"' in str(was.value)
    assert "\n" not in str(was.value)


def test_an_old_kernel_reserves_the_memory_another_way(monkeypatch):
    monkeypatch.setattr(shared_memory, "MADV_POPULATE_WRITE", 9999)
    file, mapping = new_slot(1 << 16, "a test")
    assert os.fstat(file).st_blocks * 512 >= 1 << 16
    os.close(file)
    mapping.close()
