"""Distributed checkpoints that load on any layout and are visible only when whole.

Tensors go through torch.distributed.checkpoint (DCP) under their original names. A checkpoint is
written aside; when every rank has finished, `manifest.json` with the digest of every file is
written last, and the folder is renamed into place. Whatever carries the final name is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titan_dit.section import UserError
from titan_dit.state.reader import Reader

FORMAT = "titan_dit.checkpoint/1"
MANIFEST = "manifest.json"
PARTIAL = ".partial"
NAME = re.compile(r"step-(\d{8,})")

Tensors = Mapping[str, Any]
"""Nested dicts of tensors; DTensors are saved and loaded as the shards they are."""


class Checkpoints:
    """The checkpoints of one run: `step-00000100`, `step-00000200`, ..."""

    def __init__(self, folder: Path, keep: int = 0) -> None:
        self.folder = folder
        self.keep = keep

    def whole(self) -> list[Path]:
        """Every whole checkpoint, oldest first."""
        found = self.folder.glob("step-*") if self.folder.is_dir() else []
        named = [
            path for path in found if NAME.fullmatch(path.name) and (path / MANIFEST).is_file()
        ]
        return sorted(named, key=step_of)

    def newest(self) -> Path | None:
        """The whole checkpoint of the highest step, if there is one."""
        return next(reversed(self.whole()), None)

    def save(self, step: int, tensors: Tensors, record: Mapping[str, Any]) -> Path:
        """Write the checkpoint of `step`; every rank calls, and returns when it is in place.

        `record` holds plain values: step, cursor, counters, config.
        """
        path = self.folder / f"step-{step:08d}"
        write(path, tensors, record)
        if rank() == 0:
            self.prune()
        return path

    def prune(self) -> None:
        """Delete all but the newest `keep` checkpoints, and what an interrupted save left."""
        stale = self.whole()[: -self.keep] if self.keep else []
        for path in (*stale, *self.folder.glob(f"step-*{PARTIAL}")):
            shutil.rmtree(path, ignore_errors=True)


def write(final: Path, tensors: Tensors, record: Mapping[str, Any]) -> None:
    """Write a checkpoint as the folder `final`; every rank calls, and returns when it is whole."""
    partial = final.with_name(final.name + PARTIAL)
    if rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    barrier()
    with warnings.catch_warnings():
        # Said whenever one process saves without a process group, which is meant.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavail")
        state_dict_saver.save(
            dict(tensors), checkpoint_id=partial, no_dist=not dist.is_initialized()
        )
    written = merge(gather({path.name: describe(path) for path in own_files(partial)}))
    if rank() == 0:
        check_all_are_here(partial, written)
        manifest = {"format": FORMAT, **record, "files": written}
        manifest["digest"] = digest_of(manifest)
        write_durably(partial / MANIFEST, json.dumps(manifest, indent=2))
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        sync_folder(final.parent)
    barrier()


def read_record(path: Path) -> dict[str, Any]:
    """The plain values of a checkpoint: what was given to `save` as its record, and `files`."""
    manifest = path / MANIFEST
    if not manifest.is_file():
        raise UserError(
            f"[checkpoint] {path} is no checkpoint: it has no {MANIFEST}. Give a folder such as "
            "outputs/RUN/checkpoints/step-00001000."
        )
    try:
        record = json.loads(manifest.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"[checkpoint] {manifest} is damaged: {error}. Use another one.") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise UserError(f"[checkpoint] {manifest} is not of the format {FORMAT}.")
    if record.pop("digest", None) != digest_of(record):
        raise UserError(f"[checkpoint] {manifest} is damaged: its digest differs. Use another one.")
    return record


def digest_of(record: Mapping[str, Any]) -> str:
    """SHA-256 of plain values, whatever the order of their keys."""
    text = json.dumps(record, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def load(path: Path, tensors: Tensors) -> None:
    """Fill `tensors` in place, whatever layout they are on and whatever layout was saved.

    A subset of the saved names may be asked for. Raises UserError where a file is damaged, a name
    is missing or a shape differs; `tensors` are untouched then.
    """
    verify(path)
    saved = Reader(path).read_metadata().state_dict_metadata
    for name, tensor in flatten(tensors):
        entry = saved.get(name)
        if not isinstance(entry, TensorStorageMetadata):
            raise UserError(f"[checkpoint] {path} has no tensor {name}: it is of another model.")
        if entry.size != tensor.shape:
            raise UserError(
                f"[checkpoint] {path}: {name} is {list(entry.size)}, but the model's is "
                f"{list(tensor.shape)}: it is of another model."
            )
    with warnings.catch_warnings():
        # Said whenever one process loads without a process group, which is meant.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavail")
        state_dict_loader.load(
            dict(tensors), storage_reader=Reader(path), no_dist=not dist.is_initialized()
        )


def holds(path: Path, part: str) -> bool:
    """Whether a checkpoint has tensors under a top-level name, such as "optimizer"."""
    saved = Reader(path).read_metadata().state_dict_metadata
    return any(name.startswith(f"{part}.") for name in saved)


def verify(path: Path) -> None:
    """Compare every file with the manifest's bytes and digest; the ranks share the work."""
    files = sorted(read_record(path)["files"].items())
    damaged = [
        name
        for name, expected in files[rank() :: num_ranks()]
        if not (path / name).is_file() or describe(path / name) != expected
    ]
    damaged = sorted(name for part in gather(damaged) for name in part)
    if damaged:
        others = "an older checkpoint with --checkpoint.resume PATH"
        raise UserError(f"[checkpoint] {path} is damaged: {', '.join(damaged)}. Use {others}.")


def flatten(tensors: Tensors, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """(dotted name, tensor) for nested dicts, named as DCP names them."""
    for name, value in tensors.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    match = NAME.fullmatch(path.name)
    assert match, path
    return int(match[1])


def describe(path: Path) -> dict[str, Any]:
    """Bytes and SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def check_all_are_here(folder: Path, written: Mapping[str, Any]) -> None:
    """The first rank must see what every rank has written, or no one could load it."""
    for name, expected in written.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != expected["bytes"]:
            raise UserError(
                f"[job] dir: {folder / name} was written by another node and is not to be seen "
                "from the first one. The run directory must lie on a disk that all nodes share."
            )


def own_files(folder: Path) -> list[Path]:
    """The files that this rank has written (DCP names them by rank); rank 0 also the metadata."""
    files = list(folder.glob(f"__{rank()}_*"))
    return [*files, folder / ".metadata"] if rank() == 0 else files


def write_durably(path: Path, text: str) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until a rename inside `path` is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rank() -> int:
    """This rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def barrier() -> None:
    """Wait for every rank."""
    if dist.is_initialized():
        dist.barrier()


def gather(value: Any) -> list[Any]:
    """Every rank's `value`, on every rank."""
    values = [value] * num_ranks()
    if dist.is_initialized():
        dist.all_gather_object(values, value)
    return values


def merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One dict of several with different keys."""
    return {key: value for part in parts for key, value in part.items()}
