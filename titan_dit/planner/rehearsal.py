"""One microbatch of embed, a block of each kind and the head of the real model, on fake tensors.

Operators are recorded with their FLOPs, messages, reads and writes; neighbours are fused as a
compiler would.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef

from titan_dit.build import executor_of, own_parameters, place_modules
from titan_dit.config.training import EMAConfig, TrainingConfig
from titan_dit.data.base import Field
from titan_dit.dry_run import fake_step
from titan_dit.dry_run.fake_step import CPU, HostReads, chunks_of_a_device, fake_world
from titan_dit.dry_run.memory import MemoryLog, StorageKind, local
from titan_dit.dry_run.traffic import READERS, SILENT, TrafficLog, group_name
from titan_dit.execution import SlicedExecutor, scaled
from titan_dit.models.base import Model, ModelSpec, exact_modules
from titan_dit.objectives.base import Objective, Prepared
from titan_dit.optim.ema import EMA
from titan_dit.optim.gradient_norm import clip_norm
from titan_dit.optim.optimizer import apply_gradients, build_optimizer
from titan_dit.optim.sections import OptimizerConfig
from titan_dit.parallel import fsdp
from titan_dit.parallel.apply import parallelize
from titan_dit.parallel.init import allocate
from titan_dit.parallel.mesh import AxisSizes, Mesh
from titan_dit.plan import RunPlan
from titan_dit.planner.work import AttentionCall, Message, Product

FORMATS = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "float8",
    torch.float8_e5m2: "float8",
    torch.float8_e4m3fnuz: "float8",
    torch.float8_e5m2fnuz: "float8",
}
"""Names of number formats, as in `hardware.Device.peak_tflops`."""
MATRICES = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2), "scaled_mm": (0, 1)}
"""Operators that are matrix products -> positions of the two matrices in their arguments."""
LINEAR = ("linear", "linear_pointwise")
"""Operators that multiply an input [..., k] by a weight [n, k]."""
GATHERS = ("gather", "index", "index_select", "embedding")
"""Operators that read as many bytes of their first argument as they return."""
SCATTERS = ("scatter_add_", "index_put_", "index_add_", "scatter_")
"""Operators that change as many bytes of their first argument as their last tensor has."""
OVERWRITES = ("copy_", "fill_", "zero_", "foreach_copy_")
"""In-place operators that do not read the tensor that they change."""


class Access(NamedTuple):
    """A part of a storage that an operator reads or writes."""

    storage: int
    """Number of the storage, in order of allocation from 0."""
    offset: float
    """Bytes from its beginning."""
    bytes: float


class Operator(NamedTuple):
    """One call of an operator. Views and allocations are not recorded."""

    name: str
    """Name without namespace, overload and leading underscores."""
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    work: Product | AttentionCall | Message | None
    """None if the operator only moves bytes."""
    last_dim: bool = True
    """False for a reduction over any dim but the last."""


Key: TypeAlias = tuple[str, str]
"""(part, pass) of an operator."""


class OperatorLog(TrafficLog):  # type: ignore[no-untyped-call]
    """Within the context, records operators by part and pass; see `during`."""

    def __init__(self, mesh: Mesh, memory: MemoryLog) -> None:
        super().__init__(mesh)
        self.memory = memory
        self.key: Key | None = None
        """Part and pass of the operators that follow; None: not recorded."""
        self.found: dict[Key, list[Operator]] = {}
        self.numbers: dict[StorageWeakRef, int] = {}

    def during(self, part: str, which: str) -> None:
        """Record the operators that follow as pass `which` of a part."""
        self.key = part, which
        self.found.setdefault(self.key, [])

    def ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Record an operator."""
        if self.key is not None and not self.memory.is_inferring:
            operator = self.read(func.name().partition(".")[0], args, kwargs, result)
            if operator is not None:
                self.found[self.key].append(operator)

    def number(self, tensor: Tensor) -> int:
        """The number of a tensor's storage."""
        return self.numbers.setdefault(storage_of(tensor), len(self.numbers))

    def access(self, tensor: Tensor, most: float = math.inf) -> Access:
        """The bytes of its storage that a tensor covers; at most `most`."""
        size = tensor.element_size()
        offset = int(tensor.storage_offset()) * size
        return Access(self.number(tensor), offset, min(most, size * elements(tensor)))

    def read(
        self, full: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> Operator | None:
        """The record of a call, by the operator's full name; None if it only makes views."""
        if full in SILENT:
            self.same_storage(args, result)
            return None
        name = full.rpartition("::")[2].lstrip("_")
        given = {self.number(tensor) for tensor in tensors((args, kwargs))}
        changed = changed_by(name, args, kwargs)
        made = [t for t in tensors(result) if self.number(t) not in given]
        if "empty" in name or not (changed or made):
            return None
        overwritten = name in OVERWRITES or "out" in kwargs
        skipped = {id(tensor) for tensor in changed} if overwritten else set()
        read = [t for t in tensors((args, kwargs)) if id(t) not in skipped]
        written, most = made + changed, math.inf
        limited: Tensor | None = None
        if name in GATHERS:
            limited, most = args[0], elements(made[0]) * made[0].element_size()
        elif name in SCATTERS:
            limited, source = args[0], [*tensors(args)][-1]
            most = elements(source) * args[0].element_size()

        def accesses(found: Sequence[Tensor]) -> tuple[Access, ...]:
            each = (self.access(t, most if t is limited else math.inf) for t in found)
            return tuple(dict.fromkeys(each))

        work = self.work_of(full, name, args)
        return Operator(name, accesses(read), accesses(written), work, is_by_row(name, args))

    def same_storage(self, args: Sequence[Any], result: Any) -> None:
        """Give a collective's result its input's storage number: waiting makes no new storage."""
        for old, new in zip(tensors(args), tensors(result), strict=False):
            self.numbers.setdefault(storage_of(new), self.number(old))

    def work_of(
        self, full: str, name: str, args: Sequence[Any]
    ) -> Product | AttentionCall | Message | None:
        """The product, attention or message of an operator; None if it is none of them."""
        if full in READERS or "c10d" in full:
            return self.ring(full, args) if "ring_" in name else self.message(full, args)
        if name in MATRICES:
            first, second = (args[place] for place in MATRICES[name])
            batch = first.shape[0] if first.ndim == 3 else 1
            rows, inner = first.shape[-2:]
            return Product(batch, rows, second.shape[-1], inner, FORMATS[first.dtype])
        if name in LINEAR:
            outputs, inner = args[1].shape
            rows = math.prod(args[0].shape[:-1])
            return Product(1, rows, outputs, inner, FORMATS[args[0].dtype])
        if "scaled_dot_product" in name:
            return attention(args, is_backward="backward" in name)
        return None

    def message(self, name: str, args: Sequence[Any]) -> Message | None:
        """The message of a collective."""
        assert name in READERS, f"{name} is not counted: add it to dry_run.traffic.READERS"
        axis, size = self.axes[group_name(args)]
        operation, sent = READERS[name](args, size)
        return Message(axis, operation, sent if size > 1 else 0)

    def ring(self, name: str, args: Sequence[Any]) -> AttentionCall:
        """The attention of a ring operator: a block of keys from every rank of the ring."""
        is_backward = name.endswith("backward")
        q, k = args[1:3] if is_backward else args[:2]
        size = self.axes[group_name(args)][1]
        sent = READERS[name](args, size)[1]
        batch, heads, queries, head_dim = q.shape
        return AttentionCall(
            batch=batch,
            heads=heads,
            queries=queries,
            keys=size * k.shape[2],
            head_dim=head_dim,
            dtype=FORMATS[q.dtype],
            is_causal=args[-1],
            is_backward=is_backward,
            ring=size,
            hop_bytes=sent / max(1, size - 1),
        )


def attention(args: Sequence[Any], *, is_backward: bool) -> AttentionCall:
    """Torch's fused kernel; its arguments begin with q, k, v, in backward with a gradient."""
    q, k = args[1:3] if is_backward else args[:2]
    batch, heads, queries, head_dim = q.shape
    # Fake tensors are on the CPU, whose kernel has one flag.
    is_causal = any(value is True for value in args)
    dtype = FORMATS[q.dtype]
    return AttentionCall(batch, heads, queries, k.shape[2], head_dim, dtype, is_causal, is_backward)


def storage_of(tensor: Tensor) -> StorageWeakRef:
    """A weak reference to a tensor's storage: it frees the memory, but equals no later storage."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def tensors(*values: Any) -> Iterator[Tensor]:
    """Tensors in nested sequences and mappings."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(*value)
        elif isinstance(value, Mapping):
            yield from tensors(*value.values())


def elements(tensor: Tensor) -> int:
    """Distinct elements in memory: an expanded dim counts once."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in steps if stride)


def changed_by(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Tensors that an operator changes in place."""
    if "out" in kwargs:
        return [*tensors(kwargs["out"])]
    if name == "fused_adamw_":  # Weights and moments; gradients only with a loss scale.
        return [*tensors(args[0], *args[2:5])]
    return [*tensors(args[0])] if name.endswith("_") and args else []


def is_by_row(name: str, args: Sequence[Any]) -> bool:
    """False for a reduction, such as a sum, over any dim but the last."""
    if name not in ("sum", "mean", "amax", "amin") or len(args) < 2:
        return True
    dims = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
    return all(dim in (-1, args[0].ndim - 1) for dim in dims)


NEVER_FUSED = ("fused_", "sort", "embedding_dense_backward", "foreach_norm")
"""Prefixes of operators that are never fused with others."""


def moved(operator: Operator) -> float:
    """Bytes that an operator without FLOPs reads and writes; in-place changes count twice."""
    if operator.work is not None:
        return 0.0
    return sum(access.bytes for access in (*operator.reads, *operator.writes))


def can_fuse(operator: Operator) -> bool:
    """True for elementwise operators, reductions and copies."""
    return operator.work is None and not operator.name.startswith(NEVER_FUSED)


@dataclass
class FusedKernel:
    """Fused operators of one pass, in their order."""

    operators: list[Operator]
    reads: dict[Access, None] = field(default_factory=dict)
    made: set[int] = field(default_factory=set)
    """Storages that the kernel writes."""
    dropped: set[int] = field(default_factory=set)
    """Storages of `made` that backward recomputes."""

    def __post_init__(self) -> None:
        """Find the kernel's outside reads."""
        for operator in self.operators:
            for access in operator.reads:
                if access.storage not in self.made:
                    self.reads[access] = None
            self.made |= {access.storage for access in operator.writes}

    def sources(self, storage: int) -> dict[Access, None]:
        """The outside reads from which the kernel computes one of its storages."""
        wanted, found = {storage}, dict[Access, None]()
        for operator in reversed(self.operators):
            if any(access.storage in wanted for access in operator.writes):
                for access in operator.reads:
                    if access.storage in self.made:
                        wanted.add(access.storage)
                    else:
                        found[access] = None
        return found

    def bytes(self, needed: set[int]) -> float:
        """Bytes that the kernel reads and writes if others read the storages `needed`."""
        written = {
            access
            for operator in self.operators
            for access in operator.writes
            if access.storage in needed and access.storage not in self.dropped
        }
        return sum(access.bytes for access in (*written, *self.reads))


def fused(
    passes: Mapping[str, Sequence[Operator]], later: set[int]
) -> dict[str, tuple[float, int]]:
    """(bytes, kernels) of each pass of a part: "forward" and "backward", or another one.

    `later`: storages that are read outside these passes. A storage that nothing reads is a result,
    and is written.
    """
    kernels = {name: [*kernels_of(operators)] for name, operators in passes.items()}
    others = [o for operators in passes.values() for o in operators if not can_fuse(o)]
    barred = later | {access.storage for operator in others for access in operator.reads}
    if {"forward", "backward"} <= kernels.keys():
        compute_again(kernels["forward"], kernels["backward"], barred)
    every = [kernel for some in kernels.values() for kernel in some]
    readers: dict[int, int] = {}
    for kernel in every:
        for storage in {access.storage for access in kernel.reads}:
            readers[storage] = readers.get(storage, 0) + 1
    inner = {a.storage for k in every for o in k.operators for a in o.reads if a.storage in k.made}
    results = {s for k in every for s in k.made if s not in inner}
    # What was there before and is changed in place.
    results |= {a.storage for k in every for a in k.reads if a.storage in k.made}
    needed = barred | readers.keys() | results
    return {
        name: (
            sum(kernel.bytes(needed) for kernel in kernels[name])
            + sum(moved(operator) for operator in operators if not can_fuse(operator)),
            len(kernels[name]) + sum(not can_fuse(operator) for operator in operators),
        )
        for name, operators in passes.items()
    }


def compute_again(
    forward: Sequence[FusedKernel], backward: Sequence[FusedKernel], barred: set[int]
) -> None:
    """Let backward recompute an output of forward if reading its inputs moves fewer bytes."""
    for kernel in forward:
        read = {a.storage for other in forward if other is not kernel for a in other.reads}
        for access in dict.fromkeys(access for o in kernel.operators for access in o.writes):
            storage = access.storage
            users = [u for u in backward if any(a.storage == storage for a in u.reads)]
            if not users or storage in barred or storage in read or storage in kernel.dropped:
                continue
            sources = kernel.sources(storage)
            more = sum(a.bytes for user in users for a in sources if a not in user.reads)
            if more < access.bytes * (1 + len(users)):
                kernel.dropped.add(storage)
                for user in users:
                    kept = {a: None for a in user.reads if a.storage != storage}
                    user.reads = kept | sources


class FusionGraph:
    """A dependency graph of operators; sets of nodes are bits of integers."""

    def __init__(self, operators: Sequence[Operator]) -> None:
        # A reduction over other dims than the last ends its kernel: its result has a node.
        count = len(operators)
        self.above = [0] * (2 * count)
        """By node: the nodes that must run before it."""
        self.below = [0] * (2 * count)
        self.members = [1 << number for number in range(2 * count)]
        """By first node of a kernel: the nodes of the kernel."""
        self.joined = [*range(2 * count)]
        """By node: another node of its kernel; following these leads to the first."""
        self.firsts = (1 << 2 * count) - 1
        """First nodes of kernels. Other nodes' entries of `above` and `below` are stale."""
        writer: dict[int, int] = {}
        readers: dict[int, list[int]] = {}
        for number, operator in enumerate(operators):
            for access in operator.reads:
                if access.storage in writer:
                    self.order(writer[access.storage], number)
                readers.setdefault(access.storage, []).append(number)
            for access in operator.writes:
                for reader in readers.pop(access.storage, ()):
                    if reader != number:
                        self.order(reader, number)
            result = number
            if not operator.last_dim:
                result = count + number
                self.order(number, result)
            writer |= {access.storage: result for access in operator.writes}

    def order(self, first: int, second: int) -> None:
        """Let one node run before another. `second` must have no successors yet."""
        self.above[second] |= self.above[first] | 1 << first

    def close(self) -> None:
        """Fill `below` from `above`."""
        for number, above in enumerate(self.above):
            for before in bits(above):
                self.below[before] |= 1 << number

    def first(self, node: int) -> int:
        """The first node of a node's kernel."""
        while self.joined[node] != node:
            node = self.joined[node]
        return node

    def join(self, one: int, two: int) -> bool:
        """Fuse two nodes' kernels; False if a third node has to run between them."""
        first, second = sorted((self.first(one), self.first(two)))
        if first == second:
            return True
        both = self.members[first] | self.members[second]
        if ((self.below[first] & self.above[second]) | (self.below[second] & self.above[first])) & (
            ~both
        ):
            return False
        above = (self.above[first] | self.above[second]) & ~both
        below = (self.below[first] | self.below[second]) & ~both
        self.members[first], self.above[first], self.below[first] = both, above, below
        self.joined[second], self.firsts = first, self.firsts & ~(1 << second)
        for node in bits(above & self.firsts):
            self.below[node] |= below | both
        for node in bits(below & self.firsts):
            self.above[node] |= above | both
        return True


def kernels_of(operators: Sequence[Operator]) -> Iterator[FusedKernel]:
    """Kernels of the operators that can be fused, in the order of their last operators."""
    graph = FusionGraph(operators)
    graph.close()
    makers: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for number, operator in enumerate(operators):
        if not can_fuse(operator):
            continue
        for access in operator.reads:
            near = [makers[access.storage]] if access.storage in makers else []
            for other in near + readers.get(access.storage, [])[-1:]:
                graph.join(other, number)
            readers.setdefault(access.storage, []).append(number)
        makers |= {access.storage: number for access in operator.writes}
    done = 0
    for number, operator in enumerate(operators):
        if can_fuse(operator) and not done >> number & 1:
            kernel = graph.members[graph.first(number)]
            done |= kernel
            yield FusedKernel([operators[node] for node in bits(kernel)])


def bits(mask: int) -> Iterator[int]:
    """Numbers of the bits that are set, the lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def first_layers(spec: ModelSpec) -> dict[str, int]:
    """Kind -> the first layer of it, which is rehearsed for all of them; in the model's order."""
    return {kind: spec.kinds.index(kind) for kind in dict.fromkeys(spec.kinds)}


def blocks_by_kind(spec: ModelSpec) -> dict[str, str]:
    """Kind -> the name of the first block of it."""
    return {kind: f"blocks.{layer}" for kind, layer in first_layers(spec).items()}


class Change(NamedTuple):
    """A change of allocated memory: an allocation (bytes above 0), a resize or a free."""

    bytes: float
    is_gradient: bool
    """True for the gradient of a parameter."""


@dataclass(frozen=True)
class RecordedPass:
    """Forward or backward of a part, or the preparation of its inputs."""

    operators: Sequence[Operator]
    changes: Sequence[Change]


@dataclass(frozen=True)
class Trace:
    """The passes of a part, for one microbatch."""

    forward: RecordedPass
    backward: RecordedPass
    later: frozenset[int]
    """Storages that other parts read."""
    reduced: Sequence[Operator]
    """Sums of gradients over tp, which a step does once."""
    carried: float
    """Bytes of activations at the beginning of the part's backward, without what it and earlier
    parts keep. These are the gradients of its outputs, less the outputs that only the next part
    kept."""
    storages: tuple[float, ...]
    """Bytes of the storages that forward makes and keeps."""


class PassLog:
    """Positions in the logs at which the passes of a microbatch begin and end."""

    def __init__(self, memory: MemoryLog, log: OperatorLog, parts: tuple[str, ...]) -> None:
        self.memory, self.log, self.parts = memory, log, parts
        self.spans: dict[Key, tuple[int, int]] = {}

    @contextmanager
    def of(self, part: str, which: str) -> Iterator[None]:
        """Record the block as pass `which` of a part."""
        self.log.during(part, which)
        start = len(self.memory.events)
        yield
        self.log.key = None
        self.spans[part, which] = start, len(self.memory.events)

    def between(self, start: int, end: int) -> list[Change]:
        """Changes of memory between two events. Call it at the end, when all kinds are known."""
        return [
            Change(change, record.kind == StorageKind.UNREDUCED)
            for record, change in self.memory.events[start:end]
        ]

    def changes(self, part: str, which: str) -> list[Change]:
        """Changes of memory in a pass."""
        return self.between(*self.spans[part, which])

    def passed(self, part: str, which: str) -> RecordedPass:
        """The record of a pass."""
        return RecordedPass(tuple(self.log.found[part, which]), tuple(self.changes(part, which)))

    def later(self, part: str) -> frozenset[int]:
        """Storages that other parts read."""
        own = self.log.found.items()
        found = (o for key, operators in own if key[0] != part for o in operators)
        return frozenset(access.storage for o in found for access in o.reads)

    def trace(self, part: str) -> Trace:
        """The record of a part."""
        before = self.parts[: self.parts.index(part) + 1]
        start = self.spans[self.parts[0], "forward"][0]
        live = self.between(start, self.spans[part, "backward"][0])
        kept = sum(c.bytes for each in before for c in self.changes(each, "forward"))
        return Trace(
            forward=self.passed(part, "forward"),
            backward=self.passed(part, "backward"),
            later=self.later(part),
            reduced=tuple(self.log.found[part, "reduce"]),
            carried=sum(c.bytes for c in live if not c.is_gradient) - kept,
            storages=self.storages(part),
        )

    def storages(self, part: str) -> tuple[float, ...]:
        """Bytes of the storages that the forward of a part makes and keeps, in their order."""
        start, end = self.spans[part, "forward"]
        sizes: dict[int, float] = {}
        for record, change in self.memory.events[start:end]:
            sizes[id(record)] = sizes.get(id(record), 0.0) + change
        return tuple(size for size in sizes.values() if size > 0)


class _Border(torch.autograd.Function):
    """Identity between two parts, at which backward ends."""

    @staticmethod
    def forward(ctx: Any, learns: Tensor, arrived: dict[int, Tensor], *stream: Tensor) -> Any:
        """`learns`: any tensor with gradients. `arrived` takes the gradients of the stream."""
        ctx.arrived = arrived
        # Zeros for what a part does not use would be plain tensors, of DTensors, too.
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in stream)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Store the gradients in `arrived`."""
        ctx.arrived.update((n, g) for n, g in enumerate(gradients) if g is not None)
        return (None, None, *(None for _ in gradients))


class Chain:
    """Embed, blocks and head of one microbatch, each with an autograd graph of its own."""

    def __init__(self, model: Model, executor: Any, prepared: Prepared, marks: PassLog) -> None:
        self.model, self.executor, self.prepared, self.marks = model, executor, prepared, marks
        self.edges: dict[str, list[GradientEdge | None]] = {}
        """By part: gradient edges of its outputs."""
        self.arrived: dict[str, dict[int, Tensor]] = {part: {} for part in marks.parts}
        """By part: gradients of its inputs."""
        self.stream = 0.0
        self.loss: tuple[Tensor, Tensor] | None = None

    def forward(self) -> None:
        """Run the forward of all parts."""
        prepared, side = self.prepared, self.prepared.side_inputs
        with self.marks.of("embed", "forward"):
            stream = self.model.embed(prepared.inputs, side)  # type: ignore[misc]
            self.cut("embed", stream)
        for key, block in self.model.blocks.items():
            name = f"blocks.{key}"
            stream = self.entered(name, stream)
            with self.marks.of(name, "forward"):
                stream = block(stream, side)
                self.cut(name, stream)
        self.stream = sum(local(tensor).nbytes for tensor in stream)
        stream = self.entered("head", stream)
        with self.marks.of("head", "forward"):
            output = self.model.head(stream, side)  # type: ignore[misc]
            del stream
            run = self.executor
            self.loss = scaled(run.score(run.loss, output, prepared), None)
            del output

    def cut(self, part: str, stream: Sequence[Tensor]) -> None:
        """Store the gradient edges of a part's outputs: its backward starts there."""
        self.edges[part] = [get_gradient_edge(t) if t.requires_grad else None for t in stream]

    def entered(self, part: str, stream: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The stream at the beginning of a part, detached from the part before."""
        learns = torch.empty(0, requires_grad=True)
        detached = (tensor.detach() for tensor in stream)
        found: tuple[Tensor, ...] = _Border.apply(learns, self.arrived[part], *detached)  # type: ignore[no-untyped-call]
        return found

    def backward(self) -> None:
        """Run the backward of all parts, the last first."""
        assert self.loss is not None
        with self.marks.of("head", "backward"):
            loss, factor = self.loss
            self.loss = None
            torch.autograd.backward(loss, factor)
            del loss
        for after, part in pairwise(self.marks.parts[::-1]):
            with self.marks.of(part, "backward"):
                edges, gradients = self.edges.pop(part), self.arrived.pop(after)
                used = [
                    (edge, gradients[number])
                    for number, edge in enumerate(edges)
                    if edge is not None and number in gradients
                ]
                del gradients, edges
                if used:
                    torch.autograd.backward(*zip(*used, strict=True))  # type: ignore[arg-type]
                del used


InputsKey: TypeAlias = tuple[int, int, str]
"""(samples, cp, cp method)"""


@dataclass(frozen=True, kw_only=True)
class Sections:
    """The parts of a config that do not depend on the layout."""

    objective: Callable[[], Objective]
    """Builds a new objective: a rehearsal places and casts its modules."""
    fields: Mapping[str, Field]
    training: TrainingConfig
    optimizer: OptimizerConfig
    ema: EMAConfig


@dataclass
class Preparation:
    """The preparation of a batch by the objective."""

    made: RecordedPass
    read: frozenset[int] = frozenset()
    """Storages of the preparation that the model's parts read."""
    cached: float = 0.0
    """Bytes that the objective prepares once for all steps."""


class Inputs:
    """The fake tensors of a config's batches; all rehearsals share them and their mode."""

    def __init__(self, sections: Sections) -> None:
        self.sections, self.objective = sections, sections.objective()
        self.mode = fake_tensors()
        self.batches: dict[InputsKey, tuple[Prepared, Preparation]] = {}
        self.cached: float | None = None
        """Bytes; None before the first batch."""

    def of(
        self, plan: RunPlan, size: int, executor: Any, memory: MemoryLog, marks: PassLog
    ) -> tuple[Prepared, Preparation]:
        """This rank's slice of a batch of `size` samples. Call it within `mode` and the logs.

        A new batch is recorded as the pass ("inputs", "prepare") of `marks`.
        """
        cp = plan.sizes.cp
        key = size, cp, plan.parallel.cp_method if cp > 1 else ""
        if key not in self.batches:
            self.batches[key] = self.made(plan, size, executor, memory, marks)
        prepared, how = self.batches[key]
        # These logs have not seen what was made before.
        memory.mark(tensors_of(prepared), StorageKind.INPUTS)
        return prepared, how

    def made(
        self, plan: RunPlan, size: int, executor: Any, memory: MemoryLog, marks: PassLog
    ) -> tuple[Prepared, Preparation]:
        """A new batch; the second time, as the objective keeps some tensors of the first."""
        start = len(memory.events)
        first = self.prepare(plan, size, executor)
        whole = sum(change for _, change in memory.events[start:])
        del first
        with marks.of("inputs", "prepare"):
            prepared = self.prepare(plan, size, executor)
        how = Preparation(marks.passed("inputs", "prepare"))
        if self.cached is None:
            self.cached = whole - sum(change.bytes for change in how.made.changes)
        how.cached = self.cached
        return prepared, how

    def prepare(self, plan: RunPlan, size: int, executor: Any) -> Prepared:
        """This rank's slice of a batch whose fields are zero."""
        prepared = fake_step.prepare_zeros(plan, self.objective, self.sections.fields, size)
        if isinstance(executor, SlicedExecutor):
            prepared = executor.sliced(prepared)
        if prepared.total_tokens is None:
            prepared = replace(prepared, total_tokens=prepared.weight.sum(dtype=torch.float64))
        return prepared


def tensors_of(prepared: Prepared) -> Iterator[Tensor]:
    """All tensors of a batch."""
    return tensors(*vars(prepared).values())


def fake_tensors() -> Any:
    """The mode in which tensors have no memory; torch's class of it is private to the dry run."""
    return fake_step.FakeTensorMode(allow_non_fake_inputs=True)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Rehearsal:
    """The operators and memory of a microbatch of one size."""

    parts: Mapping[str, Trace]
    prepare: Preparation
    stream: float
    """Bytes of a block's output."""


@dataclass(frozen=True)
class State:
    """Parameters, buffers and update of a part; equal for any microbatch size."""

    parameters: float
    trained: float
    buffers: float
    """Bytes."""
    quantized: float
    """Bytes of quantised weights, which are not among the parameters."""
    tensors: int
    tied: float
    """Elements of its parameters that another part has, too."""
    update: Sequence[Operator]
    average: Sequence[Operator]
    """Operators of one EMA update."""


def two_replicas(plan: RunPlan) -> RunPlan:
    """The plan of one pipeline stage and two replicas, one of them rehearsed.

    With a single replica the norm of the gradients would be sent over the tp or cp group.
    """
    sizes = AxisSizes(tp=plan.sizes.tp, cp=plan.sizes.cp, dp_replicate=2)
    parallel = replace(plan.parallel, dp_replicate=2, dp_shard=1, pp=1)
    # As in the dry run: see `take_fake_step`.
    precision = plan.precision
    if precision.attention != "math":
        precision = replace(precision, attention="auto")
    return replace(
        plan,
        sizes=sizes,
        world_size=2 * sizes.model,
        parallel=parallel,
        precision=precision,
        compile=replace(plan.compile, enabled=False),
        initial_weights="generator",
        global_batch_size=2 * plan.microbatch_size,
        wanted_microbatch_size=plan.microbatch_size,
    )


@contextmanager
def without_fsdp() -> Iterator[None]:
    """Let `parallelize` and `place_modules` leave out FSDP."""
    module: Any = fsdp
    own = module.shard, module.shard_module
    module.shard = module.shard_module = lambda *_, **__: None
    try:
        yield
    finally:
        module.shard, module.shard_module = own


class FakeParts:
    """Embed, the first block of each kind and the head of a plan's model, on this rank."""

    def __init__(self, plan: RunPlan, inputs: Inputs, mesh: Mesh) -> None:
        """`plan`: see `two_replicas`; within a fake world."""
        self.plan, self.inputs, self.mesh = plan, inputs, mesh
        self.sections, self.mode = inputs.sections, inputs.mode
        with torch.device("meta"):
            self.model: Model = plan.spec.build()
        self.model.cut(first_layers(plan.spec).values(), is_first=True, is_last=True)
        self.parts = ("embed", *blocks_by_kind(plan.spec).values(), "head")
        model = self.model
        with without_fsdp():
            tokens = plan.microbatch_size * plan.attended_per_rank
            parallelize(
                model,
                mesh,
                plan.tensor_plan,
                plan.parallel,
                plan.precision,
                plan.activation_checkpoint,
                plan.compile,
                tokens=tokens,
                adapters=plan.lora,
                streams=plan.spec.stream,
                device=plan.device,
            )
        self.objective = self.sections.objective()
        self.memory = MemoryLog()
        self.log = OperatorLog(mesh, self.memory)
        with self.mode:
            allocate(model, CPU)
            self.parameters = own_parameters({0: model})
            with without_fsdp():
                self.parameters |= place_modules(plan, self.objective, mesh, CPU)
            # Freezes what [optimizer] groups say.
            build_optimizer(self.parameters, self.sections.optimizer, plan.spec)

    def named(self, part: str) -> dict[str, nn.Parameter]:
        """The parameters of a part. The objective's parameters belong to the head."""
        first = (f"{part}.", "objective.") if part == "head" else f"{part}."
        return {n: p for n, p in self.parameters.items() if n.startswith(first)}

    def states(self) -> dict[str, State]:
        """Update every part once. Weights must be fp32 still."""
        with self.mode, self.memory, self.log:
            return {part: self.state(part) for part in self.parts}

    def state(self, part: str) -> State:
        """Update one part once."""
        named = self.named(part)
        trained = {name: p for name, p in named.items() if p.requires_grad}
        if trained:
            self.update(part, trained, self.sections.optimizer.build(trained, self.plan.spec))
        module = self.model.get_submodule(part)
        table = {name for name in self.model.tied.values() if name.startswith(f"{part}.")}
        log = self.log.found
        return State(
            parameters=count(p for p in named.values() if p.is_floating_point()),
            trained=count(trained.values()),
            buffers=sum(buffer.nbytes for buffer in module.buffers()),
            quantized=count(p for p in named.values() if not p.is_floating_point()),
            tensors=len(named),
            tied=count(named[name] for name in table),
            update=log.pop((part, "update"), ()),
            average=log.pop((part, "average"), ()),
        )

    def update(self, part: str, named: Mapping[str, nn.Parameter], optimizer: Any) -> None:
        """Clip, step and average, as `FakeRank.step`."""
        sections = self.sections
        averages = EMA(named, sections.ema)
        for parameter in named.values():
            parameter.grad = torch.empty_like(parameter)
        self.log.during(part, "update")
        bad = ~clip_norm(named.values(), sections.training.max_grad_norm).isfinite()
        with HostReads():  # type: ignore[no-untyped-call]
            apply_gradients(optimizer, sections.optimizer.lr, skip=bad)
        self.log.during(part, "average")
        averages.update(averages.config.every, skip=bad)
        self.log.key = None

    def cast(self) -> None:
        """Let the model hold its parameters in the compute dtype, but for `Model.exact`."""
        exact = {part for module in exact_modules(self.model) for part in module.modules()}
        with self.mode:
            for module in (part for part in self.model.modules() if part not in exact):
                for name, parameter in module.named_parameters(recurse=False):
                    if not parameter.is_floating_point():
                        continue
                    narrow = parameter.detach().to(self.plan.dtype)
                    setattr(module, name, nn.Parameter(narrow, parameter.requires_grad))
        self.model.tie()
        self.parameters |= own_parameters({0: self.model})
        # Known before a pass uses them, they are no memory of the pass.
        self.memory.mark(self.parameters.values(), StorageKind.GATHERED)
        self.memory.mark(self.model.buffers(), StorageKind.PARAMETERS)

    def run(self, size: int) -> Rehearsal:
        """Rehearse one microbatch of `size` samples. Call `cast` before."""
        for parameter in self.parameters.values():
            parameter.grad = None
        self.log.found.clear()
        marks = PassLog(self.memory, self.log, self.parts)
        with self.mode, self.memory, self.log:
            parts = {0: self.model}
            executor: Any = executor_of(self.plan, self.objective, self.mesh, parts, CPU)
            with self.memory.phase("inputs", StorageKind.INPUTS):
                prepared, prepare = self.inputs.of(self.plan, size, executor, self.memory, marks)
            if isinstance(executor, SlicedExecutor):
                executor = executor.inner
            with self.memory.phase("parts", StorageKind.ACTIVATIONS):
                chain = Chain(self.model, executor, prepared, marks)
                chain.forward()
                chain.backward()
            for part in self.parts:
                self.log.during(part, "reduce")
                self.reduce(self.named(part).values())
            self.log.key = None
        prepare.read = prepare.read or marks.later("inputs")
        return Rehearsal({part: marks.trace(part) for part in self.parts}, prepare, chain.stream)

    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        """Reduce gradients over tp, as FSDP does before it reduces their fp32 sums."""
        wide = torch.promote_types(self.plan.dtype, torch.float32)
        for parameter in parameters:
            gradient: Any = parameter.grad
            if hasattr(gradient, "redistribute"):  # A DTensor.
                summed = gradient.to(wide)
                summed.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]


def count(parameters: Any) -> float:
    """Elements on this rank."""
    return float(sum(local(parameter).numel() for parameter in parameters))


def rehearse(
    plan: RunPlan, inputs: Inputs, sizes: Iterable[int], states: Mapping[str, State] | None = None
) -> tuple[Mapping[str, State], dict[int, Rehearsal]]:
    """(state by part, rehearsal by number of samples). Given `states` are not recomputed."""
    own, collects = two_replicas(plan), gc.isenabled()
    gc.disable()  # It would free tensors at moments that differ from size to size.
    try:
        with fake_world(0, own.world_size), chunks_of_a_device():
            parts = FakeParts(own, inputs, Mesh(own.sizes, "cpu"))
            states = states or parts.states()
            parts.cast()
            return states, {size: parts.run(size) for size in sizes}
    finally:
        if collects:
            gc.enable()
