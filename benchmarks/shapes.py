"""Models and cells by name: "7B/2x8:128:4" is 8 layers of the 7B shape, 4 latents of 128 x 128."""

from __future__ import annotations

import re
from typing import Any

from titan_dit.config.section import UserError
from titan_dit.models.dit_config import SIZES, DiTConfig

TOY = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "patch_size": 2}
MODEL = r"(\w+)/(\d+)(?:x(\d+))?"


def shape_of(model: str) -> dict[str, Any]:
    """DiTConfig arguments of "XL/2", "7B/2x8" (8 layers), "toy" or "toyx1"."""
    if toy := re.fullmatch(r"toy(?:x(\d+))?", model):
        return TOY | ({"num_layers": int(toy[1])} if toy[1] else {})
    match = re.fullmatch(MODEL, model)
    if not match or match[1] not in SIZES:
        raise UserError(
            f"{model} is no model. Choose a size of {', '.join(SIZES)} with a patch, such as XL/2, "
            "and optionally a number of layers, such as 7B/2x8."
        )
    size, patch, layers = match.groups()
    if layers is None:
        return {"size": f"{size}/{patch}"}
    hidden, _, heads = SIZES[size]
    return {
        "hidden_size": hidden,
        "num_layers": int(layers),
        "num_heads": heads,
        "patch_size": int(patch),
    }


def config_of(model: str, latent_size: int) -> DiTConfig:
    """DiTConfig for latents [4, latent_size, latent_size] and 1000 classes."""
    shape = shape_of(model)
    return DiTConfig(**shape, latent_size=latent_size, in_channels=4, num_classes=1000)


def parse_cell(text: str, model: str) -> tuple[str, int, int]:
    """Parse "model:latent size:batch", or "latent size:batch" with the default `model`."""
    match = re.fullmatch(r"(?:([^:]+):)?(\d+):(\d+)", text)
    if not match:
        raise UserError(
            f"--cells {text} is not of the form latent size:batch, such as 32:256, or "
            "model:latent size:batch, such as 7B/2x8:128:8."
        )
    return match[1] or model, int(match[2]), int(match[3])
