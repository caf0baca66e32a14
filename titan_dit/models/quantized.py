"""Frozen weights in few bits: a row's elements by blocks, each with its codes beside its scale.

A weight [rows, columns] is held as bytes [rows, blocks, size]: a block's codes, then its scale in
bf16. A scale lies where its codes lie, so no layout parts them. Blocks divide the columns that a
rank has with any tensor parallelism up to 8. So every layout has the same codes, and a checkpoint
gives them to every other one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from titan_dit.config.limits import columns_of_any_tp
from titan_dit.config.parameter_groups import matches
from titan_dit.config.section import UserError
from titan_dit.config.training import LoRAConfig
from titan_dit.models.base import Model, exact_modules
from titan_dit.models.layers import TokenLinear

SCALE = torch.bfloat16
"""Format of a block's scale: two bytes."""
PIECE = 2**22
"""Elements that are encoded at a time: the temporary tensors are a few times as large."""


@dataclass(frozen=True)
class WeightCodes:
    """A format of [lora] base."""

    name: str
    peak: float
    """The largest element of a block has this code's value; the scale is its size / peak."""
    to_codes: Callable[[Tensor], Tensor]
    """Values up to +-peak, fp32 [..., n], to uint8 [..., n // packed]."""
    to_values: Callable[[Tensor], Tensor]
    """The inverse."""
    largest_block: int = 128
    packed: int = 1
    """Codes in a byte."""

    def block(self, columns: int) -> int:
        """Elements that share a scale; 0 if no even number suits `columns`."""
        least = columns_of_any_tp(columns)
        fitting = (size for size in range(2, self.largest_block + 1, 2) if least % size == 0)
        return max(fitting, default=0)

    def shape(self, shape: Sequence[int]) -> torch.Size:
        """The shape of the bytes of a weight [rows, columns]."""
        rows, columns = shape
        block = self.block(columns)
        return torch.Size([rows, columns // block, block // self.packed + SCALE.itemsize])

    def shape_of(self, held: Sequence[int]) -> torch.Size:
        """The inverse of `shape`, also for a rank's part. Raises ValueError if it has none."""
        if len(held) != 3 or held[2] <= SCALE.itemsize:
            raise ValueError(f"{list(held)} is no shape of {self.name} blocks.")
        return torch.Size([held[0], held[1] * (held[2] - SCALE.itemsize) * self.packed])

    @torch.no_grad()
    def encode(self, values: Float[Tensor, "rows columns"], size: int) -> UInt8[Tensor, "rows b s"]:
        """Bytes of a weight, or of a rank's part; `size`: elements of a block."""
        blocks = torch.unflatten(values.float(), 1, (-1, size))
        largest = blocks.abs().amax(-1, keepdim=True)
        # A block of zeros has any scale; that of a subnormal number would be 0.
        scale = (largest / self.peak).clamp(min=torch.finfo(SCALE).tiny).to(SCALE)
        codes = self.to_codes((blocks / scale.float()).clamp(-self.peak, self.peak))
        return torch.cat((codes, scale.view(torch.uint8)), -1)

    def decode(self, held: Tensor) -> Float[Tensor, "rows columns"]:
        """The weight, fp32, of bytes [rows, blocks, size].

        `held` is uint8, or these numbers in the compute dtype: torch 2.11 gathers them so.
        """
        held = held.to(torch.uint8)
        # The upper half of fp32. A view as bf16 would be a kernel of its own.
        low, high = (held[..., -2:-1].int() << 16, held[..., -1:].int() << 24)
        scale = (low | high).view(torch.float32)
        return (self.to_values(held[..., : -SCALE.itemsize]) * scale).flatten(1)


def normal_float() -> Tensor:
    """The 16 values of NF4, fp32 and sorted: quantiles of a normal law (arXiv:2305.14314 sec. 3).

    Eight from 0 up and nine from 0 down share the 0; the outermost are 1 and -1. The outermost
    probability is that of the authors' code: the mean of 1 - 1 / 32 and 1 - 1 / 30, less a half.
    """
    outermost = 1 - (1 / 32 + 1 / 30) / 2
    up, down = (
        torch.special.ndtri(torch.linspace(0.5, outermost, count, dtype=torch.float64))
        for count in (9, 8)
    )
    values = torch.cat((-down.flip(0), up[1:]))
    return (values / values.max() + 0.0).float()  # No -0.


def nf4(device: torch.device) -> WeightCodes:
    """4-bit codes of `normal_float`'s values, two in a byte."""
    table = normal_float()
    middles = ((table[1:] + table[:-1]) / 2).to(device)
    table = table.to(device)

    def to_codes(values: Tensor) -> Tensor:
        codes = torch.bucketize(values, middles).to(torch.uint8)
        return codes[..., ::2] << 4 | codes[..., 1::2]

    def to_values(codes: Tensor) -> Tensor:
        return table[torch.stack((codes >> 4, codes & 15), -1).flatten(-2).int()]

    return WeightCodes("nf4", 1.0, to_codes, to_values, largest_block=64, packed=2)


INT8 = WeightCodes(
    "int8",
    127.0,
    lambda values: values.round().to(torch.int8).view(torch.uint8),
    lambda codes: codes.view(torch.int8).float(),
)
"""Symmetric integers."""
FLOAT8 = WeightCodes(
    "float8",
    torch.finfo(torch.float8_e4m3fn).max,
    lambda values: values.to(torch.float8_e4m3fn).view(torch.uint8),
    lambda codes: codes.view(torch.float8_e4m3fn).float(),
)
"""e4m3."""


@functools.cache
def weight_codes(base: str, device: torch.device) -> WeightCodes | None:
    """The format of [lora] `base`, with its table on `device`; None for "full"."""
    if base == "nf4":
        return nf4(device)
    return {"int8": INT8, "float8": FLOAT8}.get(base)


def layers(model: nn.Module, config: LoRAConfig) -> dict[str, TokenLinear]:
    """The layers that [lora] base quantises, by name: the blocks' linears over tokens.

    Embeddings, norms, modulation and the output layer keep their format, as do layers whose
    columns no block divides and the modules of `Model.exact`. None with base = "full".
    """
    codes = weight_codes(config.base, torch.device("cpu")) if config.rank else None
    if codes is None or not isinstance(model, Model):
        return {}
    exact = {id(part) for module in exact_modules(model) for part in module.modules()}
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, TokenLinear)
        and name.startswith("blocks.")
        and id(layer) not in exact
        and f"{name}.weight" not in model.tied
        and codes.block(layer.in_features)
    }


def check(model: nn.Module, config: LoRAConfig) -> None:
    """Raise UserError if [lora] base quantises nothing, or a weight that is trained."""
    if config.base == "full":
        return
    found = layers(model, config)
    if not found:
        raise UserError(
            f'[lora] base="{config.base}" finds no linear layer in the blocks whose columns are a '
            'multiple of 2 for every tp up to 8. Set base = "full".'
        )
    if trained := [name for name in found if matches(f"{name}.weight", config.trained)]:
        raise UserError(
            f'[lora] trained names {trained[0]}.weight, which base="{config.base}" quantises: '
            'only frozen weights have codes. Leave it out of trained, or set base = "full".'
        )


def held_bytes(model: nn.Module, config: LoRAConfig) -> dict[str, int]:
    """Bytes of every quantised weight, by the parameter's name."""
    codes = weight_codes(config.base, torch.device("cpu"))
    return {
        f"{name}.weight": codes.shape(layer.weight.shape).numel()
        for name, layer in layers(model, config).items()
        if codes
    }
