"""Reading a checkpoint's files without running what may be hidden in them.

Checkpoints are passed on from hand to hand. torch loads their tensors with weights_only, but
unpickles `.metadata` as it is.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from titan_dit.section import UserError

PLAIN = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}
"""What torch's metadata is made of, beside its own classes and the names of dtypes."""


class PlainUnpickler(pickle.Unpickler):
    """Builds the metadata's own classes and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Called for everything that the file wants to import."""
        own = module == "torch.distributed.checkpoint.metadata" and "." not in name
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if own or is_dtype or (module, name) in PLAIN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


class Reader(filesystem.FileSystemReader):
    """torch's reader of a folder, with metadata that cannot run code."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.folder = path

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Which tensors there are, and where."""
        try:
            with (self.folder / ".metadata").open("rb") as file:
                metadata = PlainUnpickler(file).load()
        except Exception as error:  # Unpickling raises whatever the damage leads to.
            raise UserError(
                f"[checkpoint] {self.folder / '.metadata'} is damaged, or no plain metadata: "
                f"{error}. Nothing of it was loaded. Use another checkpoint."
            ) from None
        if not isinstance(metadata, Metadata):
            raise UserError(f"[checkpoint] {self.folder / '.metadata'} is no metadata.")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
