"""What a dataset is: random access to clean samples, and a few facts about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from titan_dit.section import Section, UserError, Whole


@dataclass(frozen=True)
class Sample:
    """One clean sample in the units and the dtype that it is stored in."""

    latent: Shaped[Tensor, "c h w"]
    label: int


@dataclass(frozen=True)
class Samples:
    """Several, stacked."""

    latents: Shaped[Tensor, "b c h w"]
    labels: Int64[Tensor, " b"]


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What a checkpoint keeps of its dataset, so that sampling needs no data."""

    shape: tuple[int, int, int]
    """[c, h, w] of every stored sample; [2c, h, w] where it is a mean and a std."""
    count: int
    num_classes: int
    class_names: tuple[str, ...] = ()
    """In the order of the labels, where the classes have names."""
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
            | {"class_names": tuple(values.get("class_names", ()))}
        )


class Source:
    """Random access to clean samples, in stored units; read from several processes.

    A dataset sets `facts` and has `__getitem__`; `read` is there to be overridden where many
    samples can be had faster than one by one.
    """

    facts: DataFacts

    def __len__(self) -> int:
        """Number of samples."""
        return self.facts.count

    def __getitem__(self, index: int) -> Sample:
        """Sample number `index`; always the same one."""
        raise NotImplementedError

    def read(self, rows: Sequence[int]) -> Samples:
        """The samples of these rows, in this order; what it returns is the caller's own."""
        samples = [self[row] for row in rows]
        return Samples(
            torch.stack([sample.latent for sample in samples]),
            torch.tensor([sample.label for sample in samples]),
        )


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
    """Refuse a dataset whose samples or labels are not those of the model.

    Twice the model's channels are a mean and a std of each.
    """
    if facts.shape not in (shape, (2 * shape[0], *shape[1:])):
        c, h, w = facts.shape
        fix = f"Set channels = {c}, latent_size = {h}." if h == w else "Latents must be square."
        raise UserError(
            f"[model] channels={shape[0]} and latent_size={shape[1]} make samples of "
            f"{list(shape)}, but [data] holds {list(facts.shape)}. {fix}"
        )
    if facts.num_classes != num_classes:
        relation = "less" if num_classes < facts.num_classes else "more"
        fix = f"Set num_classes = {facts.num_classes}."
        if num_classes > facts.num_classes:
            names = " --classes FILE" if facts.class_names else ""
            fix += (
                " If the data is a part of a larger set, pack it with "
                f"`python -m titan_dit data pack --num-classes {num_classes}{names}`."
            )
        raise UserError(
            f"[model] num_classes={num_classes} is {relation} than the {facts.num_classes} classes "
            f"of [data]. {fix}"
        )
