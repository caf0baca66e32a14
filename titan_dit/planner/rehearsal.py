"""One microbatch of embed, a block and the head of the real model, on fake tensors.

The parts run one after another, forward and then backward, as three stages of a pipeline would
without messages between them: every operator and every byte belongs to one part. Parameters are
plain tensors in the compute dtype, or DTensors over tp. There is no FSDP and there are no copies of
weights: what these add does not depend on the part.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from titan_dit.dry_run.fake_step import CPU, HostReads, chunks_of_a_device, fake_world
from titan_dit.dry_run.memory import MemoryLog, StorageKind, local
from titan_dit.execution.build import executor_of, own_parameters, place_modules
from titan_dit.execution.sliced import SlicedExecutor
from titan_dit.models.base import Model
from titan_dit.optim.ema import EMA
from titan_dit.optim.gradient_norm import clip_norm
from titan_dit.optim.optimizer import apply_gradients, build_optimizer
from titan_dit.parallel import fsdp
from titan_dit.parallel.apply import parallelize
from titan_dit.parallel.init import allocate
from titan_dit.parallel.mesh import AxisSizes, Mesh
from titan_dit.plan import RunPlan
from titan_dit.planner.chain import PARTS, Chain, Marks, Trace
from titan_dit.planner.inputs import Inputs, Prepare
from titan_dit.planner.oplog import Operator, OperatorLog


@dataclass(frozen=True)
class Rehearsal:
    """What a microbatch of one size does."""

    parts: Mapping[str, Trace]
    prepare: Prepare
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


class FakeParts:
    """Embed, the first block and the head of a plan's model, on this rank."""

    def __init__(self, plan: RunPlan, inputs: Inputs, mesh: Mesh) -> None:
        """`plan`: see `alone`; within a fake world."""
        self.plan, self.inputs, self.mesh = plan, inputs, mesh
        self.sections, self.mode = inputs.sections, inputs.mode
        with torch.device("meta"):
            self.model: Model = plan.spec.build()
        self.model.cut(range(1), is_first=True, is_last=True)
        model, own = self.model, (plan.parallel, plan.precision, plan.remat, plan.compile)
        with without_fsdp():
            tokens = plan.microbatch_size * plan.tokens_per_rank
            parallelize(
                model,
                mesh,
                plan.tensor_plan,
                *own,
                tokens=tokens,
                adapters=plan.lora,
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
        """The parameters of a part; those of the objective are the head's."""
        first = {"embed": ("embed.",), "block": ("blocks.",), "head": ("head.", "objective.")}
        return {n: p for n, p in self.parameters.items() if n.startswith(first[part])}

    def states(self) -> dict[str, State]:
        """Updates all parts; the weights are fp32 still."""
        with self.mode, self.memory, self.log:
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
            own = self.plan, self.objective, self.mesh, {0: self.model}, CPU
            executor: Any = executor_of(*own)
            with self.memory.phase("inputs", StorageKind.INPUTS):
                given = self.plan, size, executor, self.memory, marks
                prepared, prepare = self.inputs.of(*given)
            if isinstance(executor, SlicedExecutor):
                executor = executor.inner
            with self.memory.phase("parts", StorageKind.ACTIVATIONS):
                chain = Chain(self.model, executor, prepared, marks)
                chain.forward()
                chain.backward()
            for part in PARTS:
                self.log.during(part, "reduce")
                self.reduce(self.named(part).values())
            self.log.key = None
        prepare.read = prepare.read or marks.later("inputs")
        return Rehearsal({part: marks.trace(part) for part in PARTS}, prepare, chain.stream)

    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        """As FSDP does before it reduces the fp32 sums of several microbatches over data ranks."""
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
    """State by part, unless it is known; one microbatch of each of `sizes` samples."""
    own, collects = alone(plan), gc.isenabled()
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
