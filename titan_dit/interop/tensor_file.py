"""Files of tensors: .safetensors and .pt, read with every check and written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.system.files import replacing


def read_tensors(path: Path, flag: str, names: Sequence[str]) -> dict[str, Tensor]:
    """All tensors of a .safetensors file; those of `names` must be there, with at least one row."""
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


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a .safetensors file (metadata goes with it) or, by its name, a .pt file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, f".{os.getpid()}") as aside:
            aside.touch()
            mode = aside.stat().st_mode  # As the umask wants it, where safetensors writes 0600.
            if path.suffix == ".safetensors":
                save_file(dict(tensors), aside, metadata=dict(metadata or {}))
            else:
                torch.save(dict(tensors), aside)
            aside.chmod(mode)
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise UserError(f"{path} cannot be written: {reason}.") from None


def check_labels(path: Path, flag: str, labels: Tensor, num_classes: int) -> None:
    """Labels are whole numbers; the number of classes itself, or a negative one, means none."""
    if labels.is_floating_point() or labels.dtype == torch.bool or labels.max() > num_classes:
        raise UserError(
            f"{flag} {path}: labels must be whole numbers up to {num_classes}, which stands for "
            "no label."
        )
