"""The interface of an objective, and the types that it takes and returns."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from titan_dit.config.section import UserError
from titan_dit.config.training import (
    GenerationConfig,
    RepaConfig,
    SamplingConfig,
    TextConfig,
)
from titan_dit.data.base import Batch, DataFacts, Field, Fields, Source
from titan_dit.models.base import ModelSpec
from titan_dit.models.initializers import Initializer

# Classes of users import it from this module (docs/extending.md).
from titan_dit.objectives.sections import ObjectiveConfig as ObjectiveConfig
from titan_dit.rng import SampleRNG

T = TypeVar("T")
Forward: TypeAlias = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Tensor]
"""(inputs, static) -> prediction: `Executor.predict`, or the network itself."""


@runtime_checkable
class OnFirst(Protocol):
    """Runs an action on rank 0, and returns its result on every rank; raises its UserError."""

    def __call__(self, action: Callable[[], T], /) -> T:
        """Collective."""


@dataclass(frozen=True)
class Prepared:
    """A batch ready for an executor: all random numbers are drawn."""

    inputs: Mapping[str, Tensor]
    """Inputs of the model's embed; batch first."""
    targets: Mapping[str, Tensor]
    """Inputs of the loss beside the predictions; batch first."""
    weight: Float[Tensor, "b *n"]
    """Loss weight per sample, [b], or per token, [b, n]."""
    total_tokens: float | Tensor | None
    """Divisor of the loss: weighted tokens of the step over all ranks. None if a rank cannot know
    it; the executor then all-reduces the token weights."""
    static: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """Inputs of every part of the model that are equal for all samples; no batch dim."""
    context: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """Per-sample inputs of every part of the model; batch first."""

    @property
    def side_inputs(self) -> dict[str, Tensor]:
        """`static` and `context` in one mapping, see `models.base.SideInputs`."""
        return {**self.static, **self.context}

    @property
    def token_weight(self) -> Float[Tensor, "b _"]:
        """The weight as [b, n], or as [b, 1] if it is per sample."""
        return self.weight if self.weight.ndim == 2 else self.weight[:, None]

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return self.weight.shape[0]

    def select(self, part: slice | Tensor) -> Prepared:
        """Select samples by slice or by index."""
        return replace(
            self,
            inputs={k: v[part] for k, v in self.inputs.items()},
            targets={k: v[part] for k, v in self.targets.items()},
            weight=self.weight[part],
            context={k: v[part] for k, v in self.context.items()},
        )

    def microbatches(self, size: int | None) -> Iterator[Prepared]:
        """Consecutive microbatches of at most `size` samples; None yields the whole batch."""
        for first in range(0, self.num_samples, size or self.num_samples):
            yield self.select(slice(first, first + (size or self.num_samples)))


@dataclass(frozen=True)
class Preview:
    """A preview of a training run, such as a picture of samples, to be written to a file."""

    suffix: str
    """File suffix, such as ".png"."""
    write: Callable[[Path], None]
    note: str = ""
    """Console line about a defect of the preview; empty without one."""


@dataclass(frozen=True)
class DataShare:
    """A data-parallel rank's share of the samples, and the all-gather that joins the shares."""

    device: torch.device
    rank: int = 0
    num_ranks: int = 1
    gather: Callable[[Tensor], Tensor] = lambda rows: rows
    """All-gather along dim 0, in rank order; every rank passes the same number of samples."""


@dataclass(frozen=True)
class Placement:
    """Where frozen modules of an objective go, and which ranks work on the same samples."""

    shard: Callable[[nn.Module, Sequence[nn.Module]], None]
    """Move a module to the device, sharded over the data ranks by itself and these submodules."""
    num_shards: int
    """Ranks over which it is sharded."""
    peers: Callable[[], DataShare]
    """Opens the ranks with the same samples, which can divide work on them: along pp, cp and tp.
    Collective."""

    @classmethod
    def alone(cls, device: torch.device) -> Placement:
        """One rank, which holds everything."""

        def move(module: nn.Module, _: Sequence[nn.Module]) -> None:
            module.to(device)

        return cls(move, 1, lambda: DataShare(device))


class Objective:
    """A training objective: maps a batch to inputs, targets and a loss per token.

    All randomness comes from the rng, a pure function of seed and sample number. `takes`,
    `prepare` and `loss` are required; the other members have defaults.
    """

    takes: ClassVar[tuple[str, ...]]
    """Fields of a sample that it reads."""
    token_targets: ClassVar[tuple[str, ...]] = ()
    """Targets with one value per token, in dim 1; they are sliced over cp."""
    constants: ClassVar[tuple[Callable[..., Any], ...]] = ()
    """Functions with constant results that torch.compile cannot trace (numpy): it calls them once
    and keeps the results. Their arguments are strings and numbers."""

    @abstractmethod
    def prepare(self, batch: Batch, rng: SampleRNG) -> Prepared:
        """Turn stored fields into inputs and targets; all random numbers come from `rng`."""
        raise NotImplementedError

    @abstractmethod
    def loss(
        self, predictions: Mapping[str, Tensor], targets: Mapping[str, Tensor]
    ) -> Float[Tensor, "b n"]:
        """Loss per token in fp32, not averaged: every layout then sums the same values."""
        raise NotImplementedError

    def terms(
        self, predictions: Mapping[str, Tensor], targets: Mapping[str, Tensor]
    ) -> dict[str, Float[Tensor, "b n"]]:
        """The terms whose sum is `loss`, by name."""
        return {"loss": self.loss(predictions, targets)}

    def validated_terms(
        self, losses: Float[Tensor, "b n"], targets: Mapping[str, Tensor]
    ) -> dict[str, Float[Tensor, "b n"]]:
        """Terms that validation shows beside the loss, by name, from the loss per token.

        Only the loss per token is known, so a term is the loss of a subset of the tokens.
        """
        return {}

    def drawn_specs(self) -> Sequence[ModelSpec]:
        """Specs of the network for input shapes that only sampling uses; () if none.

        Such as other caption lengths. Used with bucketed data only: an executor for each is built
        on first use.
        """
        return ()

    def describe(self, fields: Fields, rng: SampleRNG) -> Mapping[str, Tensor]:
        """Values per sample, [b] each, for faults.jsonl and `replay`.

        With empty `fields` (the fault log reads no data) return only the values drawn from `rng`.
        """
        return {}

    def inspect(self, fields: Fields) -> None:
        """Check stored fields, on the CPU in the loader's process; refuse them with UserError."""

    def evaluations(self, batch: Batch, rng: SampleRNG) -> Mapping[str, Prepared]:
        """Prepared batches to validate on, by name; the validation loss is their mean."""
        return {"": self.prepare(batch, rng)}

    def summary(self, losses: Mapping[str, float], facts: DataFacts) -> Mapping[str, float]:
        """Validation losses in other units, such as perplexity, by name.

        `losses`: name in `evaluations` -> mean loss. `facts`: facts of the validation set.
        """
        return {}

    def aligned(self, repa: RepaConfig) -> Objective:
        """This objective, which passes the features of [repa] on to the network.

        Raises UserError if the data has none that fit.
        """
        raise UserError(
            f"[repa] aligns networks of pictures, but {type(self).__name__} trains none. Leave "
            "[repa] out."
        )

    def open_text(self, text: TextConfig) -> None:
        """Load what [text] asks for, on the CPU. Raises UserError if it does not fit the data."""
        if text.mode != "cached":
            raise UserError(
                f'[text] mode="{text.mode}" is for captions, but {type(self).__name__} takes none. '
                "Leave it out."
            )

    def place_frozen(self, placement: Placement, flops_per_sample: int) -> Sequence[str]:
        """Place the modules that `collect` calls; return console lines. Collective.

        They have no gradients, and no checkpoint has them. `flops_per_sample`: of the network.
        """
        return ()

    def collect(self, batch: Batch) -> Batch:
        """Complete a batch by frozen modules, before `prepare` or `evaluations`. Collective.

        It is never compiled.
        """
        return batch

    def collected(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        """The fields of a batch after `collect`, from the data's fields."""
        return fields

    def readings(self) -> Mapping[str, float]:
        """Values for the next row of metrics, measured since the last one."""
        return {}

    def hints(self, source: Source) -> Sequence[str]:
        """Console warnings about data that is valid but looks wrong. Reads samples."""
        return ()

    def imported(self, sampling: SamplingConfig) -> Mapping[str, object]:
        """Further parts in use (a sampler), by config section; the console prints user files."""
        return {}

    def modules(self) -> nn.ModuleDict | None:
        """Trainable modules that `loss` calls; always the same ModuleDict.

        They are sharded, averaged, clipped and saved like the model's, as objective.NAME. Build
        them on the meta device in `ObjectiveConfig.build`; call them with positional tensors.
        """
        return None

    def initializers(self) -> dict[str, Initializer]:
        """Initial distributions of parameters and buffers of `modules`, by name.

        Missing names use the default of `Model.initializers`.
        """
        return {}

    def open_drawing(
        self, sampling: SamplingConfig, source: Source, on_first: OnFirst, folder: Path
    ) -> None:
        """Read or compute, once before training, what `preview` and [fid] take beside the network.

        Called on every rank, after `check_preview`. `folder`: the run directory, to read what
        `remember` has written.
        """

    def remember(self, folder: Path) -> None:
        """Write results that take long to compute to the run directory; on the first rank."""

    def check_preview(self, sampling: SamplingConfig, generation: GenerationConfig) -> None:
        """Raise UserError if `preview` cannot draw with the data, before training starts."""

    def preview(
        self,
        forward: Forward,
        sampling: SamplingConfig,
        generation: GenerationConfig,
        seed: int,
        share: DataShare,
    ) -> Preview:
        """Draw the preview, on every rank. Needs `ObjectiveConfig.previews`.

        [sampling] sets how often and how many; [generation] the settings of text.
        """
        raise NotImplementedError


def with_collect(
    objective: Objective, prepare: Callable[[Batch, SampleRNG], Prepared]
) -> Callable[[Batch, SampleRNG], Prepared]:
    """`prepare`, which may be compiled, after `Objective.collect`, which never is."""

    def collected(batch: Batch, rng: SampleRNG) -> Prepared:
        return prepare(objective.collect(batch), rng)

    return collected


def at_least_fp32(prediction: Tensor) -> Tensor:
    """Cast a tensor of any shape to the loss's dtype: fp32, or fp64 for fp64."""
    return prediction.to(torch.promote_types(prediction.dtype, torch.float32))


def missing_members(thing: object, protocol: type) -> str:
    """The members of a protocol, and of those that it extends, that a thing lacks, with commas."""
    kinds = [kind for kind in protocol.__mro__ if Protocol in kind.__bases__]
    wanted = {
        name: None
        for kind in kinds
        for name in (*vars(kind), *getattr(kind, "__annotations__", {}))
        if not name.startswith("_")
    }
    return ", ".join(name for name in wanted if not hasattr(thing, name))


def lacks(model: object, protocol: type) -> str:
    """Clause ": it has no a, b" of an error, for the members of `protocol` that `model` lacks.

    "" if none.
    """
    missing = missing_members(model, protocol)
    return f": it has no {missing}" if missing else ""
