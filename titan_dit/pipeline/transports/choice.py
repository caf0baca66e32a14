"""Which transport each lane takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
import torch.distributed as dist

from titan_dit.config.layout import TransportName
from titan_dit.config.section import UserError
from titan_dit.models.base import Stream
from titan_dit.parallel.p2p_groups import P2PGroups
from titan_dit.pipeline.transports import process_group
from titan_dit.pipeline.transports.base import End, Lane, Receiver, Sender, Transport, lanes
from titan_dit.pipeline.transports.cuda_slots import CudaReceiver, CudaSender
from titan_dit.pipeline.transports.meeting import Peer, meet
from titan_dit.pipeline.transports.nixl import NixlReceiver, NixlSender
from titan_dit.pipeline.transports.nixl_agent import Agent
from titan_dit.pipeline.transports.nixl_device import DeviceNixlReceiver, DeviceNixlSender
from titan_dit.pipeline.transports.shared_memory import SharedReceiver, SharedSender

Ends: TypeAlias = tuple[Callable[[End], Sender], Callable[[End], Receiver]]


def ends_of(
    name: TransportName, peer: Peer, device: torch.device, agent: Agent | None
) -> tuple[str, Ends]:
    """(name of the transport to another rank, its sender and receiver); equal on both ranks.

    `agent`: None if not every rank has nixl.
    """
    is_cuda = device.type == "cuda"
    if peer.is_local and name in ("auto", "shared_memory"):
        within = (CudaSender, CudaReceiver) if is_cuda else (SharedSender, SharedReceiver)
        return "shared memory", within
    if name in ("auto", "nixl") and agent is not None:
        if is_cuda:
            return "nixl", (
                partial(DeviceNixlSender, agent=agent),
                partial(DeviceNixlReceiver, agent=agent),
            )
        return "nixl", (partial(NixlSender, agent=agent), partial(NixlReceiver, agent=agent))
    return "process group", process_group.ends(device)


def agent_of(
    name: TransportName,
    network: str | None,
    device: torch.device,
    peers: Iterable[Peer],
    group: dist.ProcessGroup,
) -> Agent | None:
    """The nixl agent of this rank, if a lane needs one and every rank that does can have it.

    Collective.

    Raises:
        UserError: nixl was named, and cannot start.
    """
    if name not in ("auto", "nixl"):
        return None
    agent, has_failed = None, False
    if name == "nixl" or not all(peer.is_local for peer in peers):
        try:
            agent = Agent(device, network or "")
        except UserError:
            if name == "nixl":
                raise
            has_failed = True
    failures = [has_failed] * dist.get_world_size(group)
    dist.all_gather_object(failures, has_failed, group=group)
    return None if any(failures) else agent


def open_transport(
    p2p: P2PGroups,
    stage_ranks: Sequence[int],
    stream: Stream,
    device: torch.device,
    name: TransportName,
    network: str | None,
) -> tuple[Transport, str]:
    """The transport of this rank and the console line of all ranks. Collective along pp.

    `stream`: the tensors between two stages, on the meta device; `name` and `network`: of
    [pipeline].
    """
    every = lanes(stage_ranks)
    own = {i: lane for i, lane in enumerate(every) if p2p.rank in (lane.source, lane.target)}
    group = p2p.mesh.get_group()
    peers = meet(group, (other(lane, p2p.rank) for lane in own.values()))
    agent = agent_of(name, network, device, peers.values(), group)
    senders: dict[int, Sender] = {}
    receivers: dict[int, Receiver] = {}
    ways: dict[tuple[int, int], tuple[str, bool]] = {}
    for index, lane in own.items():
        peer = peers[other(lane, p2p.rank)]
        end = End.of(lane, index, peer, p2p, stream, device)
        words, (sender, receiver) = ends_of(name, peer, device, agent)
        if lane.source == p2p.rank:
            senders[index] = sender(end)
        else:
            receivers[index] = receiver(end)
        ways[min(lane.source, lane.target), max(lane.source, lane.target)] = words, peer.is_local
    return Transport(peers, senders, receivers), line(gathered(ways, group))


def other(lane: Lane, rank: int) -> int:
    """The rank at the other end of a lane."""
    return lane.target if lane.source == rank else lane.source


def gathered(
    ways: Mapping[tuple[int, int], tuple[str, bool]], group: dist.ProcessGroup
) -> dict[tuple[int, int], tuple[str, bool]]:
    """The links of all ranks: pair of ranks -> way, within a host. Collective."""
    found = [dict(ways)] * dist.get_world_size(group)
    dist.all_gather_object(found, dict(ways), group=group)
    return {pair: way for some in found for pair, way in some.items()}


def line(ways: Mapping[tuple[int, int], tuple[str, bool]]) -> str:
    """The console line: "pipeline transport: shared memory within a host (3 links)"."""
    counts = Counter((not is_local, words) for words, is_local in ways.values())
    parts = []
    for (is_between, words), count in sorted(counts.items()):
        where = "between hosts" if is_between else "within a host"
        parts.append(f"{words} {where} ({count} link{'s' if count > 1 else ''})")
    return f"pipeline transport: {', '.join(parts)}"
