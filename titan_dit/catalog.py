"""The only tables from names to things. Adding one is a file of its own and a line here.

Entries are imported when asked for, so that a config is read without importing what it does not
use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from titan_dit.config_file import nearest
from titan_dit.section import Section, UserError, show

if TYPE_CHECKING:  # Reading a config must not import torch before it has to.
    from collections.abc import Callable

    from titan_dit.parallel.tensor import TensorPlan
    from titan_dit.samplers.base import Sampler

SECTIONS = {
    "model": {
        "dit": "titan_dit.models.dit:DiTConfig",
    },
    "objective": {
        "ddpm": "titan_dit.objectives.ddpm:DDPM",
        "rectified_flow": "titan_dit.objectives.rectified_flow:RectifiedFlow",
    },
    "data": {
        "digits": "titan_dit.data.latents:Digits",
        "latents": "titan_dit.data.latents:Latents",
        "synthetic": "titan_dit.data.synthetic:Synthetic",
    },
}

# Objective -> the samplers that go with it; the first one is what "auto" takes.
SAMPLERS = {
    "ddpm": {
        "ddim": "titan_dit.samplers.diffusion:ddim",
        "ddpm": "titan_dit.samplers.diffusion:ddpm",
    },
    "rectified_flow": {
        "heun": "titan_dit.samplers.ode:heun",
        "euler": "titan_dit.samplers.ode:euler",
    },
}


# Model -> how it is cut along the tensor-parallel axis.
TENSOR_PLANS = {
    "dit": "titan_dit.parallel.plans.dit:plan",
}


def variant(section: str, name: str) -> type[Section]:
    """The dataclass that reads [section] when its name is `name`."""
    found: type[Section] = look_up(SECTIONS[section], f"[{section}] name", name)
    return found


def sampler(name: str, objective: str, where: str = "[sampling] sampler") -> Sampler:
    """The sampler called `name` ("auto" chooses) for networks trained by an objective."""
    table = SAMPLERS[objective]
    if name not in table and any(name in others for others in SAMPLERS.values()):
        raise UserError(
            f"{where}={show(name)} does not fit [objective] name={show(objective)}. "
            f"Valid: auto, {', '.join(table)}."
        )
    found: Sampler = look_up(table, where, next(iter(table)) if name == "auto" else name)
    return found


def tensor_plan(model: str) -> Callable[[bool], TensorPlan]:
    """The tensor-parallel plan of a model: a function of whether tokens are sharded too."""
    found: Callable[[bool], TensorPlan] = look_up(TENSOR_PLANS, "[model] name", model)
    return found


def look_up(table: dict[str, str], where: str, name: str) -> Any:
    """Import what `name` stands for in a table."""
    if name not in table:
        raise UserError(f"{where}={show(name)} is unknown.{nearest(name, table)}")
    module, _, attribute = table[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
