"""Interfaces of a dataset: random access to samples of named tensors, and its metadata."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from titan_dit.config import schema
from titan_dit.config.schema import Maybe
from titan_dit.config.section import UserError, hints_of

# Classes of users import it from this module (docs/extending.md).
from titan_dit.data.sections import DataConfig as DataConfig

Fields: TypeAlias = Mapping[str, Tensor]
"""Tensors of a batch by name, batch dim first, in the stored dtype."""

Facts = TypeVar("Facts", bound="DataFacts")
T = TypeVar("T", bound="Source")


@dataclass(frozen=True)
class Field:
    """Dtype and shape of one tensor of a sample."""

    dtype: torch.dtype
    shape: tuple[int | None, ...]
    """Shape without the batch dim; None for a dim that differs between samples."""

    def __str__(self) -> str:
        """Format for messages: "float32 [4, 32, 32]"."""
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


@dataclass(frozen=True)
class Batch:
    """One data-parallel rank's samples of a step on its device, in stored units."""

    fields: Fields
    sample_numbers: Int64[Tensor, " b"]
    """Position of each sample in the infinite stream; with the seed, it determines the noise."""
    weight: Float[Tensor, " b"]
    """1 for a sample, 0 for padding."""
    total_weight: float
    """Sum of the step's weights over all data-parallel ranks."""
    step: int = 0
    """The optimizer step that takes it, from 1; 0 for none."""

    @property
    def is_trained(self) -> bool:
        """True if an optimizer step takes it: it is not validated on."""
        return self.step > 0

    def to(self, device: torch.device) -> Batch:
        """Copy the batch to a device; asynchronous from pinned memory."""
        moved = {k: v.to(device, non_blocking=True) for k, v in self.fields.items()}
        return replace(
            self,
            fields=moved,
            sample_numbers=self.sample_numbers.to(device, non_blocking=True),
            weight=self.weight.to(device, non_blocking=True),
        )


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """Metadata of a dataset, stored in checkpoints; objectives may require a subclass."""

    differing: ClassVar[frozenset[str]] = frozenset({"count", "digest"})
    """Fields that may differ between the training set and a validation set."""

    count: int
    digest: str = ""
    """Identifier of the dataset's contents, independent of its path."""

    @property
    def about(self) -> str:
        """Console text shown after the number of samples."""
        return ""

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls: type[Facts], values: Mapping[str, Any]) -> Facts:
        """Inverse of `as_json`; unknown keys are ignored. Raises UserError for a wrong type."""
        hints = hints_of(cls)
        required = {f.name for f in fields(cls) if f.default is MISSING}
        known = {key: hint if key in required else Maybe(hint) for key, hint in hints.items()}
        schema.check(values, known, "[checkpoint] its data:")
        return cls(**{key: values[key] for key in hints if key in values})


@runtime_checkable
class SampleOrder(Protocol):
    """Map from sample numbers to dataset rows, without state."""

    @property
    def num_rows(self) -> int:
        """Samples of an epoch."""

    def rows(self, sample_numbers: Sequence[int]) -> list[int]:
        """Map sample numbers, in any order, to rows."""


class Source:
    """Random access to stored samples; several processes read it at once.

    A dataset sets `fields` and `facts` and implements `__getitem__`. Override `read` if a batch
    can be read faster than sample by sample.
    """

    fields: Mapping[str, Field]
    facts: DataFacts
    copies: int = 1
    """Neighbouring rows made of one picture: 2 with its mirror image. They are held out
    together."""
    text_multiple: int = 0
    """Captions of a bucket are padded to a multiple of so many tokens; 0: all to one length."""
    keeps_groups: bool = False
    """True if a picture of every group stays in training: a group that is a bucket."""
    held_out_by_size: bool = False
    """True if larger groups give more held-out rows; False: all give equally many."""

    def __len__(self) -> int:
        """Number of samples."""
        return self.facts.count

    def checked_rows(self, rows: Sequence[int]) -> Int64[np.ndarray, " b"]:
        """The numbers of rows as an array. Raises IndexError for one that is not there."""
        at = np.asarray(rows, dtype=np.int64)
        outside = at[(at < 0) | (at >= len(self))]
        if len(outside):
            raise IndexError(f"sample {outside[0]} of {len(self)}")
        return at

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return row `index`, one tensor per field; deterministic."""
        raise NotImplementedError

    def read(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Return the stacked samples of `rows`, in order; the caller may modify the tensors."""
        samples = [self[row] for row in rows]
        return {name: torch.stack([sample[name] for sample in samples]) for name in self.fields}

    def read_numbered(self, rows: Sequence[int], numbers: Sequence[int]) -> dict[str, Tensor]:
        """`read` for samples of these numbers, by which a source may draw one of several captions.

        The same number draws the same one.
        """
        return self.read(rows)

    def read_fields(self, names: Sequence[str], rows: Sequence[int]) -> dict[str, Tensor]:
        """Some fields of `rows`, for the captions of previews and scores.

        Override it to read no others, and for rows of several buckets.
        """
        found = self.read(rows)
        return {name: found[name] for name in names}

    def as_ids(self: T) -> T:
        """This source, with the captions as the field `text_ids` in place of their embeddings.

        For [text] mode = "online". Raises UserError if it has none.
        """
        raise UserError(
            '[text] mode="online": [data] holds no token ids of captions. Store them: '
            "`python -m titan_dit data encode --text-encoder DIR --text-dtype none`."
        )

    def with_features(self: T) -> T:
        """This source, with the field `features` of its pictures, for [repa].

        Raises UserError if it has none.
        """
        raise UserError(
            "[repa] block is set, but [data] holds no features of its pictures. Store them: "
            "`python -m titan_dit data encode --features MODULE:FUNCTION`."
        )

    def as_clips(self: T) -> T:
        """This source, with pictures [c, h, w] as clips of one frame, [c, 1, h, w].

        For a network of clips. Override it for a source that may hold pictures.
        """
        return self

    def captions(self, rows: Sequence[int]) -> list[str]:
        """The text of the caption that `read` gives of each row; empty if texts are not stored."""
        return []

    def in_text_groups(self, multiple: int) -> Source:
        """The source with buckets of one length of text, see `text_multiple`.

        Override it if the lengths are known before rows are read; else all have the longest one.
        """
        return self

    def check_holds(self, names: Collection[str]) -> None:
        """Raise UserError if some rows lack one of these fields, and hold another in its place."""

    def row_name(self, row: int) -> str:
        """Name of a row for messages, by its number in the stored set, as in `data report`."""
        return f"row {row}"

    @property
    def bucket_rows(self) -> Sequence[range]:
        """The rows of each bucket, one after another; one if all samples have the same shape."""
        return (range(len(self)),)

    @property
    def bucket_names(self) -> Sequence[str]:
        """A name for each bucket, such as its shape."""
        return ("",)

    def bucket_fields(self, bucket: int) -> Mapping[str, Field]:
        """Dtypes and shapes of the samples of one bucket."""
        return self.fields

    def lines(self, order: SampleOrder) -> Iterator[str]:
        """Console lines about what the source is made of, given the order of training."""
        yield from ()

    def groups(self) -> Int64[Tensor, " n"] | None:
        """Return the group (class) of every row, to stratify validation; None without groups."""
        return None

    def group_parts(self) -> Iterator[Int64[Tensor, " n"]]:
        """Yield `groups()` in order, in parts; override it if the whole is too large for memory."""
        groups = self.groups()
        yield from () if groups is None else torch.split(groups, 1 << 16)

    def order(
        self,
        seed: int,
        held_out: tuple[int, ...],
        data_order: str,
        batch_sizes: Sequence[int] = (),
    ) -> SampleOrder:
        """Return the order of training, without the `held_out` rows.

        `batch_sizes`: samples of a step, by bucket. They do not change an order of one bucket.
        """
        # Here: the interface needs no numpy, and benchmarks/gpu.py has none.
        from titan_dit.data.order import EpochOrder

        return EpochOrder.of(seed, len(self), held_out, data_order)


class BadSampleError(UserError):
    """A bad stored value. It ends the run: unlike a failed read, no restart changes it."""
