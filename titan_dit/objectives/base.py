"""What an objective is given and what it gives back."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from titan_dit.config.section import Named, UserError, show
from titan_dit.config.training import SamplingConfig
from titan_dit.data.base import Batch, DataFacts, Field, Fields, Source
from titan_dit.models.base import ModelConfig, ModelSpec
from titan_dit.models.initializers import Initializer
from titan_dit.rng import SampleRNG

Forward: TypeAlias = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Tensor]
"""(inputs, static) -> prediction: `Executor.predict`, or the network itself."""


@dataclass(frozen=True)
class Prepared:
    """A batch with its random numbers drawn: ready for an executor."""

    inputs: Mapping[str, Tensor]
    """What the model's embed is given; batch first."""
    targets: Mapping[str, Tensor]
    """What the loss is given beside the predictions; batch first."""
    weight: Float[Tensor, "b *n"]
    """Of every sample, [b], or of every token, [b, n]."""
    total_tokens: float | Tensor | None
    """Weighted tokens of the step over all ranks: the loss is a sum divided by it. None, where one
    rank cannot know it: the executor adds up the weights of all."""
    static: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """What every part of the model is given; no batch dim."""
    context: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    """What every part of the model is given of each sample; batch first."""

    @property
    def side_inputs(self) -> dict[str, Tensor]:
        """What the parts of a model are given beside the stream."""
        return {**self.static, **self.context}

    @property
    def token_weight(self) -> Float[Tensor, "b _"]:
        """Of every token, [b, n], or of a sample's tokens, [b, 1]."""
        return self.weight if self.weight.ndim == 2 else self.weight[:, None]

    @property
    def num_samples(self) -> int:
        """Samples."""
        return self.weight.shape[0]

    def select(self, part: slice | Tensor) -> Prepared:
        """Some of the samples."""
        return replace(
            self,
            inputs={k: v[part] for k, v in self.inputs.items()},
            targets={k: v[part] for k, v in self.targets.items()},
            weight=self.weight[part],
            context={k: v[part] for k, v in self.context.items()},
        )

    def microbatches(self, size: int | None) -> Iterator[Prepared]:
        """Consecutive parts of at most `size` samples; None takes the whole."""
        for first in range(0, self.num_samples, size or self.num_samples):
            yield self.select(slice(first, first + (size or self.num_samples)))


@dataclass(frozen=True)
class Preview:
    """What a run shows of itself, drawn or written by its family."""

    suffix: str
    """Of the file, such as ".png"."""
    write: Callable[[Path], None]


@dataclass(frozen=True)
class DataShare:
    """Which part of some rows a rank works on, and how all ranks get all of them."""

    device: torch.device
    rank: int = 0
    num_ranks: int = 1
    gather: Callable[[Tensor], Tensor] = lambda rows: rows
    """Every rank's rows (equally many), in the order of ranks, on every rank."""


class Objective:
    """What is learned: a batch to inputs, targets and a loss per token.

    All randomness comes from the rng, a pure function of seed and sample number. Every objective
    has `takes`, `prepare` and `loss`; the other members do nothing unless they are overridden.
    """

    takes: ClassVar[tuple[str, ...]]
    """The fields of a sample that it reads."""
    token_targets: ClassVar[tuple[str, ...]] = ()
    """The targets that hold a value for every token, in dim 1."""

    @abstractmethod
    def prepare(self, batch: Batch, rng: SampleRNG) -> Prepared:
        """Fields to inputs and targets: units, tokens, draws."""
        raise NotImplementedError

    @abstractmethod
    def loss(
        self, predictions: Mapping[str, Tensor], targets: Mapping[str, Tensor]
    ) -> Float[Tensor, "b n"]:
        """One fp32 value per token, so that any slicing of the tokens gives the same sum."""
        raise NotImplementedError

    def terms(
        self, predictions: Mapping[str, Tensor], targets: Mapping[str, Tensor]
    ) -> dict[str, Float[Tensor, "b n"]]:
        """The parts that `loss` is the sum of, by name."""
        return {"loss": self.loss(predictions, targets)}

    def describe(self, fields: Fields, rng: SampleRNG) -> Mapping[str, Tensor]:
        """What faults.jsonl and `replay` show of every sample, [b] each.

        Of what is drawn, by the rng; of what is stored, as far as there are `fields`: the fault log
        reads no data.
        """
        return {}

    def inspect(self, fields: Fields) -> None:
        """Look at what was read, on the CPU, in the process that read it; UserError refuses it."""

    def evaluations(self, batch: Batch, rng: SampleRNG) -> Mapping[str, Prepared]:
        """What validation takes the loss of, by name; the mean over all is the validation loss."""
        return {"": self.prepare(batch, rng)}

    def hints(self, source: Source) -> Sequence[str]:
        """Lines about data that can be trained on, but hardly as it was meant. Reads samples."""
        return ()

    def imported(self, sampling: SamplingConfig) -> Mapping[str, object]:
        """What else was imported for it, by section: the console says from which file."""
        return {}

    def modules(self) -> nn.ModuleDict | None:
        """Modules with parameters that `loss` calls; always the same ones.

        They are sharded, averaged, clipped and saved as the model's, as objective.NAME. Built on
        the meta device, inside `ObjectiveConfig.build`; called as modules, with tensors as
        positional arguments.
        """
        return None

    def initializers(self) -> dict[str, Initializer]:
        """The initial distribution of parameters and buffers of `modules`, by their names there.

        Those that are not named have the default of `Model.initializers`.
        """
        return {}

    @abstractmethod
    def preview(
        self, forward: Forward, sampling: SamplingConfig, seed: int, share: DataShare
    ) -> Preview:
        """What [sampling] asks for. Every rank calls; `previews` says whether there is any."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(Named):
    """The [objective] section.

    One that needs to know neither model nor data can be the objective itself:
    `class NextToken(ObjectiveConfig, Objective)`.
    """

    section = "objective"
    previews: ClassVar[bool] = False
    """Whether it has anything to show."""

    def model_spec(self, model: ModelConfig) -> ModelSpec:
        """The network that the objective wants of a model; UserError where they do not fit."""
        return model.spec()

    def facts(self, values: Mapping[str, Any]) -> DataFacts:
        """The facts of a dataset, from a checkpoint's record."""
        return DataFacts.from_json(values)

    def example(self, model: ModelConfig) -> tuple[DataFacts, Mapping[str, Field]] | None:
        """Facts and fields of data that would fit the model: a dry run then needs no data.

        None: they are not known without it.
        """
        return None

    def build(self, model: ModelConfig, facts: DataFacts) -> Objective:
        """The objective for a model and a dataset; UserError where they do not fit."""
        if not isinstance(self, Objective):
            raise UserError(
                f"[objective] name={show(self.name)}: {type(self).__name__} has no build(model, "
                "facts), and is no titan_dit.objectives.base.Objective itself. Derive it from that "
                "class too, or give it a build."
            )
        return self

    def check_sampling(self, model: ModelConfig, sampling: SamplingConfig) -> None:
        """Refuse what [sampling] asks for and cannot be had."""
        if sampling.every and not self.previews:
            raise UserError(
                f"[sampling] every={sampling.every}: the objective {self.name} has nothing to "
                "show. Set every = 0."
            )


def at_least_fp32(prediction: Tensor) -> Tensor:
    """A prediction in the format that its loss is taken in."""
    return prediction.to(torch.promote_types(prediction.dtype, torch.float32))
