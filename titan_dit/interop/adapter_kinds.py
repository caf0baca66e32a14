"""The change that the tensors of one layer in an adapter file make to its weight W.

LoRA (arXiv:2106.09685) adds scale B A; LoKr (LyCORIS, arXiv:2309.14859) scale w1 x w2, a Kronecker
product; LoHa (arXiv:2108.06098) scale (w1_a w1_b) * (w2_a w2_b), element by element. The scale is
alpha / rank. DoRA (arXiv:2402.09353) then gives each row, or each column, of the sum a norm.
`low_rank` has the same effect as A and B, where there are such. `merged` is exact for all kinds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float64
from torch import Tensor

from titan_dit.config.section import UserError

Pair: TypeAlias = tuple[Tensor, Tensor]
"""A [rank, inputs] and B [outputs, rank] of a LoRA."""

A, B, ALPHA, MAGNITUDE = "lora_A", "lora_B", "alpha", "dora_scale"
LOKR = tuple(f"lokr_{part}" for part in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b"))
LOHA = tuple(f"hada_{part}" for part in ("w1_a", "w1_b", "w2_a", "w2_b"))
SPELLINGS = {
    A: ("lora_A.weight", "lora_down.weight", "lora.down.weight", "lora_A.default.weight"),
    B: ("lora_B.weight", "lora_up.weight", "lora.up.weight", "lora_B.default.weight"),
    ALPHA: ("alpha",),
    MAGNITUDE: ("dora_scale", "lora_magnitude_vector", "lora_magnitude_vector.weight"),
    **{part: (part,) for part in (*LOKR, *LOHA)},
}
"""Part of an adapter -> how its name ends in files: of peft, of kohya, of old diffusers."""
PARTS = {f".{end}": part for part, ends in SPELLINGS.items() for end in ends}
OTHERS = {
    ".lora_mid.weight": "a convolution's LoRA",
    ".lokr_t2": "a convolution's LoKr",
    ".hada_t1": "a convolution's LoHa",
    ".hada_t2": "a convolution's LoHa",
    ".lora_B.bias": "a bias's LoRA",
    ".diff": "a changed weight",
    ".diff_b": "a changed bias",
    ".w_norm": "a changed norm",
    ".b_norm": "a changed norm",
    ".oft_blocks": "OFT",
    ".oft_diag": "OFT",
    ".on_input": "IA3",
}
"""Ends of the names of tensors that are not read."""
MERGE = "Add it to the base's weights with --merge, which is exact."
MISFIT = "Give --base a run of the network that the adapters were trained on."
EPS = torch.finfo(torch.float32).eps
"""Lower bound of a norm of DoRA."""


def part_of(name: str) -> tuple[str, str]:
    """(layer, part) of a tensor's name. Raises UserError for one that is of no adapter."""
    for end, part in PARTS.items():
        if name.endswith(end):
            return name.removesuffix(end), part
    for end, kind in OTHERS.items():
        if name.endswith(end):
            raise UserError(f"{name} is of {kind}, which is not read. Save adapters without it.")
    raise UserError(
        f"{name} is no part of an adapter: no name ends in .lora_A.weight, .lora_down.weight, or "
        "as those of LoKr, LoHa or DoRA. Give a file with adapters alone."
    )


def check_parts(layer: str, parts: Iterable[str]) -> None:
    """Raise UserError unless the parts make one kind of adapter."""
    given = set(parts) - {ALPHA, MAGNITUDE}
    if given & set(LOKR):
        halves = [(f"lokr_{w}", f"lokr_{w}_a", f"lokr_{w}_b") for w in ("w1", "w2")]
        wanted = {p for whole, *both in halves for p in ([whole] if whole in given else both)}
    else:
        wanted = set(LOHA if given & set(LOHA) else (A, B))
    has = ", ".join(sorted(given or parts))
    if missing := sorted(wanted - given):
        raise UserError(f"it has {has} of {layer}, but not {missing[0]}. Save the adapters again.")
    if given - wanted:
        raise UserError(f"it has {has} of {layer}: two adapters of one layer. Save one of them.")


@dataclass(frozen=True)
class LayerAdapter:
    """The adapter of one layer."""

    layer: str
    """Name in the file, for messages."""
    parts: Mapping[str, Tensor]
    """Part -> tensor, fp32."""
    shape: tuple[int, int]
    """(outputs, inputs) of the layer's weight."""

    def __post_init__(self) -> None:
        """Raise UserError for other shapes, NaN and infinity. The parts are those of one kind."""
        for part, tensor in self.parts.items():
            if not tensor.isfinite().all():
                raise UserError(
                    f"{part} of {self.layer} has NaN or infinite values. Train the adapters again."
                )
            if part in (*LOKR, *LOHA, A, B) and tensor.ndim != 2:
                self.refuse_shapes()
        try:
            fits = tuple(self.change("meta").shape) == self.shape
        except RuntimeError:  # Of torch: the factors of a product do not fit each other.
            fits = False
        if not fits:
            self.refuse_shapes()
        if MAGNITUDE in self.parts:
            self.magnitude()

    def refuse_shapes(self) -> None:
        """Raise UserError for tensors that do not make the layer's weight."""
        shapes = " and ".join(
            f"{part} {list(tensor.shape)}" for part, tensor in self.parts.items() if part != ALPHA
        )
        raise UserError(f"{shapes} do not fit {self.layer}.weight {list(self.shape)}. {MISFIT}")

    @property
    def rank(self) -> int | None:
        """The rank that alpha is divided by; None for a LoKr of two whole factors."""
        for part in (A, "lokr_w2_b", "lokr_w1_b", "hada_w1_b"):
            if part in self.parts:
                return len(self.parts[part])
        return None

    def scale(self, stated: float = 1.0) -> float:
        """Alpha / rank; `stated` without an alpha. Raises UserError unless alpha is above 0."""
        alpha = self.parts.get(ALPHA)
        if alpha is None or self.rank is None:
            return stated
        value = float(alpha) if alpha.numel() == 1 else math.nan
        if not 0 < value < 1e30 or not self.rank:
            raise UserError(
                f"alpha={alpha.flatten()[:3].tolist()} and rank {self.rank} of {self.layer}: one "
                "number above 0 is needed of each. Save the adapters again."
            )
        return value / self.rank

    def change(self, device: str = "cpu") -> Float64[Tensor, "o i"]:
        """The change of the weight, before the scale and DoRA's norms."""
        parts = {name: tensor.to(device).double() for name, tensor in self.parts.items()}
        if A in parts:
            return parts[B] @ parts[A]
        if LOHA[0] in parts:
            w1_a, w1_b, w2_a, w2_b = (parts[name] for name in LOHA)
            return (w1_a @ w1_b) * (w2_a @ w2_b)
        one, two = (
            parts[whole] if whole in parts else parts[f"{whole}_a"] @ parts[f"{whole}_b"]
            for whole in ("lokr_w1", "lokr_w2")
        )
        return torch.kron(one, two)

    def magnitude(self) -> Float64[Tensor, "_ _"]:
        """DoRA's norms of the rows, [outputs, 1], or of the columns, [1, inputs]."""
        norms = self.parts[MAGNITUDE]
        found = (norms[:, None] if norms.ndim == 1 else norms).double()
        outputs, inputs = self.shape
        if tuple(found.shape) not in ((outputs, 1), (1, inputs)):
            self.refuse_shapes()
        return found

    def merged(self, weight: Tensor, scale: float) -> Float64[Tensor, "o i"]:
        """The weight with the adapter. Raises UserError if it does not fit fp32."""
        found: Tensor = weight.double() + scale * self.change()
        if MAGNITUDE in self.parts:
            norms = self.magnitude()
            own = found.norm(dim=1 if norms.shape == (len(found), 1) else 0, keepdim=True)
            found = found * (norms / own.clamp_min(EPS))
        if not found.float().isfinite().all():
            raise UserError(
                f"the weight of {self.layer} with its adapter has infinite values. Train the "
                "adapters again."
            )
        return found

    def low_rank(self) -> Pair:
        """A and B of the same change. Raises UserError for a kind or a rank that has none."""
        if MAGNITUDE in self.parts:
            raise UserError(
                f"{self.layer} is of DoRA, which also gives the weight other norms: it is no LoRA. "
                f"{MERGE}"
            )
        if LOHA[0] in self.parts:
            raise UserError(
                f"{self.layer} is of LoHa, a product element by element: it is no LoRA. {MERGE}"
            )
        if A in self.parts:
            return shortened(self.parts[A], self.parts[B])
        (left, right), (below, beside) = self.factors("lokr_w1"), self.factors("lokr_w2")
        rank, most = left.shape[1] * below.shape[1], min(self.shape)
        if rank >= most:
            raise UserError(
                f"{self.layer} is of LoKr, a Kronecker product, of rank {rank} here, as its weight "
                f"{list(self.shape)}: it is no LoRA. {MERGE}"
            )
        # (L1 R1) x (L2 R2) = (L1 x L2) (R1 x R2).
        return torch.kron(right, beside), torch.kron(left, below)

    def factors(self, whole: str) -> Pair:
        """L and R with a product L R that is a factor of LoKr; of the smallest inner size."""
        if whole not in self.parts:
            return self.parts[f"{whole}_a"], self.parts[f"{whole}_b"]
        found = self.parts[whole]
        rows, columns = found.shape
        return (found, torch.eye(columns)) if columns <= rows else (torch.eye(rows), found)


def shortened(a: Tensor, b: Tensor) -> Pair:
    """The same product B A of a rank that is at most the number of its rows and of its columns."""
    outputs, inputs = len(b), a.shape[1]
    if len(a) <= min(outputs, inputs):
        return a, b
    whole = (b.double() @ a.double()).float()
    return (torch.eye(inputs), whole) if inputs <= outputs else (whole, torch.eye(outputs))


def stacked(pairs: list[Pair | None], sizes: list[int]) -> Pair:
    """(A, B) of a layer that joins the outputs of several layers, one after the other.

    `sizes`: outputs of each; None adds 0 to them. One A if all have the same; else all A, one below
    the other, and a block-diagonal B.
    """
    given = [pair for pair in pairs if pair is not None]
    first = given[0][0]
    shared = all(torch.equal(a, first) for a, _ in given)
    one = first if shared else torch.cat([a for a, _ in given])
    rows, place = [], 0
    for pair, size in zip(pairs, sizes, strict=True):
        own = one.new_zeros(size, len(one))
        if pair is not None:
            a, b = pair
            own[:, place : place + len(a)] = b
            place += 0 if shared else len(a)
        rows.append(own)
    return one, torch.cat(rows)
