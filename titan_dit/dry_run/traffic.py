"""Bytes that a rank sends, by mesh axis and operation.

Assumes bandwidth-optimal algorithms. On n ranks and x bytes per rank: all-gather (n - 1) x,
reduce-scatter and all-to-all (n - 1) / n x, all-reduce 2 (n - 1) / n x, send and broadcast x.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from titan_dit.dry_run.memory import OperatorMode
from titan_dit.kernels.attention_kernels import accumulator
from titan_dit.parallel.mesh import FILL, Mesh, axes

Message = tuple[str, float]
"""(operation, bytes that a rank sends)."""
Reader = Callable[[Sequence[Any], int], Message]
"""(operator arguments, group size) -> message."""


@dataclass
class Traffic:
    """Calls, and bytes that one rank sends, by (mesh axis, operation)."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)

    def extrapolate(self, count: int, own: int, other: Traffic, others: int) -> Traffic:
        """Extrapolate to `count` microbatches: self has the traffic of `own`, `other` of `others`.

        Linear: each microbatch sends the same, and the rest of a step is constant.
        """
        if own == others:
            return self

        def line(mine: Counter[tuple[str, str]], its: Counter[tuple[str, str]]) -> Any:
            return Counter(
                {
                    key: round(mine[key] + (count - own) * (mine[key] - its[key]) / (own - others))
                    for key in mine | its
                }
            )

        return Traffic(line(self.calls, other.calls), line(self.bytes, other.bytes))


def bytes_of(*values: Any) -> int:
    """Bytes of all tensors in nested values."""
    return sum(x.numel() * x.element_size() for x in tree_leaves(values) if isinstance(x, Tensor))


def ring_forward(args: Sequence[Any], size: int) -> Message:
    """Keys and values to the next rank, size - 1 times; see `parallel.ring_attention`."""
    return "ring", (size - 1) * bytes_of(args[1], args[2])


def ring_backward(args: Sequence[Any], size: int) -> Message:
    """Keys, values and their fp32 gradients to the next rank, size - 1 times."""
    k, v = args[2], args[3]
    gradients = (k.numel() + v.numel()) * accumulator(k.dtype).itemsize
    return "ring", (size - 1) * (bytes_of(k, v) + gradients)


def operation(
    name: str, given: Callable[[Sequence[Any]], Any], share: Callable[[int], float]
) -> Reader:
    """Make a reader: sends the bytes of `given(args)` times `share(group size)`, as `name`."""

    def read(args: Sequence[Any], size: int) -> Message:
        return name, bytes_of(given(args)) * share(size)

    return read


def first(args: Sequence[Any]) -> Any:
    """The input of most operators."""
    return args[0]


def second(args: Sequence[Any]) -> Any:
    """The input of operators that take their output first."""
    return args[1]


def to_others(size: int) -> float:
    """Share sent when a rank keeps its own part."""
    return (size - 1) / size


def to_all(size: int) -> float:
    """Share sent when every other rank gets the rank's whole tensor."""
    return size - 1


def twice(size: int) -> float:
    """Share sent by an all-reduce: a reduce-scatter, then an all-gather."""
    return 2 * (size - 1) / size


def once(size: int) -> float:
    """Share of a single copy."""
    return 1


READERS: Mapping[str, Reader] = {
    "c10d::_allgather_base_": operation("all-gather", second, to_all),
    "c10d::allgather_": operation("all-gather", second, to_all),
    "c10d::_reduce_scatter_base_": operation("reduce-scatter", second, to_others),
    "c10d::reduce_scatter_": operation("reduce-scatter", second, to_others),
    "c10d::allreduce_": operation("all-reduce", first, twice),
    "c10d::alltoall_base_": operation("all-to-all", second, to_others),
    "c10d::broadcast_": operation("broadcast", first, once),
    "c10d::send": operation("send", first, once),
    "_c10d_functional::all_gather_into_tensor": operation("all-gather", first, to_all),
    "_c10d_functional::reduce_scatter_tensor": operation("reduce-scatter", first, to_others),
    "_c10d_functional::all_reduce": operation("all-reduce", first, twice),
    "_c10d_functional::all_reduce_": operation("all-reduce", first, twice),
    "_c10d_functional::all_to_all_single": operation("all-to-all", first, to_others),
    "_c10d_functional::broadcast": operation("broadcast", first, once),
    # Custom operators: the sends inside are not dispatched one by one.
    "titan_dit::ring_forward": ring_forward,
    "titan_dit::ring_backward": ring_backward,
}
SENDING = ("c10d::", "_c10d_functional::", "titan_dit::ring_")
"""Prefixes of operators that may send."""
SILENT = ("c10d::recv_", "c10d::barrier", "_c10d_functional::wait_tensor")
"""Operators that send nothing, or no payload."""


class TrafficLog(OperatorMode):  # type: ignore[no-untyped-call]
    """Within the context, counts collectives and sends; the result is `traffic`."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.axes = axes_of(mesh)
        self.traffic = Traffic()

    def restart(self) -> Traffic:
        """Reset the counters and return the traffic so far."""
        counted, self.traffic = self.traffic, Traffic()
        return counted

    def ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Count an operator if it sends."""
        name = func._schema.name
        if name in SILENT or not name.startswith(SENDING):
            return
        assert name in READERS, f"{name} is not counted: add it to READERS"
        axis, size = self.axes[group_name(args)]
        if size == 1:
            return
        operation_name, sent = READERS[name](args, size)
        self.traffic.calls[axis, operation_name] += 1
        self.traffic.bytes[axis, operation_name] += round(sent)


def group_name(args: Sequence[Any]) -> str:
    """Name of the process group in an operator's arguments (an object or a name)."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return str(dist.ProcessGroup.unbox(arg).group_name)
            except RuntimeError:  # Another object, such as a reduce op.
                continue
    # The group name is the last string; reduce op or kernel name may come before it.
    return str([arg for arg in args if isinstance(arg, str)][-1])


def axes_of(mesh: Mesh) -> dict[str, tuple[str, int]]:
    """(axis, size) of every process group of a mesh, by group name."""
    parts = {"data": mesh.data, "loss": mesh.loss, "shard": mesh.shard, "copies": mesh.copies}
    parts |= {axis: mesh.whole[axis] for axis in mesh.whole.mesh_dim_names or ()}
    sizes = asdict(mesh.sizes)
    sharding = [name for name in axes("fsdp") if name == FILL or sizes[name] > 1]
    copies = [name for name in axes("copies") if sizes[name] > 1]
    titles = {"shard": " x ".join(sharding), "copies": " x ".join(copies)}
    found = {
        str(part.get_group().group_name): (titles.get(name, name), part.size())
        for name, part in parts.items()
    }
    found |= {str(group.group_name): ("pp", 2) for group in mesh.p2p.groups.values()}
    # The gradient norm is all-reduced over all ranks.
    world = dist.group.WORLD
    assert world is not None
    return {str(world.group_name): ("all", world.size())} | found
