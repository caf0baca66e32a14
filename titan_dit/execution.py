"""Executors: forward and backward of a step's microbatches.

The interface, the executor without a pipeline, and context parallelism, which gives an executor
this rank's slice of every sample's tokens. The executors of a pipeline are in pipeline/.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titan_dit.config.section import UserError
from titan_dit.data.base import Batch
from titan_dit.models import lora_dropout
from titan_dit.models.base import ModelSpec, Stream, TensorSpec
from titan_dit.objectives.base import Prepared
from titan_dit.parallel import fsdp
from titan_dit.parallel.context import Slicing, join_tokens, slice_tokens
from titan_dit.rng import SampleRNG

Output: TypeAlias = Tensor | Stream
"""The output of a model's head: one prediction, or several."""
Tensors: TypeAlias = Mapping[str, Tensor]
NOTHING: Tensors = MappingProxyType({})
TokenLoss: TypeAlias = Callable[[Output, Mapping[str, Tensor]], Tensor]
"""(output of the head, targets) -> loss per token [b, n]: `Objective.loss`."""
Scored: TypeAlias = tuple[Tensor, Tensor]
"""(a microbatch's share of the step's loss, factor of its gradient)."""


def unchanged(value: Tensor) -> Tensor:
    """The identity for a tensor of any shape: the sum over one data-parallel rank."""
    return value


def by_name(
    loss: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Tensor],
    names: tuple[str, ...],
    tokens: int,
) -> TokenLoss:
    """Adapt an objective's loss to a head's output; checks prediction count and loss shape."""

    def named(output: Output, targets: Mapping[str, Tensor]) -> Tensor:
        several = (output,) if isinstance(output, Tensor) else output
        if len(several) != len(names):
            raise UserError(
                f"[model] head returns {len(several)} predictions, but the spec names "
                f"{', '.join(names)}. Return one tensor for each."
            )
        per_token = loss(dict(zip(names, several, strict=True)), targets)
        wanted = several[0].shape[0], tokens
        # Another shape would broadcast against the weights: a wrong loss without an error.
        if per_token.shape != wanted:
            raise UserError(
                f"[objective] loss returns {list(per_token.shape)}; it must return one value per "
                f"token, {list(wanted)}."
            )
        return per_token

    return named


def loss_share(per_token: Tensor, part: Prepared) -> Tensor:
    """A microbatch's share, a scalar, of the step's loss: sum(loss * weight) / total tokens.

    `per_token`: [b, n].
    """
    assert part.total_tokens is not None
    total = part.total_tokens
    # An fp64 divisor would make the loss fp64.
    divisor = total.to(per_token.dtype) if isinstance(total, Tensor) else total
    return (per_token * part.token_weight).sum() / divisor


def scored(loss: TokenLoss, output: Output, part: Prepared) -> Scored:
    """A microbatch's share of the step's loss, a scalar in fp32 or fp64, and its gradient's factor.

    A loss can overflow while its gradients do not. The factor 1 then becomes NaN, so that the
    gradient norm alone shows a bad step to every rank.
    """
    share = loss_share(loss(output, part.targets), part)
    value = share.detach()
    return share, 1 + (value - value)  # The compiler would fold 0 * value to 0, even for NaN.


def scaled(found: Scored, loss_scale: Tensor | None) -> Scored:
    """The result of `scored`, its factor multiplied by the loss scale of fp16, if there is one."""
    share, factor = found
    return share, factor if loss_scale is None else factor * loss_scale


class Executor(ABC):
    """Runs a rank's share of a batch through the model, in microbatches."""

    spec: ModelSpec | None = None
    """ModelSpec against which batches are checked; None for no check."""

    sum_over_data: Callable[[Tensor], Tensor] = staticmethod(unchanged)
    """Sum a value over the data-parallel ranks."""

    score: Callable[[TokenLoss, Output, Prepared], Scored] = staticmethod(scored)
    """`scored` as training calls it; compiled with [compile] objective."""

    with_side_inputs: Callable[[Prepared, Tensor | None], Prepared] = staticmethod(
        lambda prepared, loss_scale: prepared
    )
    """Add the context that the objective's modules in the model need, given a batch and
    `loss_scale`."""

    notes: Sequence[str] = ()
    """Console lines about the executor, such as its transport."""

    def step(self, prepared: Prepared, loss_scale: Tensor | None = None) -> Tensor:
        """Forward and backward over this rank's samples; gradients stay on the parameters.

        Returns this rank's share of the loss, a scalar. The loss is the sum of the shares over the
        dp, cp and pp axes. `loss_scale`: the gradients are multiplied by it, the loss is not; an
        fp32 scalar on the device, for fp16.
        """
        if self.spec is not None:
            check_names(prepared, self.spec)
        if prepared.total_tokens is None:
            # A tensor: reading it would synchronise. In fp64: fp32 counts only to 16.7 million.
            total = self.sum_over_data(prepared.weight.sum(dtype=torch.float64))
            prepared = replace(prepared, total_tokens=total)
        return self.run(self.with_side_inputs(prepared, loss_scale), loss_scale)

    def for_inputs(self, inputs: Tensors) -> Executor:
        """The executor that runs such inputs."""
        return self

    @abstractmethod
    def run(self, prepared: Prepared, loss_scale: Tensor | None = None) -> Tensor:
        """See `step`; `prepared.total_tokens` is set."""

    @abstractmethod
    def predict(self, inputs: Tensors, static: Tensors, context: Tensors = NOTHING) -> Tensor:
        """Forward only: the (first) prediction [b, ...], on every rank that has the samples.

        In fp32. `context`: as `Prepared.context`.
        """

    @abstractmethod
    def evaluate(self, prepared: Prepared) -> Tensor:
        """Forward only; the whole loss per token [b, n], on every rank that has the samples.

        Equal on every layout, and not weighted.
        """


InputShapes: TypeAlias = frozenset[tuple[str, tuple[int, ...]]]
"""(name, shape without the batch dim) of every input."""


class BucketedExecutor(Executor):
    """Executors of several buckets, all over the same parts of the model; inputs choose one."""

    def __init__(
        self,
        by_shapes: Mapping[InputShapes, Executor],
        make: Callable[[InputShapes], Executor | None] = lambda shapes: None,
    ) -> None:
        """`by_shapes`: shapes of the inputs -> the executor of such buckets.

        `make`: builds the executor for shapes that only sampling uses; returns None for unknown
        shapes.
        """
        self.by_shapes, self.make = dict(by_shapes), make
        notes = (note for each in by_shapes.values() for note in each.notes)
        self.notes = list(dict.fromkeys(notes))

    def for_inputs(self, inputs: Tensors) -> Executor:
        """See `Executor.for_inputs`. Raises UserError for inputs of no bucket."""
        shapes = {name: tuple(value.shape[1:]) for name, value in inputs.items()}
        key = frozenset(shapes.items())
        if key not in self.by_shapes and (made := self.make(key)):
            self.by_shapes[key] = made
        if found := self.by_shapes.get(key):
            return found
        raise UserError(
            f"[data] a batch has inputs of {shapes}, which is no bucket's shape. Let every step "
            "take the samples of one bucket."
        )

    def step(self, prepared: Prepared, loss_scale: Tensor | None = None) -> Tensor:
        """See `Executor.step`."""
        return self.for_inputs(prepared.inputs).step(prepared, loss_scale)

    def run(self, prepared: Prepared, loss_scale: Tensor | None = None) -> Tensor:
        """See `Executor.run`, which is abstract: `step` does not come here."""
        return self.for_inputs(prepared.inputs).run(prepared, loss_scale)

    def predict(self, inputs: Tensors, static: Tensors, context: Tensors = NOTHING) -> Tensor:
        """See `Executor.predict`."""
        return self.for_inputs(inputs).predict(inputs, static, context)

    def evaluate(self, prepared: Prepared) -> Tensor:
        """See `Executor.evaluate`."""
        return self.for_inputs(prepared.inputs).evaluate(prepared)


def shapes_of_spec(spec: ModelSpec) -> InputShapes:
    """(name, shape without the batch dim) of a model's inputs."""
    return frozenset((name, tuple(each.shape)) for name, each in spec.inputs.items())


def with_dropout_words(
    prepare: Callable[[Batch, SampleRNG], Prepared],
    specs: Callable[[Prepared], ModelSpec],
) -> Callable[[Batch, SampleRNG], Prepared]:
    """A `prepare` whose batches have the random words of [lora] dropout in their context.

    `specs`: the network's spec for a batch, whose shapes the words have.
    """

    def prepared_with_words(batch: Batch, rng: SampleRNG) -> Prepared:
        prepared = prepare(batch, rng)
        words = lora_dropout.drawn(rng, specs(prepared))
        return replace(prepared, context={**prepared.context, **words})

    return prepared_with_words


def check_names(prepared: Prepared, model_spec: ModelSpec) -> None:
    """Raise UserError if prepared names differ from the spec's, or weights cannot be summed."""
    for kind in ("inputs", "context", "static"):
        given, taken = getattr(prepared, kind), getattr(model_spec, kind)
        needed = taken.keys() - {*model_spec.optional}
        if not needed <= given.keys() <= taken.keys():
            raise UserError(
                f"[objective] prepares the {kind} {', '.join(given) or 'none'}, but [model] takes "
                f"{', '.join(taken) or 'none'}. Use the same names in `prepare` and in the spec."
            )
    if prepared.total_tokens is None and prepared.weight.ndim == 1:
        raise UserError(
            "[objective] prepares total_tokens=None with a weight per sample: only weights per "
            "token can be summed over all ranks. Return weights of [b, n], or set total_tokens."
        )


def first_of(output: Output) -> Tensor:
    """The first prediction [b, ...] of a head, which may return several."""
    return output if isinstance(output, Tensor) else output[0]


class LocalExecutor(Executor):
    """The whole model on this rank (its parameters may be sharded)."""

    def __init__(self, model: nn.Module, loss: TokenLoss, microbatch_size: int | None) -> None:
        self.model = model
        self.loss = loss
        self.microbatch_size = microbatch_size

    def run(self, prepared: Prepared, loss_scale: Tensor | None = None) -> Tensor:
        """See `Executor.step`. Gradients are reduced once, with the last microbatch."""
        parts = list(prepared.microbatches(self.microbatch_size))
        losses: list[Tensor] = []
        for number, part in enumerate(parts, start=1):
            if len(parts) > 1:
                fsdp.sync_gradients(self.model, enabled=number == len(parts))
            output = self.model(part.inputs, part.side_inputs)
            loss, factor = scaled(self.score(self.loss, output, part), loss_scale)
            losses.append(loss.detach())
            torch.autograd.backward(loss, factor)
        total = losses[0].float()
        for loss in losses[1:]:
            total += loss
        return total

    @torch.no_grad()
    def predict(self, inputs: Tensors, static: Tensors, context: Tensors = NOTHING) -> Tensor:
        """See `Executor.predict`."""
        rows = next(iter(inputs.values())).shape[0]
        size = self.microbatch_size or rows
        parts = []
        for first in range(0, rows, size):
            part = {name: value[first : first + size] for name, value in inputs.items()}
            own = {name: value[first : first + size] for name, value in context.items()}
            # A copy: the next microbatch overwrites the outputs of CUDA graphs.
            output = first_of(self.model(part, {**static, **own}))
            parts.append(output.to(torch.float32, copy=True))
        fsdp.reshard(self.model)
        return torch.cat(parts)

    @torch.no_grad()
    def evaluate(self, prepared: Prepared) -> Tensor:
        """See `Executor.evaluate`."""
        losses = [
            self.loss(self.model(part.inputs, part.side_inputs), part.targets)
            for part in prepared.microbatches(self.microbatch_size)
        ]
        fsdp.reshard(self.model)
        return torch.cat(losses)


@dataclass(frozen=True)
class TokenDims:
    """The token dim of every tensor that has one, counting the batch dim."""

    inputs: Mapping[str, int]
    context: Mapping[str, int]
    static: Mapping[str, int]
    targets: Mapping[str, int]

    @classmethod
    def of(cls, model_spec: ModelSpec, token_targets: tuple[str, ...]) -> TokenDims:
        """The token dims of a model and an objective."""
        return cls(
            inputs=dims_of(model_spec.inputs, batch=1),
            context=dims_of(model_spec.context, batch=1),
            static=dims_of(model_spec.static, batch=0),
            targets=dict.fromkeys(token_targets, 1),
        )


def dims_of(specs: Mapping[str, TensorSpec], batch: int) -> dict[str, int]:
    """The token dims of tensors with `batch` (0 or 1) batch dims before the dims of their spec."""
    return {
        name: spec.token_dim + batch for name, spec in specs.items() if spec.token_dim is not None
    }


class SlicedExecutor(Executor):
    """Runs another executor on the token slice of this rank of `mesh`."""

    def __init__(
        self,
        inner: Executor,
        mesh: DeviceMesh,
        dims: TokenDims,
        slicing: Slicing = "contiguous",
    ) -> None:
        self.inner, self.notes = inner, inner.notes
        self.mesh = mesh
        self.dims = dims
        self.slicing = slicing

    def run(self, prepared: Prepared, loss_scale: Tensor | None = None) -> Tensor:
        """See `Executor.step`: the loss is this slice's share."""
        return self.inner.run(self.sliced(prepared), loss_scale)

    def predict(self, inputs: Tensors, static: Tensors, context: Tensors = NOTHING) -> Tensor:
        """See `Executor.predict`. Predictions are all-gathered over cp."""
        found = self.inner.predict(
            self.slice(inputs, self.dims.inputs),
            self.slice(static, self.dims.static),
            self.slice(context, self.dims.context),
        )
        return self.all_gather_tokens(found)

    def evaluate(self, prepared: Prepared) -> Tensor:
        """See `Executor.evaluate`."""
        return self.all_gather_tokens(self.inner.evaluate(self.sliced(prepared)))

    def sliced(self, prepared: Prepared) -> Prepared:
        """A batch reduced to the tokens of this rank."""
        weight = prepared.weight
        if weight.ndim == 2:
            weight = self.slice({"weight": weight}, {"weight": 1})["weight"]
        return replace(
            prepared,
            inputs=self.slice(prepared.inputs, self.dims.inputs),
            context=self.slice(prepared.context, self.dims.context),
            static=self.slice(prepared.static, self.dims.static),
            targets=self.slice(prepared.targets, self.dims.targets),
            weight=weight,
        )

    def slice(self, tensors: Mapping[str, Tensor], dims: Mapping[str, int]) -> dict[str, Tensor]:
        """Cut every tensor to this rank's tokens, at its token dim in `dims`.

        Tensors without one stay whole.
        """
        present = {name: dim for name, dim in dims.items() if name in tensors}
        rank, size = self.mesh.get_local_rank(), self.mesh.size()
        return slice_tokens(tensors, present, rank, size, self.slicing)

    def all_gather_tokens(self, mine: Tensor) -> Tensor:
        """All-gather token slices to [b, n, ...], in the order of the sample."""
        mine = mine.contiguous()
        slices = [torch.empty_like(mine) for _ in range(self.mesh.size())]
        dist.all_gather(slices, mine, group=self.mesh.get_group())
        return join_tokens(slices, self.slicing)
