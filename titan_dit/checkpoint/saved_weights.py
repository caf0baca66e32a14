"""A network's weights in a checkpoint: an average or the last step's, with adapters merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from titan_dit.checkpoint import checkpoint
from titan_dit.checkpoint.averages import averages_in
from titan_dit.checkpoint.store import Location
from titan_dit.config.section import UserError
from titan_dit.config.training import LoRAConfig
from titan_dit.models import lora


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
        self.contents = checkpoint.contents(path)
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
        """Name of a weight -> names of its adapter's A and B."""
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
        return LoRAConfig.of_table(self.record["config"].get("lora", {})).scale

    def shape(self, name: str) -> torch.Size:
        """The saved shape of a parameter."""
        return self.contents[self.keys[name]][0]

    def whole(self, name: str) -> Tensor:
        """A parameter as it was saved: unsharded, without its adapter."""
        tensor = torch.empty(self.shape(name))
        checkpoint.read_into({self.keys[name]: tensor}, self.path)
        return tensor

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
        checkpoint.verify(self.path, read=read)
        keys = {n: self.keys.get(n, f"model.{n}") for n in tensors}
        checkpoint.check_fits(self.path, {keys[n]: tensor for n, tensor in tensors.items()})

    @torch.no_grad()
    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Read into whole or sharded tensors in place. Collective; names may differ by rank."""
        merged = {n: p for n, p in self.adapters.items() if n in tensors and p[0] not in tensors}
        factors = {name: torch.empty(self.shape(name)) for pair in merged.values() for name in pair}
        wanted = {self.keys.get(n, f"model.{n}"): t for n, t in {**tensors, **factors}.items()}
        checkpoint.read_into(wanted, self.path)
        for name, (a, b) in merged.items():
            add(tensors[name], lora.product(factors[a], factors[b], self.scale))


def add(target: Tensor, whole: Tensor) -> None:
    """Add an unsharded tensor to one that may be sharded; rounded once, from fp64."""
    if isinstance(target, DTensor):
        # Every rank holds the same whole tensor: no communication.
        whole = whole.to(target.to_local().device)
        whole = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(target.to(torch.float64) + whole.to(target.device))
