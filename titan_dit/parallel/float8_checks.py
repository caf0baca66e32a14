"""Whether float8 and async tensor parallelism can be had: asked before anything is built."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import torch

from titan_dit.config import JobConfig, PrecisionConfig
from titan_dit.parallel import attention
from titan_dit.parallel.fsdp import DTYPES
from titan_dit.parallel.mesh import AxisSizes
from titan_dit.section import UserError, show

NEEDED = {
    "tensorwise": (8, 9),
    "rowwise": (9, 0),
    "rowwise_with_gw_hp": (9, 0),
    "te_delayed": (8, 9),
    "te_current": (8, 9),
    "te_mxfp8": (10, 0),
}
"""The CUDA compute capability whose tensor cores know the products of a recipe."""


def is_transformer_engine(float8: str) -> bool:
    """Whether NVIDIA's Transformer Engine runs the recipe; torchao runs the others."""
    return float8.startswith("te_")


def check(config: JobConfig[Any, Any, Any], sizes: AxisSizes) -> None:
    """Refuse what does not go together, whatever the device."""
    precision = config.precision
    if config.parallel.async_tp:
        check_async_tp(config, sizes)
    if precision.float8 == "off":
        return
    if precision.dtype == "fp64":
        raise UserError(
            f'[precision] dtype="fp64" is for comparing layouts, float8={show(precision.float8)} '
            'rounds to 3 bits. Set float8 = "off" or dtype = "bf16".'
        )
    if precision.dtype == "fp32" and "rowwise" in precision.float8 and not precision.float8_emulate:
        raise UserError(
            f"[precision] float8={show(precision.float8)} gives its products in bf16, and dtype is "
            '"fp32". Set dtype = "bf16" or float8 = "tensorwise".'
        )
    if is_transformer_engine(precision.float8):
        check_transformer_engine(config, sizes)


def check_async_tp(config: JobConfig[Any, Any, Any], sizes: AxisSizes) -> None:
    """The compiler is what joins a product to its collective."""
    if sizes.tp == 1 or not config.parallel.sequence_parallel or not config.compile.enabled:
        raise UserError(
            f"[parallel] async_tp=true joins gathers and scatters of tokens to the products of "
            f"compiled blocks, but tp={sizes.tp}, sequence_parallel="
            f"{show(config.parallel.sequence_parallel)} and [compile] enabled="
            f"{show(config.compile.enabled)}. Set async_tp = false, or tp above 1 and both to true."
        )


def check_transformer_engine(config: JobConfig[Any, Any, Any], sizes: AxisSizes) -> None:
    """Its layers are no DTensors, no graphs, and remember what they have seen."""
    float8 = show(config.precision.float8)
    if config.precision.float8_emulate:
        raise UserError(
            f"[precision] float8={float8} cannot be emulated: Transformer Engine needs a GPU. "
            'Set float8 = "tensorwise" with float8_emulate = true, or float8_emulate = false.'
        )
    if sizes.tp > 1 or sizes.pp > 1:
        raise UserError(
            f"[precision] float8={float8} does not go with [parallel] tp={sizes.tp}, pp={sizes.pp}:"
            " Transformer Engine's layers take no DTensors, and exchange their largest values with "
            'ranks that hold the same layers. Set float8 = "tensorwise", or tp = 1 and pp = 1.'
        )
    if config.compile.enabled:
        raise UserError(
            f"[precision] float8={float8} does not go with [compile] enabled=true: Transformer "
            'Engine\'s layers break the graph. Set enabled = false or float8 = "tensorwise".'
        )
    if config.remat.mode in ("selective", "full"):
        raise UserError(
            f"[precision] float8={float8} does not go with [remat] mode={show(config.remat.mode)}:"
            " a second forward would count every largest value twice. "
            'Set mode = "attention" or "none", or float8 = "tensorwise".'
        )
    if importlib.util.find_spec("transformer_engine") is None:
        raise UserError(
            f"[precision] float8={float8} needs Transformer Engine, which is not installed. "
            "Install it with: pip install 'titan_dit[te]' --no-build-isolation, or set "
            'float8 = "tensorwise".'
        )


def check_device(precision: PrecisionConfig, async_tp: bool, device: torch.device) -> None:
    """Refuse what this device cannot multiply."""
    if async_tp and device.type != "cuda":
        raise UserError(
            f"[parallel] async_tp=true needs CUDA and its symmetric memory, but this is a "
            f"{device.type}. Set async_tp = false."
        )
    if precision.float8 == "off" or precision.float8_emulate:
        return
    needed, float8 = NEEDED[precision.float8], show(precision.float8)
    wanted = ".".join(map(str, needed))
    if device.type != "cuda":
        emulate = "" if is_transformer_engine(precision.float8) else "float8_emulate = true (slow, "
        emulate += "for looking at the numbers) or " if emulate else ""
        raise UserError(
            f"[precision] float8={float8} needs a GPU of compute capability {wanted}, but this is "
            f'a {device.type}. Set {emulate}float8 = "off".'
        )
    if (found := torch.cuda.get_device_capability(device)) < needed:
        able = [name for name, least in NEEDED.items() if least <= found]
        others = ", ".join(f'"{name}"' for name in ("off", *able))
        raise UserError(
            f"[precision] float8={float8} needs compute capability {wanted}, but "
            f"{torch.cuda.get_device_name(device)} has {'.'.join(map(str, found))}. "
            f"Set float8 to one of {others}."
        )


def nearest_to(precision: PrecisionConfig, device: torch.device) -> PrecisionConfig:
    """The precision of a run as this device can play it again, on any number of rows.

    Emulated where it cannot multiply in float8; without float8 if it cannot be emulated either.
    Attention by torch's choice where it lacks the kernel.
    """
    every = replace(precision, float8_layers="all")
    probe = attention.Shape(1, 64, 64, DTYPES[precision.dtype], device)
    if precision.attention != "auto" and attention.refusal(precision.attention, probe):
        attention.use_implementation("auto")
        every = replace(every, attention="auto")
    try:
        check_device(every, False, device)
    except UserError:
        lost = is_transformer_engine(precision.float8)
        return replace(every, float8="off") if lost else replace(every, float8_emulate=True)
    return every
