"""Checked reads and atomic writes of tensor files: .safetensors and .pt."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.data.class_labels import few
from titan_dit.system.files import reason_of, replacing


def read_tensors(path: Path, flag: str, names: Sequence[str]) -> dict[str, Tensor]:
    """Read all tensors of a .safetensors file; those in `names` must exist and not be empty."""
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{flag} {path}: not a readable safetensors file ({error}).") from None
    if missing := [name for name in names if name not in tensors]:
        raise UserError(
            f"{flag} {path}: {', '.join(missing)} missing; it must hold {', '.join(names)}."
        )
    if empty := [name for name in names if not tensors[name].numel()]:
        raise UserError(f"{flag} {path}: {', '.join(empty)} is empty.")
    return tensors


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write --out, a .safetensors file with metadata, or a .pt file by its suffix; atomically."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, f".{os.getpid()}") as aside:
            aside.touch()
            mode = aside.stat().st_mode  # The umask's; safetensors writes 0600.
            if path.suffix == ".safetensors":
                save_file(dict(tensors), aside, metadata=dict(metadata or {}))
            else:
                torch.save(dict(tensors), aside)
            aside.chmod(mode)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"--out {path} cannot be written: {reason_of(error)}. Free space, or name another "
            "file, and repeat the command."
        ) from None


def not_finite(rows: Tensor, first: int = 0) -> str:
    """The rows [b, ...] that hold NaN or infinity, as text, counted from `first`; "" if none."""
    if not rows.is_floating_point():
        return ""
    lost = (~rows.isfinite().unsqueeze(-1).flatten(1).all(1)).nonzero()[:, 0] + first
    return few(lost.tolist())


def check_finite(path: Path, flag: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse NaN and infinity in the inputs of a network, [b, ...] by name."""
    for name, tensor in tensors.items():
        if lost := not_finite(tensor):
            raise UserError(f"{flag} {path}: {name} of samples {lost} is NaN or infinite.")


def check_labels(path: Path, flag: str, labels: Tensor, num_classes: int) -> None:
    """Refuse non-integers and labels above num_classes; num_classes or a negative is no label."""
    if labels.is_floating_point() or labels.dtype == torch.bool or labels.max() > num_classes:
        raise UserError(
            f"{flag} {path}: labels must be integers up to {num_classes}; {num_classes} means no "
            "label."
        )
