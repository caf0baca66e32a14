"""What a dataset is: random access to samples of named tensors, and a few facts about them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from titan_dit.config.section import Named, NonNegativeInt

Fields: TypeAlias = Mapping[str, Tensor]
"""Tensors of several samples by name, batch first, in the dtype that they are stored in."""


@dataclass(frozen=True)
class Field:
    """What a source says of one tensor of a sample."""

    dtype: torch.dtype
    shape: tuple[int | None, ...]
    """Without the batch dim; None where it differs from sample to sample."""

    def __str__(self) -> str:
        """As messages name it: "float32 [4, 32, 32]"."""
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


@dataclass(frozen=True)
class Batch:
    """The samples of one data-parallel rank in a step, as they are stored, on its device."""

    fields: Fields
    sample_numbers: Int64[Tensor, " b"]
    """Position of each sample in the infinite stream: what its random numbers are drawn from."""
    weight: Float[Tensor, " b"]
    """1, or 0 for a row that only fills up the batch."""
    total_weight: float
    """Sum of the weights of the step over all data-parallel ranks."""

    def to(self, device: torch.device) -> Batch:
        """The batch on a device; from pinned memory the copy does not block the host."""
        moved = {k: v.to(device, non_blocking=True) for k, v in self.fields.items()}
        return replace(
            self,
            fields=moved,
            sample_numbers=self.sample_numbers.to(device, non_blocking=True),
            weight=self.weight.to(device, non_blocking=True),
        )


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What a checkpoint keeps of its dataset; a family of objectives may need more than this."""

    count: int
    digest: str = ""
    """Tells this dataset from any other, wherever it lies."""

    @property
    def about(self) -> str:
        """What the console says of it beside the count."""
        return ""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> DataFacts:
        """The inverse of `as_json`; keys of other kinds of facts are left out."""
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})


class Source:
    """Random access to samples as they are stored; read from several processes.

    A dataset sets `fields` and `facts` and has `__getitem__`; `read` is there to be overridden
    where many samples can be had faster than one by one.
    """

    fields: Mapping[str, Field]
    facts: DataFacts

    def __len__(self) -> int:
        """Number of samples."""
        return self.facts.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Sample number `index`, a tensor for every field; always the same one."""
        raise NotImplementedError

    def read(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """The samples of these rows, in this order, stacked; what it returns is the caller's."""
        samples = [self[row] for row in rows]
        return {name: torch.stack([sample[name] for sample in samples]) for name in self.fields}

    def groups(self) -> Int64[Tensor, " n"] | None:
        """The group (class) of every row, over which validation is spread; None: they have none."""
        return None


@dataclass(frozen=True, kw_only=True)
class DataConfig(Named):
    """The keys that every dataset has."""

    section = "data"

    workers: NonNegativeInt = 0
    """Processes per rank that read ahead; 0 reads in the training process."""

    @abstractmethod
    def open(self) -> Source:
        """Open the dataset; raises UserError where files are missing or damaged."""
        raise NotImplementedError
