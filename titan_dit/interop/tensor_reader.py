"""Read files of tensors one tensor at a time, without executing code from them."""

from __future__ import annotations

import argparse
import pickle
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from titan_dit.checkpoint.store import Location
from titan_dit.config.section import UserError
from titan_dit.data.files import check_unpacked
from titan_dit.interop.on_demand import OnDemand
from titan_dit.system.files import reason_of

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
MAPPED = 128 * 2**20
"""Bytes of a .pt file that are read before its pages are released."""


def open_safetensors(path: Path) -> tuple[OnDemand, dict[str, str]]:
    """The tensors and the metadata of a file. Raises SafetensorError or OSError on failure."""
    outline = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            part = file.get_slice(name)
            kind = DTYPES.get(part.get_dtype())
            # A dtype that no network of ours has: its outline is the tensor itself.
            known = file.get_tensor(name) if kind is None else None
            outline[name] = (
                torch.empty(part.get_shape(), dtype=kind, device="meta") if known is None else known
            )
        metadata = dict(file.metadata() or {})

    def get(name: str) -> Tensor:
        # Opened anew: the pages of a file that stays mapped count as this process's memory.
        with reading(path), safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    return OnDemand(outline, get), metadata


@contextmanager
def reading(path: Location) -> Iterator[None]:
    """Turn an error of reading tensors into one line that names their file or checkpoint."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {reason_of(error)}.") from None


class Pickled:
    """A .pt file, memory-mapped. A file of torch before 1.6 cannot be mapped and is held whole."""

    def __init__(self, path: Path) -> None:
        self.path, self.read, self.is_mapped = path, 0, True
        self.content: Mapping[str, Any] | None = None

    def whole(self) -> Mapping[str, Any]:
        """The content. Raises UserError for code, a damaged file, or anything but a dict."""
        if self.content is None:
            self.content = self.load()
        return self.content

    def load(self) -> Mapping[str, Any]:
        """Call torch.load with weights_only=True, which executes no code."""
        try:
            content = self.torch_load()
        except pickle.UnpicklingError as error:
            asked = re.search(r"GLOBAL ([\w.]+)", str(error))
            why = f"it imports {asked[1]}" if asked else "it is not a plain pickle"
            raise UserError(
                f"{self.path}: not a file of plain weights: {why}. Loading it can execute code, so "
                "it was not loaded. Save only the state dict: torch.save(model.state_dict(), FILE)."
            ) from None
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {reason_of(error)}.") from None
        except Exception as error:  # torch.load raises any exception on a damaged file.
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise UserError(
                f"{self.path}: damaged, or not written by torch.save ({reason})."
            ) from None
        if not isinstance(content, Mapping):
            raise UserError(f"{self.path}: holds a {type(content).__name__}, not a state dict.")
        return content

    def torch_load(self) -> Any:
        """Call torch.load, memory-mapped unless the file's format is older than torch 1.6."""
        check_unpacked(self.path, self.path.stat().st_size)
        # DiT's train.py stores its argparse.Namespace with the weights; it holds plain values.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of pickle protocols.
            if self.is_mapped:
                try:
                    return torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
                except RuntimeError as error:
                    if "mmap" not in str(error):
                        raise
                    self.is_mapped = False
            return torch.load(self.path, map_location="cpu", weights_only=True)

    def get(self, *keys: Any) -> Tensor:
        """A copy of a tensor of the content."""
        found: Any = self.whole()
        for key in keys:
            found = found[key]
        with reading(self.path):
            tensor = torch.as_tensor(found).clone()
        self.read += tensor.nbytes
        del found
        if self.is_mapped and self.read > MAPPED:
            # The pages of a file that stays mapped count as this process's memory.
            self.content, self.read = None, 0
        return tensor
