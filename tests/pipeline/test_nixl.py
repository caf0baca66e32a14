"""Streams by nixl: the protocol on a simulated agent; the bytes by nixl itself if it is here."""

import ctypes
import socket
from importlib.util import find_spec

import pytest
import torch
from harness import on_ranks
from joined import content, forward, gradient, pair, same
from simulated_cuda import Cuda, World
from test_transports import LOOPED, V, random_passes

from titan_dit.config.section import UserError
from titan_dit.pipeline.transports.nixl import NixlReceiver, NixlSender
from titan_dit.pipeline.transports.nixl_agent import Agent, Piece, interface_of, ucx_devices
from titan_dit.pipeline.transports.nixl_device import DeviceNixlReceiver, DeviceNixlSender

CPU = torch.device("cpu")
needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="needs nixl")


class SimulatedAgent:
    """See `nixl_agent.Agent`: a write happens when its sender has polled for it three times."""

    def __init__(self, name):
        self.name, self.registered, self.met, self.polls = name, [], [], {}
        self.index = 0

    def piece(self, address, num_bytes):
        return Piece(address, num_bytes, 0)

    def register(self, pieces):
        self.registered.append(pieces)
        return pieces

    def release(self, registered):
        self.registered.remove(registered)

    def describe(self, registered):
        return self.name

    def meet(self, described):
        self.met.append(described)
        return described.decode()

    def write(self, sources, targets, name):
        assert name.encode() == self.met[-1]
        assert sources in self.registered
        self.polls[id(sources)] = 0
        return sources, targets

    def is_done(self, transfer):
        sources, targets = transfer
        assert sources in self.registered
        self.polls[id(sources)] += 1
        if self.polls[id(sources)] < 3:
            return False
        for source, target in zip(sources, targets, strict=True):
            assert source.num_bytes == target.num_bytes
            ctypes.memmove(target.address, source.address, source.num_bytes)
        return True

    def progress(self):
        pass


def joined(agents):
    """Two transports whose lanes write by the agents of their ranks."""
    return pair(
        ends=(
            lambda end: NixlSender(end, agents[end.lane.source]),
            lambda end: NixlReceiver(end, agents[end.lane.target]),
        )
    )


def simulated():
    agents = [SimulatedAgent(b"first"), SimulatedAgent(b"second")]
    return *joined(agents), agents


def test_a_message_is_announced_when_its_write_is_done():
    source, target, agents = simulated()
    target.post(forward(0))
    source.send(forward(0), content(forward(0)))
    assert target.arrived() == []
    assert len(agents[0].registered) == 2  # The slot of its own lane, and what it sends.
    while not target.arrived():
        source.wait(timeout_s=0.001)
    assert same(target.take(forward(0)), content(forward(0)))
    assert len(agents[0].registered) == 1


def test_a_flush_ends_when_everything_is_written():
    source, target, agents = simulated()
    for number in range(5):
        target.post(forward(number))
        source.send(forward(number), content(forward(number)))
    source.flush()
    assert target.arrived() == [forward(number) for number in range(5)]
    for number in range(5):
        assert same(target.take(forward(number)), content(forward(number)))
    assert len(agents[0].registered) == 1


def test_a_slot_is_described_once_and_written_again_when_no_view_is_left():
    source, target, agents = simulated()
    held = []
    for number in range(12):
        target.post(forward(number))
        source.send(forward(number), content(forward(number)))
        source.flush()
        assert target.arrived() == [forward(number)]
        held.append((number, target.take(forward(number))))
        if len(held) == 3:
            assert all(same(taken, content(forward(n))) for n, taken in held)
            held.clear()
    assert agents[0].met == [b"second"] * 3


def test_a_rank_that_expects_a_message_helps_to_receive_it_and_one_that_does_not_sleeps():
    source, target, _ = simulated()
    receiver = target.receivers[0]
    assert not receiver.progress()
    target.post(forward(0))
    assert receiver.progress()
    source.send(forward(0), content(forward(0)))
    source.flush()
    target.arrived()
    assert not receiver.progress()


def test_on_a_gpu_a_message_is_written_when_it_is_computed_and_a_slot_when_it_was_read():
    world, agents = World(), [SimulatedAgent(b"first"), SimulatedAgent(b"second")]
    devices = [Cuda(world), Cuda(world)]
    source, target = pair(
        ends=(
            lambda e: DeviceNixlSender(e, agents[e.lane.source], devices[e.lane.source]),
            lambda e: DeviceNixlReceiver(e, agents[e.lane.target], devices[e.lane.target]),
        )
    )
    sender, receiver = source.outgoing[0].sender, target.receivers[0]

    def send(number):
        target.post(forward(number))
        source.send(forward(number), content(forward(number)))

    def receive(number):
        while forward(number) not in target.arrived():
            source.arrived()
        return target.take(forward(number))

    send(0)
    for _ in range(9):
        source.arrived()
    assert (len(sender.staged), len(sender.flying)) == (1, 0)  # It is being computed.
    world.run()
    taken = receive(0)
    assert same(taken, content(forward(0)))
    del taken
    send(1)  # The slot is free, but the device may still read it.
    world.run()
    assert same(receive(1), content(forward(1)))
    assert len(receiver.slots) == 2
    for number in range(2, 20):
        world.run()
        send(number)
        world.run()
        assert same(receive(number), content(forward(number)))
    assert len(receiver.slots) == 2
    assert len(sender.registered) == 1
    source.close()
    target.close()
    assert not agents[0].registered + agents[1].registered


@needs_nixl
def test_both_directions_pass_through_nixl():
    agents = [Agent(CPU), Agent(CPU)]
    first, second = joined(agents)
    held = []
    for number in range(40):
        second.post(forward(number))
        first.post(gradient(number))
        first.send(forward(number), content(forward(number)))
        second.send(gradient(number), content(gradient(number)))
        for message, transport, other in (
            (forward(number), second, first),
            (gradient(number), first, second),
        ):
            while message not in transport.arrived():
                other.wait(timeout_s=0.0001)
            held.append((message, transport.take(message)))
        if number % 4 == 3:
            assert all(same(taken, content(message)) for message, taken in held)
            held.clear()
    first.flush()
    second.flush()
    first.close()
    second.close()


@needs_nixl
@pytest.mark.parametrize(("ways", "ranks"), [("", 4), ("tcp", 2)])
def test_ranks_exchange_streams_by_nixl(ways, ranks):
    cases = [("nixl", V if ranks == 4 else LOOPED, False), ("auto", tuple(range(ranks)), True)]
    variables = {"UCX_TLS": ways} if ways else {}
    count = f"({ranks - 1} link{'s' * (ranks > 2)})"
    assert (
        on_ranks(ranks, random_passes, cases, variables=variables, timeout=120)
        == [
            [
                f"pipeline transport: nixl within a host {count}",
                f"pipeline transport: nixl between hosts {count}",
            ]
        ]
        * ranks
    )


def test_the_network_is_an_interface_or_an_address_of_this_host():
    names = [name for _, name in socket.if_nameindex()]
    assert interface_of(names[0]) == names[0]
    assert interface_of("127.0.0.1") == "lo"
    for wrong in ("nowhere0", "192.0.2.255"):
        with pytest.raises(UserError, match=rf"network='{wrong}'.*no such interface or address"):
            interface_of(wrong)


def test_ucx_gets_the_rdma_ports_of_an_interface_beside_it(tmp_path):
    for device, interface in (("mlx5_0", "eth0"), ("mlx5_1", "eth1"), ("mlx5_bond_0", "bond0")):
        entries = tmp_path / "infiniband" / device / "ports" / "1" / "gid_attrs" / "ndevs"
        entries.mkdir(parents=True)
        (entries / "0").write_text(f"{interface}\n")
    (tmp_path / "infiniband" / "mlx5_ib" / "ports" / "2").mkdir(parents=True)
    (tmp_path / "net" / "ib0" / "device" / "infiniband" / "mlx5_ib").mkdir(parents=True)
    assert ucx_devices("eth1", tmp_path) == "mlx5_1:1,eth1"
    assert ucx_devices("bond0", tmp_path) == "mlx5_bond_0:1,bond0"
    assert ucx_devices("ib0", tmp_path) == "mlx5_ib:2,ib0"
    assert ucx_devices("lo", tmp_path) == "lo"
