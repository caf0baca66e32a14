"""A network's weights in a checkpoint: an average or the last step's, with adapters merged.

Quantised weights ([lora] base) are decoded, and encoded for a network that holds them so: one
weight at a time, of which a rank decodes its shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from titan_dit.checkpoint import checkpoint
from titan_dit.checkpoint.averages import averages_in
from titan_dit.checkpoint.store import Location
from titan_dit.config.section import UserError
from titan_dit.config.training import LoRAConfig
from titan_dit.models import lora, quantized
from titan_dit.models.quantized import WeightCodes
from titan_dit.ranks.process_group import Ranks
from titan_dit.ranks.shards import as_shard, local

CPU = torch.device("cpu")


class Weights:
    """The network's parameters in a checkpoint, by name.

    A parameter that is missing in the chosen average was frozen: its only value is loaded. A weight
    with a LoRA adapter is loaded merged, unless its A is loaded, too.
    """

    def __init__(
        self, path: Location, record: Mapping[str, Any], wanted: str, decay: float | None = None
    ) -> None:
        """`wanted`: "ema" or "model". `decay` selects the average; None: the first.

        Without any average, "ema" is "model". UserError if there is none of this decay.
        """
        self.path, self.record = path, record
        names = averages_in(record)
        if decay is not None and wanted != "ema":
            raise UserError(
                f"--decay {decay} names an average, but --weights is {wanted}. Leave one of them "
                "out."
            )
        if decay is not None and str(decay) not in names:
            raise UserError(
                f"--decay {decay}: {path} has {', '.join(names) or 'no EMA'}. Give one that it "
                "has, or leave it out."
            )
        self.reader = checkpoint.open_reader(path)
        self.contents = checkpoint.contents(self.reader)
        kept = [n for n in names if any(k.startswith(f"ema.{n}.") for k in self.contents)]
        chosen = str(decay) if decay is not None else next(iter(kept), "")
        self.average = chosen if wanted == "ema" else ""
        self.what = f"ema {self.average}" if self.average else "model"
        """Label of the weights: "ema 0.9999" or "model"."""

    @cached_property
    def keys(self) -> dict[str, str]:
        """Name of every saved parameter -> its key in the checkpoint."""
        found: dict[str, str] = {}
        for prefix in ("model.", f"ema.{self.average}."):
            own = (key for key in self.contents if key.startswith(prefix))
            found |= {key.removeprefix(prefix): key for key in own}
        return found

    @property
    def names(self) -> set[str]:
        """Names of the parameters of the network, without adapters."""
        own = (name for name in self.keys if not name.startswith(checkpoint.OWN))
        return {name for name in own if not lora.is_adapter(name)}

    @cached_property
    def adapters(self) -> dict[str, tuple[str, str]]:
        """Name of a weight -> names of its adapter's A and B.

        Raises UserError for an adapter without its weight.
        """
        found = {weight: (a, b) for weight, a, b in lora.pairs(self.keys)}
        if lost := [weight for weight in found if weight not in self.keys]:
            raise UserError(
                f"{self.path} has an adapter of {lost[0]}, which is no weight of its own: it "
                "cannot be merged. Give another checkpoint."
            )
        return found

    @property
    def scale(self) -> float:
        """Scale of the adapters, alpha / rank."""
        return self.lora.scale

    @property
    def lora(self) -> LoRAConfig:
        """Rank, scale and base of the run's [lora]."""
        return LoRAConfig.of_table(self.record["config"].get("lora", {}))

    @cached_property
    def quantized(self) -> frozenset[str]:
        """Names of the parameters that are saved as bytes, see `models.quantized`.

        Raises UserError if there are any although [lora] base is full.
        """
        found = {n for n, key in self.keys.items() if self.contents[key][1] == torch.uint8}
        if found and self.lora.base == "full":
            raise UserError(
                f"{self.path} holds {min(found)} as bytes, but its [lora] base is full: it is "
                "damaged. Give another checkpoint."
            )
        return frozenset(found)

    def codes(self, device: torch.device) -> WeightCodes:
        """The format of the `quantized` parameters."""
        codes = quantized.weight_codes(self.lora.base, device)
        assert codes is not None
        return codes

    def shape(self, name: str) -> torch.Size:
        """The shape of a parameter; of a quantised one, when decoded.

        Raises UserError for damaged codes.
        """
        held = self.contents[self.keys[name]][0]
        if name not in self.quantized:
            return held
        try:
            return self.codes(CPU).shape_of(held)
        except ValueError as error:
            raise UserError(f"{self.path}: {name}: {error} Give another checkpoint.") from None

    def whole(self, name: str) -> Tensor:
        """A parameter as it was saved: unsharded, without its adapter, decoded."""
        tensor = torch.empty(self.shape(name))
        self._read_saved(name, tensor)
        return tensor

    def _read_saved(self, name: str, target: Tensor | None) -> None:
        """Read a parameter into a target of any float format, decoded. None reads nothing."""
        if target is None:
            checkpoint.read_into({}, self.reader)
        elif name not in self.quantized:
            checkpoint.read_into({self.keys[name]: target}, self.reader)
        else:
            held = like(target, self.contents[self.keys[name]][0], torch.uint8)
            checkpoint.read_into({self.keys[name]: held}, self.reader)
            own = local(held)
            local(target).copy_(self.codes(own.device).decode(own))

    def load(
        self, tensors: Mapping[str, Tensor], read: Callable[[int], None] = checkpoint.ignore
    ) -> None:
        """`verify`, then `read`. Collective. Raises UserError, with `tensors` unchanged."""
        self.verify(tensors, read)
        self.read(tensors)

    def verify(
        self, tensors: Mapping[str, Tensor], read: Callable[[int], None] = checkpoint.ignore
    ) -> None:
        """Raise UserError unless the files are whole and have tensors of these names and shapes.

        `read` gets the bytes that were read. Collective.
        """
        files = checkpoint.verify(self.path, read=read)["files"]
        if files != self.reader.files:  # A run has written this step once more.
            self.reader = checkpoint.open_reader(self.path)
        keys = {n: self.keys.get(n, f"model.{n}") for n in tensors}
        fitting = {
            keys[n]: torch.empty(self.contents[keys[n]][0], device="meta")
            for n, tensor in tensors.items()
            if n in self.quantized and self.shape(n) == tensor.shape
        }
        checkpoint.check_fits(self.path, {keys[n]: t for n, t in tensors.items()} | fitting)

    @torch.no_grad()
    def read(
        self, tensors: Mapping[str, Tensor], into: WeightCodes | None = None
    ) -> dict[str, Error]:
        """Read into whole or sharded tensors in place. Collective; names may differ by rank.

        `into`: the format of targets that are bytes; equal on all ranks. Returns their rounding on
        this rank, by name.
        """
        ones = self._read_alone(tensors, into)
        self._read_all({n: t for n, t in tensors.items() if n not in ones})
        found = {}
        for name in ones:
            target = tensors.get(name)
            if target is None or target.is_floating_point():
                self._read_one(name, target)
                continue
            assert into is not None
            shape = into.shape_of(target.shape)
            values = like(target, shape, torch.float32)
            self._read_one(name, values)
            found[name] = encode_into(local(target), local(values), into)
        return found

    def _read_alone(self, tensors: Mapping[str, Tensor], into: WeightCodes | None) -> list[str]:
        """Names to be read one at a time, in one order on all ranks.

        Those that only other ranks have are among them: reading is collective. None if the targets
        are this checkpoint's bytes.
        """
        if not (into or self.quantized):
            return []
        ranks = Ranks()
        own = any(not tensor.is_floating_point() for tensor in tensors.values())
        if not into and any(ranks.gather(own)):
            return []
        return [
            name
            for name in sorted(self.names)
            if (name in self.quantized or (into and is_matrix_of_block(name, self.shape(name))))
            and (name in tensors or ranks.count > 1)
        ]

    def _read_one(self, name: str, target: Tensor | None) -> None:
        """Read one parameter, decoded, with its adapter merged."""
        self._read_saved(name, target)
        a, b = self.adapters.get(name, ("", ""))
        if not a:
            return
        factors = {self.keys[n]: torch.empty(self.shape(n)) for n in (a, b)}
        checkpoint.read_into(factors, self.reader)
        if target is not None:
            whole = lora.product(factors[self.keys[a]], factors[self.keys[b]], self.scale)
            add(target, whole)

    def _read_all(self, tensors: Mapping[str, Tensor]) -> None:
        """Read parameters that are not quantised, at once."""
        merged = {n: p for n, p in self.adapters.items() if n in tensors and p[0] not in tensors}
        factors = {name: torch.empty(self.shape(name)) for pair in merged.values() for name in pair}
        wanted = {self.keys.get(n, f"model.{n}"): t for n, t in {**tensors, **factors}.items()}
        checkpoint.read_into(wanted, self.reader)
        for name, (a, b) in merged.items():
            add(tensors[name], lora.product(factors[a], factors[b], self.scale))


Error: TypeAlias = tuple[float, float]
"""Sums over a rank's elements: of the squared errors of encoding, and of the squared weights."""


def encode_into(held: Tensor, values: Tensor, codes: WeightCodes) -> Error:
    """Encode a rank's part of a weight, some rows at a time; return the errors of encoding."""
    size = codes.shape_of((1, 1, held.shape[2]))[1]
    rows = max(1, quantized.PIECE // max(1, values.shape[1]))
    changed = total = 0.0
    for part, given in zip(torch.split(held, rows), torch.split(values, rows), strict=True):
        part.copy_(codes.encode(given, size))
        changed += (codes.decode(part) - given).square().sum(dtype=torch.float64).item()
        total += given.square().sum(dtype=torch.float64).item()
    return changed, total


def rms_of(errors: Iterable[Mapping[str, Error]]) -> float:
    """Root mean square over weights of the relative error of encoding, from all ranks' sums.

    The same on every layout: copies of a shard count as often in both sums.
    """
    sums: dict[str, list[float]] = {}
    for by_name in errors:
        for name, (changed, total) in by_name.items():
            own = sums.setdefault(name, [0.0, 0.0])
            own[0] += changed
            own[1] += total
    ratios = [changed / total for changed, total in sums.values() if total]
    return math.sqrt(sum(ratios) / max(1, len(ratios)))


def is_matrix_of_block(name: str, shape: torch.Size) -> bool:
    """True if a parameter may be a quantised one."""
    return name.startswith("blocks.") and len(shape) == 2


def like(target: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """An empty tensor of another shape and format, cut as `target` is, along dims 0 and 1."""
    own = local(target)
    columns = shape[1] * own.shape[1] // target.shape[1]
    part = torch.empty((own.shape[0], columns, *shape[2:]), dtype=dtype, device=own.device)
    return as_shard(part, target, shape)


def add(target: Tensor, whole: Tensor) -> None:
    """Add an unsharded tensor to one that may be sharded; rounded once, from fp64."""
    if isinstance(target, DTensor):
        # Every rank holds the same whole tensor: no communication.
        whole = whole.to(target.to_local().device)
        whole = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(target.to(torch.float64) + whole.to(target.device))
