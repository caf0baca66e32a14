"""One microbatch of embed, a block and the head of the real model, on fake tensors.

The parts run one after another, forward and then backward, as three stages of a pipeline would
without messages between them: every operator and every byte belongs to one part. Parameters are
plain tensors in the compute dtype, or DTensors over tp. There is no FSDP and there are no copies of
weights: what these add does not depend on the part.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from titan_dit.config.training import EMAConfig, TrainingConfig
from titan_dit.data.base import Batch, Field
from titan_dit.dry_run import fake_step
from titan_dit.dry_run.fake_step import CPU, HostReads, chunks_of_a_device, fake_world
from titan_dit.dry_run.memory import MemoryLog, StorageKind, local
from titan_dit.execution.base import scaled
from titan_dit.execution.build import executor_of, own_parameters, place_modules
from titan_dit.execution.sliced import SlicedExecutor
from titan_dit.models.base import Model
from titan_dit.objectives.base import Objective, Prepared
from titan_dit.optim.ema import EMA
from titan_dit.optim.gradient_norm import clip_norm
from titan_dit.optim.optimizer import OptimizerConfig, apply_gradients, build_optimizer
from titan_dit.parallel import fsdp
from titan_dit.parallel.apply import parallelize
from titan_dit.parallel.init import initialize
from titan_dit.parallel.mesh import AxisSizes, Mesh
from titan_dit.plan import RunPlan
from titan_dit.planner.oplog import Key, Operator, OperatorLog
from titan_dit.rng import SampleRNG

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


@dataclass(frozen=True)
class Rehearsal:
    """What a microbatch of one size does."""

    parts: Mapping[str, Trace]
    prepare: Pass
    prepared: frozenset[int]
    """Storages of the preparation that the parts read."""
    cached: float
    """Bytes that the objective prepares once for all steps."""
    stream: float
    """Bytes that a block returns."""


@dataclass(frozen=True)
class State:
    """What a part holds and updates, at any microbatch size."""

    parameters: float
    trained: float
    buffers: float
    """Bytes."""
    tensors: int
    tied: float
    """Elements of its parameters that another part has, too."""
    update: Sequence[Operator]
    average: Sequence[Operator]
    """One update of the EMA."""


@dataclass(frozen=True, kw_only=True)
class Sections:
    """The parts of a config that do not depend on the layout."""

    objective: Callable[[], Objective]
    """Makes one: an objective may keep tensors, which are of one rehearsal."""
    fields: Mapping[str, Field]
    training: TrainingConfig
    optimizer: OptimizerConfig
    ema: EMAConfig


def alone(plan: RunPlan) -> RunPlan:
    """The plan of one pipeline stage and of two replicas, of which one is rehearsed.

    One alone would send the norm of its gradients over the group of tp or cp.
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
    module.shard = module.shard_module = lambda *_: None
    try:
        yield
    finally:
        module.shard, module.shard_module = own


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


class FakeParts:
    """Embed, the first block and the head of a plan's model, on this rank."""

    def __init__(self, plan: RunPlan, sections: Sections, mesh: Mesh, mode: Any) -> None:
        """`plan`: see `alone`; within a fake world."""
        self.plan, self.sections, self.mesh, self.mode = plan, sections, mesh, mode
        with torch.device("meta"):
            self.model: Model = plan.spec.build()
        self.model.cut(range(1), is_first=True, is_last=True)
        model, own = self.model, (plan.parallel, plan.precision, plan.remat, plan.compile)
        with without_fsdp():
            tokens = plan.microbatch_size * plan.tokens_per_rank
            parallelize(model, mesh, plan.tensor_plan, *own, tokens=tokens)
        self.objective = sections.objective()
        self.cached = 0.0
        self.memory = MemoryLog()
        self.log = OperatorLog(mesh, self.memory)
        with mode:
            initialize(model, model.initializers(), plan.seed, CPU, plan.initial_weights)
            self.parameters = own_parameters({0: model})
            with without_fsdp():
                self.parameters |= place_modules(plan, self.objective, mesh, CPU)

    def named(self, part: str) -> dict[str, nn.Parameter]:
        """The parameters of a part; those of the objective are the head's."""
        first = {"embed": ("embed.",), "block": ("blocks.",), "head": ("head.", "objective.")}
        return {n: p for n, p in self.parameters.items() if n.startswith(first[part])}

    def states(self) -> dict[str, State]:
        """Updates all parts; the weights are fp32 still."""
        with self.mode, self.memory, self.log:
            # Freezes what [optimizer] groups say.
            build_optimizer(self.parameters, self.sections.optimizer, self.plan.spec)
            return {part: self.state(part) for part in PARTS}

    def state(self, part: str) -> State:
        """Updates one part."""
        named = self.named(part)
        trained = {name: p for name, p in named.items() if p.requires_grad}
        if trained:
            self.update(part, trained, self.sections.optimizer.build(trained, self.plan.spec))
        module = self.model.get_submodule("blocks.0" if part == "block" else part)
        table = {name for name in self.model.tied.values() if name.startswith(f"{part}.")}
        log = self.log.found
        return State(
            parameters=count(named.values()),
            trained=count(trained.values()),
            buffers=sum(buffer.nbytes for buffer in module.buffers()),
            tensors=len(named),
            tied=count(named[name] for name in table),
            update=log.pop((part, "update"), ()),
            average=log.pop((part, "average"), ()),
        )

    def update(self, part: str, named: Mapping[str, nn.Parameter], optimizer: Any) -> None:
        """Clips, steps and averages, as `FakeRank.step`."""
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
        """Let the model hold its parameters in the compute dtype."""
        with self.mode:
            for module in self.model.modules():
                for name, parameter in module.named_parameters(recurse=False):
                    narrow = parameter.detach().to(self.plan.dtype)
                    setattr(module, name, nn.Parameter(narrow, parameter.requires_grad))
        self.model.tie()
        self.parameters |= own_parameters({0: self.model})
        # Known before a pass uses them, they are no memory of the pass.
        self.memory.mark(self.parameters.values(), StorageKind.GATHERED)
        self.memory.mark(self.model.buffers(), StorageKind.PARAMETERS)

    def run(self, size: int) -> Rehearsal:
        """One microbatch of `size` samples; after `cast`."""
        for parameter in self.parameters.values():
            parameter.grad = None
        self.log.found.clear()
        marks = Marks(self.memory, self.log)
        with self.mode, self.memory, self.log:
            with self.memory.phase("inputs", StorageKind.INPUTS):
                start = len(self.memory.events)
                prepared, executor = self.prepare(size)
                first = len(self.memory.events)
                del prepared, executor
                with marks.of("inputs", "prepare"):
                    prepared, executor = self.prepare(size)
            with self.memory.phase("parts", StorageKind.ACTIVATIONS):
                chain = Chain(self.model, executor, prepared, marks)
                chain.forward()
                chain.backward()
            for part in PARTS:
                self.log.during(part, "reduce")
                self.reduce(self.named(part).values())
            self.log.key = None
        again = sum(change.bytes for change in marks.changes("inputs", "prepare"))
        del prepared
        whole = sum(change for _, change in self.memory.events[start:first])
        self.cached = max(self.cached, whole - again)  # By the first run.
        return Rehearsal(
            parts={part: marks.trace(part) for part in PARTS},
            prepare=marks.passed("inputs", "prepare"),
            prepared=marks.later("inputs"),
            cached=self.cached,
            stream=chain.stream,
        )

    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        """As FSDP does before it reduces the fp32 sums of several microbatches over data ranks."""
        wide = torch.promote_types(self.plan.dtype, torch.float32)
        for parameter in parameters:
            gradient: Any = parameter.grad
            if hasattr(gradient, "redistribute"):  # A DTensor.
                summed = gradient.to(wide)
                summed.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]

    def prepare(self, size: int) -> tuple[Prepared, Any]:
        """This rank's slice of a batch whose fields are zero, and its executor."""
        empty = {
            name: torch.zeros(size, *(n or 1 for n in field.shape), dtype=field.dtype)
            for name, field in self.sections.fields.items()
        }
        numbers = torch.arange(size)
        batch = Batch(empty, numbers, weight=torch.ones(size), total_weight=float(size))
        prepared = self.objective.prepare(batch, SampleRNG(self.plan.seed, numbers))
        own = self.plan, self.objective, self.mesh, {0: self.model}, CPU
        executor: Any = executor_of(*own)
        if isinstance(executor, SlicedExecutor):
            prepared, executor = executor.sliced(prepared), executor.inner
        if prepared.total_tokens is None:
            prepared = replace(prepared, total_tokens=prepared.weight.sum(dtype=torch.float64))
        return prepared, executor


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


def fake_tensors() -> Any:
    """The mode in which tensors have no memory; torch's class of it is private to the dry run."""
    return fake_step.FakeTensorMode(allow_non_fake_inputs=True)  # type: ignore[attr-defined]


def count(parameters: Any) -> float:
    """Elements on this rank."""
    return float(sum(local(parameter).numel() for parameter in parameters))


def rehearse(
    plan: RunPlan, sections: Sections, sizes: Iterable[int]
) -> tuple[Mapping[str, State], dict[int, Rehearsal]]:
    """State by part; one microbatch of each of `sizes` samples."""
    own, collects = alone(plan), gc.isenabled()
    gc.disable()  # It would free tensors at moments that differ from size to size.
    try:
        with fake_world(0, own.world_size), chunks_of_a_device():
            parts = FakeParts(own, sections, Mesh(own.sizes, "cpu"), fake_tensors())
            states = parts.states()
            parts.cast()
            return states, {size: parts.run(size) for size in sizes}
    finally:
        if collects:
            gc.enable()
