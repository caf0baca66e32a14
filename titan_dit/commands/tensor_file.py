"""Tensors that a user gives a command in a .safetensors file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from titan_dit.section import UserError


def read_tensors(path: Path, flag: str, names: Sequence[str]) -> dict[str, Tensor]:
    """All tensors of a file; those of `names` must be there, each with at least one row."""
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{flag} {path}: not a readable safetensors file ({error}).") from None
    if missing := [name for name in names if name not in tensors]:
        raise UserError(
            f"{flag} {path}: {', '.join(missing)} missing; it must hold {', '.join(names)}."
        )
    if empty := [name for name in names if not tensors[name].numel()]:
        raise UserError(f"{flag} {path}: {', '.join(empty)} holds nothing.")
    return tensors


def check_labels(path: Path, flag: str, labels: Tensor, num_classes: int) -> None:
    """Labels are whole numbers; the number of classes itself, or a negative one, means none."""
    if labels.is_floating_point() or labels.max() > num_classes:
        raise UserError(
            f"{flag} {path}: labels must be whole numbers up to {num_classes}, which stands for "
            "no label."
        )
