"""AdamW with moments in 8 bits (arXiv:2110.02861), 4 bits (arXiv:2309.01507) or float8.

A moment is held as codes, with one fp32 scale for each block of elements; tables and rounding are
torchao's. Blocks lie within a row, and within a rank's part of it for every size of tensor
parallelism up to 8. So codes and scales are cut where the weights are: training does not depend on
the layout, and a checkpoint gives every layout the same codes and scales.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from titan_dit.config.section import UserError
from titan_dit.optim.adamw import AdamW
from titan_dit.optim.fused import compiled
from titan_dit.optim.optimizer import Group, Parameters, State
from titan_dit.optim.sections import QuantizedAdamWConfig
from titan_dit.system.quiet_torchao import load_torchao

STATES = ("exp_avg", "exp_avg_scale"), ("exp_avg_sq", "exp_avg_sq_scale")
"""Names of the codes and of the scales of both moments."""
LEAST = 1e-12
"""Least size of a block's largest element, as torchao's."""
PIECE = 2**22
"""Elements that are updated at once where no compiler joins the operations."""


def build(config: QuantizedAdamWConfig, parameters: Parameters) -> QuantizedAdamW:
    """The optimizer over plain or sharded parameters."""

    def settings(_: str, parameter: nn.Parameter) -> dict[str, Any]:
        return {"block": config.block(parameter.shape)}

    return QuantizedAdamW(config.grouped(parameters, settings), config)


@dataclass(frozen=True)
class Codes:
    """How a moment's values in units of its block's scale become codes [n, block // packed].

    Values are tensors [n, block // packed], `packed` of them: of the even elements and the odd
    ones, or of all. A kernel then has the codes of a byte at hand, where it would have to read its
    neighbour's. Codes are uint8, for float8 its bits: gloo and files take any uint8.
    """

    encode: Callable[[Sequence[Tensor]], Tensor]
    decode: Callable[[Tensor], Sequence[Tensor]]
    peak: float = 1.0
    """Value of the largest element of a block."""
    packed: int = 1
    """Values in a byte of the codes."""


class QuantizedAdamW(AdamW):
    """Quantised moments for the groups with a block, AdamW for the others."""

    def __init__(self, groups: Sequence[Group], config: QuantizedAdamWConfig) -> None:
        device = groups[0]["params"][0].device
        self.codes = [codes_of(config.bits, is_signed, device) for is_signed in (True, False)]
        super().__init__(groups, config.defaults)

    def is_elementwise(self, group: Group) -> bool:
        """True: every weight has its own moments, and a weight is never cut."""
        return True

    def new_states(self, weights: Sequence[Tensor], group: Group) -> list[State]:
        """Scales of 0, so that moments are 0 whatever the codes, and the number of steps.

        Raises UserError if the block size does not divide a matrix's columns on this rank.
        """
        if not group["block"]:
            return super().new_states(weights, group)
        device = weights[0].device
        counts = group["counts"] = torch.zeros(len(weights), device=device)
        found = []
        for weight, count in zip(weights, counts.unbind(), strict=True):
            if weight.shape[-1] % group["block"]:
                raise UserError(
                    f"[optimizer] blocks of {group['block']} elements share a scale, and do not "
                    f"divide the {weight.shape[-1]} columns that a rank has of a matrix. Set "
                    'another [parallel] tp, up to 8, or [optimizer] name = "adamw".'
                )
            state = {"step": count}
            rows, columns = weight.shape[:-1], weight.shape[-1]
            for (key, scale), codes in zip(STATES, self.codes, strict=True):
                shape = *rows, columns // codes.packed
                state[key] = torch.zeros(shape, dtype=torch.uint8, device=device)
                state[scale] = torch.zeros(*rows, columns // group["block"], device=device)
            found.append(state)
        return found

    def update(
        self,
        weights: list[Tensor],
        gradients: list[Tensor],
        states: Sequence[State],
        group: Group,
    ) -> None:
        """Weight by weight, in one kernel on a GPU; no operation waits for `skip`."""
        if not group["block"]:
            super().update(weights, gradients, states, group)
            return
        counts = [state["step"] for state in states]
        is_whole = len(states) == len(group["counts"])
        torch._foreach_add_([group["counts"]] if is_whole else counts, (~self.skip).float())
        settings = [
            torch.full((), group[key], device=self.skip.device)
            for key in ("lr", "eps", "weight_decay")
        ]
        fuses = group["fused"] and weights[0].is_cuda
        step = compiled(step_in_place) if fuses else step_in_place
        most = sys.maxsize if fuses else max(1, PIECE // group["block"])
        for weight, gradient, state in zip(weights, gradients, states, strict=True):
            if not weight.numel():  # A rank may have no rows.
                continue
            held = [state[key] for keys in STATES for key in keys]
            blocks = weight.numel() // group["block"]
            rows = [t.view(blocks, -1) for t in (weight, gradient, *held)]
            if fuses and self.codes[0].packed == 2:
                rows[0] = pairs(rows[0])
            for piece in zip(*(torch.split(t, most) for t in rows), strict=True):
                step(
                    piece,
                    state["step"],
                    self.skip,
                    settings,
                    codes=self.codes,
                    betas=group["betas"],
                )


def step_in_place(
    tensors: Sequence[Tensor],
    count: Tensor,
    skip: Tensor,
    settings: Sequence[Tensor],
    *,
    codes: Sequence[Codes],
    betas: Sequence[float],
) -> None:
    """A step of AdamW on blocks, unless `skip`.

    `tensors`: weight [n, block] or its `pairs`, gradient [n, block], then codes
    [n, block // packed] and scales [n, 1] of both moments. `count`: the steps so far, with this
    one. `settings`: lr, eps, weight decay.
    """
    weight, gradient, *held = tensors
    lr, eps, weight_decay = settings
    old_weights = interleaved(weight, codes[0].packed)
    dtype = torch.promote_types(old_weights[0].dtype, torch.float32)
    gradients = [part.to(dtype) for part in interleaved(gradient, codes[0].packed)]
    updated = []
    powers = gradients, [part.square() for part in gradients]
    for number, (power, beta, how) in enumerate(zip(powers, betas, codes, strict=True)):
        old, scale = held[2 * number : 2 * number + 2]
        moments = [
            (value * scale).to(dtype).lerp(part, 1 - beta)
            for value, part in zip(how.decode(old), power, strict=True)
        ]
        largest = functools.reduce(torch.maximum, (m.abs().amax(1, True) for m in moments))
        new_scale = largest.float().clamp(min=LEAST) / how.peak
        new = how.encode([moment.float() / new_scale for moment in moments])
        old.copy_(torch.where(skip, old, new))
        scale.copy_(torch.where(skip, scale, new_scale))
        updated.append([moment / (1 - beta**count) for moment in moments])
    moved = [
        part.to(dtype) * (1 - lr * weight_decay) - lr * first / (second.sqrt() + eps)
        for part, first, second in zip(old_weights, *updated, strict=True)
    ]
    write(weight, [torch.where(skip, *two) for two in zip(old_weights, moved, strict=True)])


def interleaved(blocks: Tensor, packed: int) -> Sequence[Tensor]:
    """Every `packed`-th element of blocks [n, block], or the fp32 halves of `pairs`."""
    if blocks.dtype == torch.int64:
        return [half.int().view(torch.float32) for half in (blocks, blocks >> 32)]
    return [blocks[:, first::packed] for first in range(packed)]


def write(blocks: Tensor, parts: Sequence[Tensor]) -> None:
    """The inverse of `interleaved`."""
    if blocks.dtype == torch.int64:
        low, high = (part.view(torch.int32).long() for part in parts)
        blocks.copy_(high << 32 | low & 0xFFFFFFFF)
        return
    for view, part in zip(interleaved(blocks, len(parts)), parts, strict=True):
        view.copy_(part)


def pairs(weight: Tensor) -> Tensor:
    """A view of fp32 weights [n, block] as int64 [n, block // 2].

    torch.compile writes a strided view by copies of the whole weight in two more kernels.
    """
    fits = weight.dtype == torch.float32 and weight.storage_offset() % 2 == 0
    return weight.view(torch.int64) if fits else weight


def codes_of(bits: str, is_signed: bool, device: torch.device) -> Codes:
    """The codes of torchao for the first moment, which is signed, or for the second.

    `bits`: "8", "4" or "float8" (e4m3).
    """
    load_torchao("optim")
    from torchao.optim import subclass_4bit, subclass_8bit

    def least(codes: Tensor, values: Tensor) -> Tensor:
        """Codes of a second moment in which only an exact 0 gets code 0.

        A rounded 0 would make the step first moment / eps. torchao's 4-bit table has no 0.
        """
        return codes if is_signed else torch.where(values > 0, codes.clamp(min=1), codes)

    if bits == "float8":
        kind = torch.float8_e4m3fn
        return Codes(
            lambda values: least(values[0].to(kind).view(torch.uint8), values[0]),
            lambda codes: [codes.view(kind).float()],
            peak=torch.finfo(kind).max,
        )
    module = {"8": subclass_8bit, "4": subclass_4bit}[bits]
    with _disable_current_modes():  # A dry run's tensors have no values.
        values = module.get_qmap_signed() if is_signed else module.get_qmap_unsigned()
    table = torch.tensor(values, device=device)
    middles = (table[1:] + table[:-1]) / 2

    def nearest(values: Tensor) -> Tensor:
        return torch.bucketize(values, middles, right=True, out_int32=True).to(torch.uint8)

    def encode(values: Sequence[Tensor]) -> Tensor:
        if bits == "8":
            return least(nearest(values[0]), values[0])
        even, odd = map(nearest, values)
        return even << 4 | odd

    def decode(codes: Tensor) -> Sequence[Tensor]:
        parts = [codes] if bits == "8" else [codes >> 4, codes & 15]
        return [table[part.int()] for part in parts]

    return Codes(encode, decode, packed=1 if bits == "8" else 2)
