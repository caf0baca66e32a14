"""The operators of a rehearsal: what each computes, sends, reads and writes, in their order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from titan_dit.dry_run.memory import MemoryLog, is_wrapper
from titan_dit.dry_run.traffic import READERS, SILENT, TrafficLog, group_name
from titan_dit.parallel.mesh import Mesh
from titan_dit.planner.work import Attention, Message, Product

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
"""Products, and where in their arguments the two matrices stand."""
LINEAR = ("linear", "linear_pointwise")
"""Products of an input [..., k] and a weight [n, k]."""
GATHERS = ("gather", "index", "index_select", "embedding")
"""They read as much of their first argument as they return."""
SCATTERS = ("scatter_add_", "index_put_", "index_add_", "scatter_")
"""They change as much of their first argument as their last tensor holds."""
OVERWRITES = ("copy_", "fill_", "zero_", "foreach_copy_")
"""In place, but they do not read what they change."""


class Access(NamedTuple):
    """A part of a storage that an operator reads or writes."""

    storage: int
    """Counted from 0, in order of allocation."""
    offset: float
    """Bytes from its beginning."""
    bytes: float


class Operator(NamedTuple):
    """One call. Views and allocations are none."""

    name: str
    """Without its namespace, overload and leading underscores."""
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    work: Product | Attention | Message | None
    """None: it only moves bytes."""
    last_dim: bool = True
    """False for a reduction over other dims than the last."""


Key: TypeAlias = tuple[str, str]
"""(part, pass): of an operator."""


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
        """Record what follows as the pass `which` of a part."""
        self.key = part, which
        self.found.setdefault(self.key, [])

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator and record it."""
        if is_wrapper(types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.key is not None and not self.memory.is_inferring:
            operator = self.read(func.name().partition(".")[0], args, kwargs, result)
            if operator is not None:
                self.found[self.key].append(operator)
        return result

    def number(self, tensor: Tensor) -> int:
        """The number of a tensor's storage."""
        return self.numbers.setdefault(storage_of(tensor), len(self.numbers))

    def access(self, tensor: Tensor, most: float = math.inf) -> Access:
        """What a tensor covers of its storage; `most`: bytes that are used of it."""
        size = tensor.element_size()
        offset = int(tensor.storage_offset()) * size
        return Access(self.number(tensor), offset, min(most, size * elements(tensor)))

    def read(
        self, full: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> Operator | None:
        """An operator, by its full name; None if it moves and computes nothing."""
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
        """Waiting for a collective returns what it has written."""
        for old, new in zip(tensors(args), tensors(result), strict=False):
            self.numbers.setdefault(storage_of(new), self.number(old))

    def work_of(
        self, full: str, name: str, args: Sequence[Any]
    ) -> Product | Attention | Message | None:
        """What an operator computes or sends; None for all others."""
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
        """What a collective sends."""
        assert name in READERS, f"{name} is not counted: add it to dry_run.traffic.READERS"
        axis, size = self.axes[group_name(args)]
        operation, sent = READERS[name](args, size)
        return Message(axis, operation, sent if size > 1 else 0)

    def ring(self, name: str, args: Sequence[Any]) -> Attention:
        """The ring's operators: a block of keys for every rank of the ring."""
        is_backward = name.endswith("backward")
        q, k = args[1:3] if is_backward else args[:2]
        size = self.axes[group_name(args)][1]
        sent = READERS[name](args, size)[1]
        batch, heads, queries, head_dim = q.shape
        return Attention(
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


def attention(args: Sequence[Any], *, is_backward: bool) -> Attention:
    """Torch's fused kernel; its arguments begin with q, k, v, those of backward with a gradient."""
    q, k = args[1:3] if is_backward else args[:2]
    batch, heads, queries, head_dim = q.shape
    # Fake tensors are on the CPU, whose kernel has one flag.
    is_causal = any(value is True for value in args)
    dtype = FORMATS[q.dtype]
    return Attention(batch, heads, queries, k.shape[2], head_dim, dtype, is_causal, is_backward)


def storage_of(tensor: Tensor) -> StorageWeakRef:
    """A tensor's storage; without keeping its memory, but no later storage is equal to it."""
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
    """Elements in memory: expanded dims read the same ones."""
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
    """False for a sum or another reduction over other dims than the last one."""
    if name not in ("sum", "mean", "amax", "amin") or len(args) < 2:
        return True
    dims = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
    return all(dim in (-1, args[0].ndim - 1) for dim in dims)
