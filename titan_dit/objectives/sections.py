"""The [objective] sections: what every objective has, and the objectives of text.

Nothing here imports torch when it is imported, so that `--help` is quick.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from titan_dit.config.section import Bound, Named, NonNegativeInt, UserError, show
from titan_dit.config.training import FIDConfig, SamplingConfig, TextConfig

if TYPE_CHECKING:
    from titan_dit.data.base import DataFacts, Field
    from titan_dit.data.sections import DataConfig
    from titan_dit.models.base import ModelConfig, ModelSpec
    from titan_dit.objectives.base import Objective
    from titan_dit.objectives.masked_token import MaskedToken
    from titan_dit.objectives.next_token import NextToken


@dataclass(frozen=True, kw_only=True)
class FrozenWork:
    """Modules without gradients that run before each step, such as a text encoder.

    They are sharded over the data ranks; all ranks share the samples. All values are 0 without such
    modules.
    """

    parameters: int = 0
    element_bytes: int = 4
    flops: int = 0
    """FLOPs of a sample's forward."""
    tokens: int = 1
    """Tokens of a sample in the products."""
    width: int = 1
    """Channels of a token."""

    def bytes_on(self, data_ranks: int) -> float:
        """Bytes of the parameters on a rank."""
        return self.parameters * self.element_bytes / data_ranks


NO_FROZEN = FrozenWork()


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(Named):
    """The [objective] section.

    A section that needs neither model nor data to build can be the objective itself:
    `class NextToken(ObjectiveConfig, Objective)`.
    """

    section = "objective"
    previews: ClassVar[bool] = False
    """True if the objective has a `preview`."""

    def model_spec(self, model: ModelConfig) -> ModelSpec:
        """The model's spec with the outputs that the objective needs; UserError on a misfit."""
        return model.spec()

    def token_grid(self, model: ModelConfig) -> tuple[int, int]:
        """Rows and columns of a picture's tokens, for [repa]. Raises UserError if it has none."""
        raise UserError(
            f"[repa] aligns networks of pictures, but [objective] name={show(self.name)} trains "
            "none. Leave [repa] out."
        )

    def facts(self, values: Mapping[str, Any]) -> DataFacts:
        """Facts of a dataset, from a checkpoint's record."""
        from titan_dit.data.base import DataFacts

        return DataFacts.from_json(values)

    def example(self, model: ModelConfig) -> tuple[DataFacts, Mapping[str, Field]] | None:
        """Facts and fields of data that fit the model, so that a dry run opens no data.

        None if they depend on the data.
        """
        return None

    def text_multiple(self, model: ModelConfig) -> int:
        """Captions of a bucket are padded to a multiple of so many tokens; 0: all to one length.

        See `data.base.Source`.
        """
        return 0

    def settled_model(self, model: ModelConfig, data: DataConfig) -> ModelConfig:
        """The model, with keys that are not set taken from data that is there.

        Raises UserError if there is none.
        """
        return model

    def takes_clips(self, model: ModelConfig) -> bool:
        """True if samples are clips: pictures of the data are clips of one frame then."""
        return False

    def sized_models(
        self, model: ModelConfig, facts: DataFacts
    ) -> Sequence[tuple[str, ModelConfig]]:
        """(name, the model for its samples) of each bucket of the data; () if all have one shape.

        Raises UserError if the model has no other sizes.
        """
        return ()

    def build(self, model: ModelConfig, facts: DataFacts) -> Objective:
        """Build the objective for a model and a dataset; UserError if they do not fit."""
        from titan_dit.objectives.base import Objective

        if not isinstance(self, Objective):
            raise UserError(
                f"[objective] name={show(self.name)}: {type(self).__name__} has no build(model, "
                "facts) and is not a titan_dit.objectives.base.Objective. Define build, or derive "
                "from Objective too."
            )
        return self

    def frozen_work(self, model: ModelConfig, text: TextConfig, data: DataConfig) -> FrozenWork:
        """The frozen modules of a run, for plans; as far as files tell that are there."""
        return NO_FROZEN

    def check_evaluation(
        self, model: ModelConfig, sampling: SamplingConfig, evaluation: FIDConfig
    ) -> None:
        """Raise UserError if [fid] cannot work."""
        if evaluation.every:
            raise UserError(
                f"[fid] every={evaluation.every}: the objective {self.name} draws no "
                "pictures. Set every = 0."
            )

    def check_sampling(self, model: ModelConfig, sampling: SamplingConfig) -> None:
        """Raise UserError if the [sampling] settings cannot work."""
        if sampling.every and not self.previews:
            raise UserError(
                f"[sampling] every={sampling.every}: the objective {self.name} has no preview. "
                "Set every = 0."
            )


@dataclass(frozen=True, kw_only=True)
class NextTokenConfig(ObjectiveConfig):
    """Next-token prediction: the cross entropy of every token after the first of a window."""

    name = "next_token"
    previews = True

    mask_end_of_document: bool = False
    """Do not train to predict the token after the end of a document."""

    def model_spec(self, model: ModelConfig) -> ModelSpec:
        """The model's spec; its head must return `cross_entropy`."""
        from titan_dit.objectives import next_token

        return next_token.causal(model).spec()

    def facts(self, values: Mapping[str, Any]) -> DataFacts:
        """Facts of token windows, from a checkpoint's record."""
        from titan_dit.data.token_windows import TokenFacts

        return TokenFacts.from_json(values)

    def example(self, model: ModelConfig) -> tuple[DataFacts, Mapping[str, Field]]:
        """Facts and fields of windows with the model's own sizes."""
        from titan_dit.objectives import next_token

        return next_token.example(model)

    def build(self, model: ModelConfig, facts: DataFacts) -> NextToken:
        """Build the objective; UserError if the data do not fit the model."""
        from titan_dit.objectives import next_token

        return next_token.build(self, model, facts)


@dataclass(frozen=True, kw_only=True)
class MaskedTokenConfig(ObjectiveConfig):
    """BERT's objective: predict masked tokens; the defaults are BERT's."""

    name = "masked_token"

    sentence_order: bool = False
    """Second task: are the two spans of a sample in order, or swapped? Needs pairs of spans,
    [data] name = "sentence_pairs"; without it windows, [data] name = "tokens"."""
    mask_share: Annotated[float, Bound(above=0, below=1)] = 0.15
    """Share of a sample's tokens that are predicted. 80% of them are replaced by [MASK], 10% by a
    random token, 10% stay."""
    mask_id: NonNegativeInt | None = None
    """Id of [MASK]. Unset: the data's, else the first id that the data does not use."""

    def model_spec(self, model: ModelConfig) -> ModelSpec:
        """The model's spec, with the heads of the tasks."""
        from titan_dit.objectives import masked_token

        return masked_token.model_spec(self, model)

    def facts(self, values: Mapping[str, Any]) -> DataFacts:
        """Facts of pairs or of token windows, from a checkpoint's record."""
        from titan_dit.data.sentence_pairs import PairFacts
        from titan_dit.data.token_windows import TokenFacts

        kind = PairFacts if self.sentence_order else TokenFacts
        return kind.from_json(values)

    def example(self, model: ModelConfig) -> tuple[DataFacts, Mapping[str, Field]]:
        """Facts and fields of samples with the model's own sizes."""
        from titan_dit.objectives import masked_token

        return masked_token.example(self, model)

    def build(self, model: ModelConfig, facts: DataFacts) -> MaskedToken:
        """Build the objective; UserError if the data do not fit the model."""
        from titan_dit.objectives import masked_token

        return masked_token.build(self, model, facts)
