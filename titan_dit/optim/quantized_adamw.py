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
from titan_dit.optim.optimizer import Group, Parameters, State
from titan_dit.optim.sections import QuantizedAdamWConfig
from titan_dit.system.quiet_torchao import load_torchao

STATES = ("exp_avg", "exp_avg_scale"), ("exp_avg_sq", "exp_avg_sq_scale")
"""Names of the codes and of the scales of both moments."""
PIECE = 2**22
"""Elements that are updated at once where no compiler joins the operations."""


def build(config: QuantizedAdamWConfig, parameters: Parameters) -> QuantizedAdamW:
    """The optimizer over plain or sharded parameters."""

    def settings(_: str, parameter: nn.Parameter) -> dict[str, Any]:
        return {"block": config.block(parameter.shape)}

    return QuantizedAdamW(config.grouped(parameters, settings), config)


@dataclass(frozen=True)
class Codes:
    """How a moment's values [n, block] become codes and scales [n], and back.

    Codes are uint8 [n, block // packed], for float8 its bits: gloo and files take any uint8.
    """

    encode: Callable[[Tensor], tuple[Tensor, Tensor]]
    decode: Callable[[Tensor, Tensor], Tensor]
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
        """Scales of zero, which is a moment of zero whatever the codes; and the steps so far."""
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
        lr = torch.full((), group["lr"], device=self.skip.device)
        fuses = group["fused"] and weights[0].is_cuda
        step = compiled_step() if fuses else step_in_place
        most = sys.maxsize if fuses else max(1, PIECE // group["block"])
        for weight, gradient, state in zip(weights, gradients, states, strict=True):
            state["step"].add_(~self.skip)
            if not weight.numel():  # A rank may have no rows.
                continue
            held = [state[key] for keys in STATES for key in keys]
            blocks = weight.numel() // group["block"]
            tensors = [torch.split(t.view(blocks, -1), most) for t in (weight, gradient, *held)]
            for piece in zip(*tensors, strict=True):
                step(
                    piece,
                    state["step"],
                    self.skip,
                    lr,
                    codes=self.codes,
                    betas=group["betas"],
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                )


def step_in_place(
    tensors: Sequence[Tensor],
    count: Tensor,
    skip: Tensor,
    lr: Tensor,
    *,
    codes: Sequence[Codes],
    betas: Sequence[float],
    eps: float,
    weight_decay: float,
) -> None:
    """A step of AdamW on blocks, unless `skip`.

    `tensors`: weight and gradient [n, block], then codes [n, block // packed] and scales [n, 1] of
    both moments. `count`: the steps so far, with this one.
    """
    weight, gradient, *held = tensors
    dtype = torch.promote_types(weight.dtype, torch.float32)
    gradient = gradient.to(dtype)
    updated = []
    powers = gradient, gradient.square()
    for number, (power, beta, how) in enumerate(zip(powers, betas, codes, strict=True)):
        old, scale = held[2 * number : 2 * number + 2]
        moment = how.decode(old, scale).to(dtype).lerp(power, 1 - beta)
        new, new_scale = how.encode(moment.float())
        old.copy_(torch.where(skip, old, new))
        scale.copy_(torch.where(skip, scale, new_scale[:, None]))
        updated.append(moment / (1 - beta**count))
    first, second = updated
    moved = weight.to(dtype) * (1 - lr * weight_decay) - lr * first / (second.sqrt() + eps)
    weight.copy_(torch.where(skip, weight, moved.to(weight.dtype)))


@functools.cache
def compiled_step() -> Callable[..., None]:
    """`step_in_place` as one kernel, for any number of blocks."""
    found: Callable[..., None] = torch.compile(step_in_place, fullgraph=True, dynamic=True)
    return found


def codes_of(bits: str, is_signed: bool, device: torch.device) -> Codes:
    """The codes of torchao for the first moment, which is signed, or for the second.

    `bits`: "8", "4" or "float8" (e4m3).
    """
    load_torchao("optim")
    from torchao.optim import quant_utils, subclass_4bit, subclass_8bit, subclass_fp8

    def encode_float8(values: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = subclass_fp8.quantize_fp8(values, values.shape[1])
        return least(codes.view(torch.uint8), values), scales

    def least(codes: Tensor, values: Tensor) -> Tensor:
        """Codes of a second moment, of which none but that of 0 stands for 0.

        A weight whose first moment lives longer would take steps of first moment / eps. torchao's
        table of 4 bits has no 0.
        """
        return codes if is_signed else torch.where(values > 0, codes.clamp(min=1), codes)

    if bits == "float8":
        return Codes(encode_float8, lambda c, scales: c.view(subclass_fp8.DTYPE).float() * scales)
    module = {"8": subclass_8bit, "4": subclass_4bit}[bits]
    with _disable_current_modes():  # A dry run's tensors have no values.
        values = module.get_qmap_signed() if is_signed else module.get_qmap_unsigned()
    table = torch.tensor(values, device=device)

    def encode(values: Tensor) -> tuple[Tensor, Tensor]:
        scaled, scales = quant_utils.scale_tensor(values, values.shape[1])
        if bits == "8":
            return least(quant_utils.quantize_8bit_with_qmap(scaled, table), values), scales
        codes = quant_utils.quantize_4bit_with_qmap(scaled, table)
        return codes[:, ::2] << 4 | codes[:, 1::2], scales

    def decode(codes: Tensor, scales: Tensor) -> Tensor:
        if bits == "4":
            codes = torch.stack((codes >> 4, codes & 15), -1).flatten(1)
        return table[codes.int()] * scales

    return Codes(encode, decode, packed=1 if bits == "8" else 2)
