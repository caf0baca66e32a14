"""Training steps that `gpu.py` compares: a plain DiT's and titan_dit's, on one cell."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import plain_dit
import torch
from meter import Meter
from ours import network, randomize, trainer_step
from torch import Tensor

from titan_dit import train
from titan_dit.checks.device import check_matmuls
from titan_dit.config.layout import CompileConfig, ParallelConfig, PrecisionConfig
from titan_dit.config.section import UserError
from titan_dit.diffusion.sections import DiffusionConfig, RectifiedFlowConfig
from titan_dit.kernels import attention
from titan_dit.kernels.attention_choice import AttentionShape
from titan_dit.models.dit_config import DiTConfig
from titan_dit.optim.sections import MuonConfig
from titan_dit.parallel.float8 import LinearShape, device_of, is_converted, linears
from titan_dit.parallel.mesh import AxisSizes, Mesh
from titan_dit.parallel.tensor_plans.dit import plan

Row = dict[str, Any]
Step = Callable[[], Tensor]

OBJECTIVES: dict[str, tuple[DiffusionConfig, plain_dit.Learn]] = {
    "rectified_flow": (RectifiedFlowConfig(), plain_dit.RectifiedFlow()),
}
"""Objectives by name: (titan_dit's, the plain network's)."""

BF16 = PrecisionConfig(dtype="bf16")


@dataclass(frozen=True)
class Cell:
    """A model, a batch size and an objective."""

    config: DiTConfig
    batch: int
    objective: str = "rectified_flow"
    model: str = ""
    """In the notation of shapes.py."""

    @property
    def key(self) -> Row:
        """Key columns of this cell in a row."""
        return {"model": self.model, "tokens": self.config.token_shape[0], "batch": self.batch}

    @functools.cached_property
    def tflop(self) -> float:
        """Model TFLOPs of a step, by the `flops_per_sample` of our model, for every contender."""
        objective, _ = OBJECTIVES[self.objective]
        model = network(self.config, objective)
        return model.flops_per_sample(self.config.token_shape[0]) * self.batch / 1e12


@dataclass(frozen=True)
class Place:
    """The device, its mesh and its meter; the folder of the original DiT's files."""

    device: torch.device
    mesh: Mesh
    meter: Meter
    original: Path | None = None


def plain(cell: Cell, place: Place, *, compiled: bool) -> Step:
    """The plain DiT as its users train it: fp32 weights, autocast to bf16."""
    _, learn = OBJECTIVES[cell.objective]
    with place.device:
        model = plain_dit.PlainDiT(cell.config, learn.output_channels(cell.config.in_channels))
    return trained(model, cell, compiled=compiled)


def original(cell: Cell, place: Place) -> Step:
    """The network of facebookresearch/DiT's models.py, trained and compiled as `plain`.

    UserError without a clone or without what it imports.
    """
    _, learn = OBJECTIVES[cell.objective]
    with place.device:
        model = plain_dit.original(cell.config, learn, place.original)
    return trained(model, cell, compiled=True)


def trained(model: plain_dit.Network, cell: Cell, *, compiled: bool) -> Step:
    """A step of a network under autocast to bf16, with EMA."""
    _, learn = OBJECTIVES[cell.objective]
    randomize(list(model.parameters()))
    if compiled:
        for block in model.blocks:
            block.compile()
    return plain_dit.training_step(
        model, cell.config, cell.batch, learn, autocast=torch.bfloat16, ema=True
    )


def ours(cell: Cell, place: Place, *, compiled: bool, **changes: Any) -> Step:
    """titan_dit's training step; `changes` are keywords of `trainer_step`."""
    objective, _ = OBJECTIVES[cell.objective]
    config, batch = cell.config, cell.batch
    return trainer_step(
        config, batch, place.device, objective, place.mesh, compiled=compiled, **changes
    )


def with_attention(cell: Cell, place: Place, *, key: str) -> Step:
    """Compiled, with a given attention kernel of torch; UserError if unsupported."""
    hidden, _, heads, _ = cell.config.shape
    tokens, head_dim = cell.config.token_shape[0], hidden // heads
    attention.check_runs(key, AttentionShape(heads, tokens, head_dim, torch.bfloat16, place.device))
    precision = PrecisionConfig(dtype="bf16", attention=key)  # type: ignore[arg-type]
    return ours(cell, place, compiled=True, precision=precision)


def float8(cell: Cell, place: Place, *, recipe: str) -> Step:
    """Compiled, with float8 products; UserError if unsupported or if no layer would take float8.

    Without a GPU float8 is emulated in every layer, as a smoke test.
    """
    if importlib.util.find_spec("torchao") is None:
        raise UserError("torchao is not installed")
    on_gpu = place.device.type == "cuda"
    settings: dict[str, Any] = {} if on_gpu else {"float8_emulate": True, "float8_layers": "all"}
    precision = PrecisionConfig(dtype="bf16", float8=recipe, **settings)  # type: ignore[arg-type]
    check_matmuls(precision, False, place.device)
    device = device_of(place.device.type)
    if not any(is_converted(shape, precision, device) for shape in linears_of(cell).values()):
        raise UserError(
            f'[precision] float8_layers = "auto" converts no layer to {recipe}: by its table or '
            "roofline none would be faster. The step would be that of bf16"
        )
    return ours(cell, place, compiled=True, precision=precision)


def linears_of(cell: Cell) -> dict[str, LinearShape]:
    """A block's linear layers over tokens, on one rank, by name within the block."""
    objective, _ = OBJECTIVES[cell.objective]
    rows = cell.batch * cell.config.token_shape[0]
    found = linears(network(cell.config, objective), plan(True), AxisSizes(), rows)
    return {name.split(".", 2)[2]: shape for name, shape in found.items()}


def changed(
    cell: Cell,
    place: Place,
    *,
    layout: dict[str, Any] | None = None,
    compiling: dict[str, Any] | None = None,
    fsdp: bool = False,
) -> Step:
    """Compiled, with keys of [parallel] and [compile]; UserError if this version lacks one."""
    for kind, keys in ((ParallelConfig, layout), (CompileConfig, compiling)):
        if unknown := (keys or {}).keys() - {field.name for field in fields(kind)}:
            raise UserError(f"[{kind.section}] has no {', '.join(sorted(unknown))}")
    return ours(cell, place, compiled=True, layout=layout, compiling=compiling, fsdp=fsdp)


def muon(cell: Cell, place: Place) -> Step:
    """Compiled, with Muon for AdamW."""
    return ours(cell, place, compiled=True, optimizer_config=MuonConfig())


def graphs(cell: Cell, place: Place) -> Step:
    """Compiled, replayed as CUDA graphs; UserError without a GPU."""
    if place.device.type != "cuda":
        raise UserError("[compile] cuda_graphs=true needs a GPU")
    return ours(cell, place, compiled=True, cuda_graphs=True)


CONTENDERS: dict[str, Callable[[Cell, Place], Step]] = {
    "plain": partial(plain, compiled=False),
    "plain_compiled": partial(plain, compiled=True),
    "original_compiled": original,
    "ours_compiled": partial(ours, compiled=True),
    "ours_float8_tensorwise": partial(float8, recipe="tensorwise"),
    "ours_float8_rowwise": partial(float8, recipe="rowwise"),
    "ours": partial(ours, compiled=False),
    "ours_compiled_cudnn": partial(with_attention, key="cudnn"),
    "ours_compiled_flash": partial(with_attention, key="flash"),
    "ours_compiled_fsdp": partial(changed, fsdp=True),
    "ours_compiled_resharded": partial(ours, compiled=True, reshard="always", fsdp=True),
    "ours_compiled_cuda_graphs": graphs,
    "ours_compiled_units_of_one": partial(changed, layout={"blocks_per_fsdp_unit": 1}, fsdp=True),
    "ours_compiled_eager_objective": partial(changed, compiling={"objective": False}),
    "ours_compiled_muon": muon,
    "ours_compiled_plain_allocator": partial(ours, compiled=True),
    "ours_compiled_ends": partial(ours, compiled=True, ends=True),
}
"""All contenders; gpu_plan.py has their order."""
PLAIN: dict[str, str | None] = dict.fromkeys(train.SETTINGS, "expandable_segments:False")
ENVIRONMENT: dict[str, dict[str, str | None]] = {
    "ours_compiled_plain_allocator": PLAIN,
    "ours_compiled_cuda_graphs": PLAIN,
}
"""Environment variables of a contender's process. A run leaves segments plain for CUDA graphs."""
