"""Embed, a block and the head, one after another: each with a graph and passes of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from titan_dit.dry_run.memory import MemoryLog, StorageKind, local
from titan_dit.execution.base import scaled
from titan_dit.models.base import Model
from titan_dit.objectives.base import Prepared
from titan_dit.planner.oplog import Key, Operator, OperatorLog

PARTS = ("embed", "block", "head")


class Change(NamedTuple):
    """An allocation (bytes above 0), a resize or a free."""

    bytes: float
    is_gradient: bool
    """Of a parameter's gradient."""


@dataclass(frozen=True)
class Pass:
    """Forward or backward of a part, or the preparation of its inputs."""

    operators: Sequence[Operator]
    changes: Sequence[Change]


@dataclass(frozen=True)
class Trace:
    """A part, for one microbatch."""

    forward: Pass
    backward: Pass
    later: frozenset[int]
    """Storages that other parts read."""
    reduced: Sequence[Operator]
    """Sums of gradients over tp, which a step does once."""
    carried: float
    """Bytes of activations at the beginning of its backward, without what it and earlier parts
    keep: the gradients of its outputs, less its outputs if only the next part kept them."""


class Marks:
    """Where in the logs the passes of a microbatch begin and end."""

    def __init__(self, memory: MemoryLog, log: OperatorLog) -> None:
        self.memory, self.log = memory, log
        self.spans: dict[Key, tuple[int, int]] = {}

    @contextmanager
    def of(self, part: str, which: str) -> Iterator[None]:
        """What happens within the block is this pass."""
        self.log.during(part, which)
        start = len(self.memory.events)
        yield
        self.log.key = None
        self.spans[part, which] = start, len(self.memory.events)

    def between(self, start: int, end: int) -> list[Change]:
        """Changes of memory; read at the end, when all kinds are known."""
        return [
            Change(change, record.kind == StorageKind.UNREDUCED)
            for record, change in self.memory.events[start:end]
        ]

    def changes(self, part: str, which: str) -> list[Change]:
        """Those of a pass."""
        return self.between(*self.spans[part, which])

    def passed(self, part: str, which: str) -> Pass:
        """A pass."""
        return Pass(tuple(self.log.found[part, which]), tuple(self.changes(part, which)))

    def later(self, part: str) -> frozenset[int]:
        """Storages that others than this part read."""
        own = self.log.found.items()
        found = (o for key, operators in own if key[0] != part for o in operators)
        return frozenset(access.storage for o in found for access in o.reads)

    def trace(self, part: str) -> Trace:
        """A part."""
        before = PARTS[: PARTS.index(part) + 1]
        start = self.spans[PARTS[0], "forward"][0]
        live = self.between(start, self.spans[part, "backward"][0])
        kept = sum(c.bytes for each in before for c in self.changes(each, "forward"))
        return Trace(
            forward=self.passed(part, "forward"),
            backward=self.passed(part, "backward"),
            later=self.later(part),
            reduced=tuple(self.log.found[part, "reduce"]),
            carried=sum(c.bytes for c in live if not c.is_gradient) - kept,
        )


class _Border(torch.autograd.Function):
    """The stream as a part gets it from another one: backward ends here."""

    @staticmethod
    def forward(ctx: Any, learns: Tensor, arrived: dict[int, Tensor], *stream: Tensor) -> Any:
        """`learns`: any tensor with gradients. `arrived` takes the gradients of the stream."""
        ctx.arrived = arrived
        return tuple(tensor.view_as(tensor) for tensor in stream)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Keep the gradients."""
        ctx.arrived.update(enumerate(gradients))
        return (None, None, *(None for _ in gradients))


class Chain:
    """Embed, block and head, each with a graph of its own."""

    def __init__(self, model: Model, executor: Any, prepared: Prepared, marks: Marks) -> None:
        self.model, self.executor, self.prepared, self.marks = model, executor, prepared, marks
        self.edges: dict[str, list[GradientEdge | None]] = {}
        """By part: of its outputs."""
        self.arrived: dict[str, dict[int, Tensor]] = {part: {} for part in PARTS}
        """By part: gradients of its inputs."""
        self.stream = 0.0
        self.loss: tuple[Tensor, Tensor] | None = None

    def forward(self) -> None:
        """All parts."""
        prepared, side = self.prepared, self.prepared.side_inputs
        with self.marks.of("embed", "forward"):
            stream = self.model.embed(prepared.inputs, side)  # type: ignore[misc]
            self.cut("embed", stream)
        stream = self.entered("block", stream)
        with self.marks.of("block", "forward"):
            stream = next(iter(self.model.blocks.values()))(stream, side)
            self.cut("block", stream)
        self.stream = sum(local(tensor).nbytes for tensor in stream)
        stream = self.entered("head", stream)
        with self.marks.of("head", "forward"):
            output = self.model.head(stream, side)  # type: ignore[misc]
            del stream
            run = self.executor
            self.loss = scaled(run.score(run.loss, output, prepared), None)
            del output

    def cut(self, part: str, stream: Sequence[Tensor]) -> None:
        """Remember where a part's backward starts."""
        self.edges[part] = [get_gradient_edge(t) if t.requires_grad else None for t in stream]

    def entered(self, part: str, stream: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The stream at the beginning of a part."""
        learns = torch.empty(0, requires_grad=True)
        detached = (tensor.detach() for tensor in stream)
        found: tuple[Tensor, ...] = _Border.apply(learns, self.arrived[part], *detached)  # type: ignore[no-untyped-call]
        return found

    def backward(self) -> None:
        """All parts, the last first."""
        assert self.loss is not None
        with self.marks.of("head", "backward"):
            loss, factor = self.loss
            self.loss = None
            torch.autograd.backward(loss, factor)
            del loss
        for part, after in (("block", "head"), ("embed", "block")):
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
