"""Peak memory of a rank by kind, from a log of every allocation, resize and free.

Works on real and on fake tensors. Sizes are the requested bytes: a device's allocator rounds up and
caches freed blocks.
"""

from __future__ import annotations

import itertools
import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PROPAGATOR: Any = DTensor._op_dispatcher.sharding_propagator
"""Finds the placements of an operator's output."""


class StorageKind(StrEnum):
    """The kind of data in a storage."""

    PARAMETERS = "parameters"
    """This rank's shards, fp32, or bf16 by [precision] weights."""
    GRADIENTS = "gradients"
    """Gradients of the shards, in the weights' format."""
    OPTIMIZER = "optimizer"
    EMA = "EMA"
    GATHERED = "gathered"
    """Parameters all-gathered over dp_shard, or one rank's copies, in the compute dtype."""
    UNREDUCED = "unreduced"
    """Gradients of gathered parameters before the reduce-scatter or the cast to fp32."""
    ACTIVATIONS = "activations"
    """Allocated in forward, or received by a pipeline stage."""
    INPUTS = "inputs"
    """The batch, its noise and its targets."""
    FROZEN = "frozen"
    """This rank's shards of frozen modules, such as a text encoder."""
    TEMPORARY = "temporary"
    """Allocated in backward, recomputation, the optimizer or the EMA."""
    HOST = "host"
    """Tensors that [offload] holds in host memory; no device memory."""


STATE = (
    StorageKind.PARAMETERS,
    StorageKind.GRADIENTS,
    StorageKind.OPTIMIZER,
    StorageKind.EMA,
)
"""Kinds that [offload] parameters holds in host memory."""


class Storage:
    """A logged storage. Its kind may be set after it is freed."""

    __slots__ = ("__weakref__", "kind", "size")

    def __init__(self, kind: StorageKind, size: int) -> None:
        self.kind, self.size = kind, size


@dataclass(frozen=True)
class Peak:
    """Bytes by kind at the memory peak."""

    bytes: Mapping[StorageKind, int]
    phase: str
    """Phase of the step at the peak."""

    @property
    def total(self) -> int:
        """Sum over all kinds of device memory."""
        return sum(self.bytes.values()) - self.bytes.get(StorageKind.HOST, 0)


class OperatorMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the context, calls `ran` after every operator on plain tensors."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator, then `ran`."""
        if is_wrapper(types):
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.ran(func, args, kwargs, result)
        return result

    @abstractmethod
    def ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Look at an operator, its arguments and its result."""
        raise NotImplementedError


class MemoryLog(OperatorMode):  # type: ignore[no-untyped-call]
    """Logs every allocation, resize and free of a storage within the context.

    The kind of a storage may be set later than its events; `peak` reads the final kinds.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.records: dict[int, Storage] = {}
        self.events: list[tuple[Storage, int]] = []
        self.first = 0
        self.name, self.kind = "", StorageKind.TEMPORARY
        self.phases: list[tuple[int, str]] = []
        self.seen_parameters: set[int] = set()
        self.is_inferring = False

    def __enter__(self) -> MemoryLog:
        """Start to log allocations, resizes and the parameters that modules use."""
        self.resize = torch.UntypedStorage.resize_
        log, resize = self, self.resize

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            log._resized(storage)
            return result

        # FSDP frees and reallocates gathered parameters with resize_, which no operator shows.
        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        self.infer = PROPAGATOR._propagate_tensor_meta_non_cached
        PROPAGATOR._propagate_tensor_meta_non_cached = self._unlogged
        self.hook = register_module_forward_pre_hook(self._mark_gathered)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop logging allocations; frees are still logged."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.hook.remove()
        torch.UntypedStorage.resize_ = self.resize  # type: ignore[method-assign]
        PROPAGATOR._propagate_tensor_meta_non_cached = self.infer

    @contextmanager
    def phase(self, name: str, kind: StorageKind) -> Iterator[None]:
        """Give new storages this kind within the block; a backward's storages stay TEMPORARY."""
        before, self.name, self.kind = (self.name, self.kind), name, kind
        self.phases.append((len(self.events), name))
        yield
        self.name, self.kind = before
        self.phases.append((len(self.events), before[0]))

    def begin(self) -> None:
        """Start the search for the peak here."""
        self.first = len(self.events)

    def mark(self, tensors: Iterable[object], kind: StorageKind) -> None:
        """Set the kind of these tensors' storages."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                for part in held_by(tensor):
                    self._record(part).kind = kind

    def live(self) -> Counter[StorageKind]:
        """Live bytes by kind."""
        return Counter(
            {
                kind: sum(record.size for record in self.records.values() if record.kind == kind)
                for kind in StorageKind
            }
        )

    def peak(self, growth: float = 1.0, on_host: Collection[StorageKind] = ()) -> Peak:
        """The memory peak since `begin`, with the bytes of activations multiplied by `growth`.

        `on_host`: kinds that count as host memory, which has its own peak.
        """
        for record, _ in self.events:
            if record.kind in on_host:
                record.kind = StorageKind.HOST
        times = dict.fromkeys(StorageKind, 1.0) | {StorageKind.ACTIVATIONS: growth}
        times[StorageKind.HOST] = 0.0
        total = most = sum(times[record.kind] * size for record, size in self.events[: self.first])
        moment = self.first
        for number, (record, change) in enumerate(self.events[self.first :], start=self.first + 1):
            total += times[record.kind] * change
            if total > most:
                most, moment = total, number
        held: Counter[StorageKind] = Counter(dict.fromkeys(StorageKind, 0))
        for record, change in self.events[:moment]:
            held[record.kind] += change
        held[StorageKind.ACTIVATIONS] = round(growth * held[StorageKind.ACTIVATIONS])
        of_host = (size for record, size in self.events if record.kind is StorageKind.HOST)
        held[StorageKind.HOST] = max(itertools.accumulate(of_host), default=0)
        names = [name for start, name in self.phases if start < moment]
        return Peak(held, names[-1] if names else "")

    def ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Log the allocations of an operator."""
        if self.is_inferring:
            return
        for tensor in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._record(tensor)
        self._infer_kinds(func, args, result)

    def _infer_kinds(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Set the kinds that a collective or cast implies for its storages."""
        name = func._schema.name
        if name == "c10d::_allgather_base_":
            self.mark(args[:1], StorageKind.GATHERED)
        elif name == "c10d::_reduce_scatter_base_":
            self.mark(args[1:2], StorageKind.UNREDUCED)
        elif name == "aten::_to_copy" and self._record(args[0]).kind == StorageKind.UNREDUCED:
            self.mark((result,), StorageKind.UNREDUCED)

    def _mark_gathered(self, module: nn.Module, _: Any) -> None:
        """Before a module's forward: mark parameters that are not shards as gathered."""
        for parameter in module._parameters.values():
            if parameter is None or id(parameter) in self.seen_parameters:
                continue
            self.seen_parameters.add(id(parameter))
            kinds = {self._record(part).kind for part in held_by(parameter)}
            if StorageKind.PARAMETERS not in kinds:
                self.mark((parameter,), StorageKind.GATHERED)
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._mark_gradient)  # type: ignore[no-untyped-call]

    def _unlogged(self, operation: Any) -> Any:
        """Infer the shapes of an operator's output without logging DTensor's own fake tensors.

        torch 2.11 infers them in every step of the optimizer.
        """
        self.is_inferring = True
        try:
            return self.infer(operation)
        finally:
            self.is_inferring = False

    def _mark_gradient(self, parameter: Tensor) -> None:
        self.mark((parameter.grad,), StorageKind.UNREDUCED)

    def _record(self, tensor: Tensor) -> Storage:
        """The record of a tensor's storage; logs an allocation if it is new."""
        if tensor.device.type == "meta":  # The shape of a message, for example: no memory.
            return Storage(StorageKind.TEMPORARY, 0)
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.records:
            # The test for "inside a backward pass" of torch's own module tracker.
            in_backward = torch._C._current_graph_task_id() != -1
            kind = StorageKind.TEMPORARY if in_backward else self.kind
            record = self.records[key] = Storage(kind, storage.nbytes())
            self.events.append((record, record.size))
            weakref.finalize(storage, self._ended, key).atexit = False
        return self.records[key]

    def _resized(self, storage: torch.UntypedStorage) -> None:
        record = self.records.get(storage._cdata)
        if record is not None and record.size != storage.nbytes():
            self.events.append((record, storage.nbytes() - record.size))
            record.size = storage.nbytes()

    def _ended(self, key: int) -> None:
        record = self.records.pop(key)
        self.events.append((record, -record.size))


def is_wrapper(types: Iterable[type]) -> bool:
    """True if an operator's `types`, as given to a mode, include DTensor or another wrapper.

    A mode returns NotImplemented for them: they unwrap themselves, and the same mode then sees the
    operator on their local tensors.
    """
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


def held_by(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that hold a tensor's memory on this rank.

    A DTensor yields its shard, a float8 weight its values and their scale.
    """
    if not is_wrapper((type(tensor),)):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for part in (getattr(tensor, name) for name in names):
        if isinstance(part, Tensor):  # A DTensor has a mesh, too.
            yield from held_by(part)


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor
