"""What a dataset is: random access to clean samples, and a few facts about them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from titan_dit.section import Section, UserError, Whole


@dataclass(frozen=True)
class Sample:
    """One clean sample in the units that the model is trained on."""

    latent: Float[Tensor, "c h w"]
    label: int


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What a checkpoint keeps of its dataset, so that sampling needs no data."""

    shape: tuple[int, int, int]
    """[c, h, w] of every sample."""
    count: int
    num_classes: int
    scale: float = 1.0
    shift: float = 0.0
    """The model sees (stored - shift) * scale."""
    value_range: tuple[float, float] | None = None
    """Lowest and highest stored value where they mean black and white; None for latents."""
    digest: str = ""
    """Tells this dataset from any other, wherever it lies."""

    def to_stored_units(self, samples: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        """Undo scale and shift; values are held to the `value_range`, if the data has one."""
        stored = samples / self.scale + self.shift
        return stored if self.value_range is None else stored.clamp(*self.value_range)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> DataFacts:
        """The inverse of `as_json`."""
        value_range = values.get("value_range")
        return cls(
            **values
            | {"shape": tuple(values["shape"])}
            | {"value_range": tuple(value_range) if value_range else None}
        )


@runtime_checkable
class Source(Protocol):
    """Random access to clean samples; read from several processes."""

    facts: DataFacts

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def __getitem__(self, index: int) -> Sample:
        """Sample number `index`; always the same one."""
        ...


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """The keys that every dataset has."""

    section = "data"

    workers: Whole = 0
    """Processes per rank that read ahead; 0 reads in the training process."""

    @property
    def name(self) -> str:
        """The name in the catalog."""
        raise NotImplementedError

    def open(self) -> Source:
        """Open the dataset; raises UserError where files are missing or damaged."""
        raise NotImplementedError


def check_fits(facts: DataFacts, shape: tuple[int, int, int], num_classes: int) -> None:
    """Refuse a dataset whose samples or labels the model cannot take."""
    if facts.shape != shape:
        c, h, w = facts.shape
        fix = f"Set channels = {c}, latent_size = {h}." if h == w else "Latents must be square."
        raise UserError(
            f"[model] channels={shape[0]} and latent_size={shape[1]} make samples of "
            f"{list(shape)}, but [data] holds {list(facts.shape)}. {fix}"
        )
    if facts.num_classes > num_classes:
        raise UserError(
            f"[model] num_classes={num_classes} is less than the {facts.num_classes} classes of "
            f"[data]. Set num_classes = {facts.num_classes}."
        )
