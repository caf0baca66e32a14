"""Metadata of a dataset of labelled latents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from titan_dit.data.base import DataFacts, Field


@dataclass(frozen=True, kw_only=True)
class LatentFacts(DataFacts):
    """Shape, units and classes; stored in checkpoints, so sampling does not open the dataset."""

    differing: ClassVar[frozenset[str]] = DataFacts.differing | {"class_names"}

    shape: tuple[int, int, int]
    """[c, h, w] of every stored sample; [2c, h, w] for a mean and a std."""
    num_classes: int
    class_names: tuple[str, ...] = ()
    """In label order; empty if the classes have no names."""
    scale: float = 1.0
    shift: float = 0.0
    """The model sees (stored - shift) * scale."""
    value_range: tuple[float, float] | None = None
    """Stored values of black and white; None for latents."""

    @property
    def about(self) -> str:
        """Number of classes, for the console."""
        return f"{self.num_classes} classes"

    def to_stored_units(self, samples: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        """Undo scale and shift, and clamp to `value_range` if there is one."""
        stored = samples / self.scale + self.shift
        return stored if self.value_range is None else stored.clamp(*self.value_range)

    def fields(self, dtype: torch.dtype) -> dict[str, Field]:
        """Fields of a sample: `latent` in its stored dtype, and `label`."""
        return {"latent": Field(dtype, self.shape), "label": Field(torch.int64, ())}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LatentFacts:
        """Inverse of `as_json`."""
        value_range = values.get("value_range")
        return cls(
            **dict(values)
            | {"shape": tuple(values["shape"])}
            | {"value_range": tuple(value_range) if value_range else None}
            | {"class_names": tuple(values.get("class_names", ()))}
        )
