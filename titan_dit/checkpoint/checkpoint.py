"""One checkpoint: distributed, of any layout for any layout, and visible only when whole.

Tensors go through torch.distributed.checkpoint (DCP) under their original names. When every rank
has written its own, `manifest.json` with the digest of every file is written last; on a disk the
folder gets its name only then. Whatever has the name and the manifest is whole.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titan_dit.checkpoint.staging import Tensors, leaves
from titan_dit.checkpoint.store import MANIFEST, Place, Store, read_text, store_of
from titan_dit.checkpoint.torch_files import Reader, Writer
from titan_dit.config.section import UserError
from titan_dit.launcher.ranks import Failed, Ranks

FORMAT = "titan_dit.checkpoint/1"


class Damaged(UserError):
    """What was once a checkpoint, as far as one can tell."""


def write(
    final: Place,
    tensors: Tensors,
    record: Mapping[str, Any],
    ranks: Ranks | None = None,
    begin: Callable[[], None] | None = None,
) -> None:
    """Write a checkpoint as the folder `final`; every rank calls, and returns when it is whole.

    `begin` is asked first, on every rank, whether it can take part. Raises Failed on all ranks
    where one fails; nothing is left of the attempt then, as far as the store lets us.
    """
    ranks = ranks or Ranks()
    try:
        begun = ranks.together(lambda: begin_on(final, ranks, begin))
        aside = begun[0]
        on_cpu = all(tensor.device.type == "cpu" for tensor in leaves(tensors))
        # By itself: a rank that cannot reach the store must not leave the others within DCP.
        writers: list[Writer] = []
        ranks.together(lambda: writers.append(Writer(aside, on_cpu=on_cpu)))
        written = merge(ranks.together(lambda: write_tensors(writers[0], tensors, ranks)))
        last = partial(commit, aside, final, record, written)
        ranks.together(last if ranks.is_first else nothing)
    except Failed:
        # Together, so that no rank says it is over while there is still something left.
        ranks.together(partial(clean_up, final) if ranks.is_first else nothing)
        raise


def nothing() -> None:
    """What the other ranks do while the first one acts for all."""


def begin_on(final: Place, ranks: Ranks, begin: Callable[[], None] | None) -> Any:
    """Where to write, made by the first rank."""
    if begin:
        begin()
    return store_of(final).begin(final) if ranks.is_first else None


def write_tensors(writer: Writer, tensors: Tensors, ranks: Ranks) -> dict[str, Any]:
    """Write this rank's part; the bytes and SHA-256 of its files."""
    with warnings.catch_warnings():
        # Said whenever one process saves by itself, which is meant.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavail")
        state_dict_saver.save(
            dict(tensors),
            storage_writer=writer,
            process_group=ranks.group,
            no_dist=ranks.count == 1,
        )
    return writer.written


def commit(
    aside: Place, final: Place, record: Mapping[str, Any], written: Mapping[str, Any]
) -> None:
    """Write the manifest, and give the folder its name."""
    store = store_of(aside)
    check_all_are_here(store, aside, written)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    manifest = {"format": FORMAT, **record, "written_at": now, "files": dict(written)}
    manifest["digest"] = digest_of(manifest)
    store.write(aside / MANIFEST, json.dumps(manifest, indent=2))
    store.commit(aside, final)


def clean_up(final: Place) -> None:
    """Delete what a failed save has left, if that can be done."""
    with contextlib.suppress(Exception):
        store = store_of(final)
        aside = store.aside(final)
        if aside != final or not store.has(final / MANIFEST):
            store.remove(aside)


def check_all_are_here(store: Store, folder: Place, written: Mapping[str, Any]) -> None:
    """The first rank must see what every rank has written, or no one could load it."""
    for name, expected in written.items():
        if not store.has(folder / name) or store.size(folder / name) != expected["bytes"]:
            raise UserError(
                f"[job] dir: {folder / name} was written by another node and is not to be seen "
                "from the first one. The run directory must lie on a disk that all nodes share."
            )


def read_record(path: Place) -> dict[str, Any]:
    """The plain values of a checkpoint: what was given to `write` as its record, and `files`."""
    manifest = path / MANIFEST
    if not store_of(path).has(manifest):
        raise UserError(
            f"[checkpoint] {path} is no checkpoint: it has no {MANIFEST}. Give a folder such as "
            "outputs/RUN/checkpoints/step-00001000."
        )
    try:
        record = json.loads(read_text(manifest))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(f"[checkpoint] {manifest} is damaged: {error}. Use another one.") from None
    sealed = isinstance(record, dict) and record.pop("digest", None) == digest_of(record)
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        kind = UserError if sealed else Damaged
        raise kind(f"[checkpoint] {manifest} is not of the format {FORMAT}.")
    if not sealed:
        raise Damaged(f"[checkpoint] {manifest} is damaged: its digest differs. Use another one.")
    return record


def digest_of(record: Mapping[str, Any]) -> str:
    """SHA-256 of plain values, whatever the order of their keys."""
    text = json.dumps(record, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def load(path: Place, tensors: Tensors, *, verified: bool = False) -> None:
    """Fill `tensors` in place, whatever layout they are on and whatever layout was saved.

    A subset of the saved names may be asked for. Raises UserError where a file is damaged (unless
    that was looked into before), a name is missing or a shape differs; `tensors` are untouched
    then.
    """
    ranks = Ranks()
    if not verified:
        verify(path, ranks)
    saved = contents(path)
    for name, tensor in flatten(tensors):
        if name not in saved:
            raise UserError(f"[checkpoint] {path} has no tensor {name}: it is of another model.")
        shape, _ = saved[name]
        if shape != tensor.shape:
            raise UserError(
                f"[checkpoint] {path}: {name} is {list(shape)}, but the model's is "
                f"{list(tensor.shape)}: it is of another model."
            )
    with warnings.catch_warnings():
        # Said whenever one process loads by itself, which is meant.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavail")
        state_dict_loader.load(dict(tensors), storage_reader=Reader(path), no_dist=ranks.count == 1)


def contents(path: Place) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and format of every tensor of a checkpoint, by its name."""
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in Reader(path).read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def holds(path: Place, part: str) -> bool:
    """Whether a checkpoint has tensors under a top-level name, such as "optimizer"."""
    return any(name.startswith(f"{part}.") for name in contents(path))


def verify(path: Place, ranks: Ranks | None = None) -> dict[str, Any]:
    """Compare every file with the manifest's bytes and digest; the record. Every rank calls."""
    ranks = ranks or Ranks()
    record = ranks.first(lambda: read_record(path))
    if damaged := damaged_files(path, record, ranks):
        others = "an older checkpoint with --checkpoint.resume PATH"
        raise UserError(f"[checkpoint] {path} is damaged: {', '.join(damaged)}. Use {others}.")
    return record


def damaged_files(path: Place, record: Mapping[str, Any], ranks: Ranks) -> list[str]:
    """Names of the files that are not what the manifest says; the ranks share the work."""
    store, files = store_of(path), sorted(record["files"].items())
    mine = files[ranks.rank :: ranks.count]
    damaged = [name for name, expected in mine if not is_whole(store, path / name, expected)]
    return sorted(name for part in ranks.gather(damaged) for name in part)


def is_whole(store: Store, file: Place, expected: Mapping[str, Any]) -> bool:
    """Whether a file has the bytes and the digest that are expected of it."""
    try:
        return store.size(file) == expected["bytes"] and describe(file) == expected
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return False
    except OSError as error:
        # A bad block. What else there is (no network, no permission) says nothing of the file.
        if error.errno != errno.EIO:
            raise
        return False


def describe(path: Place) -> dict[str, Any]:
    """Bytes and SHA-256 of a file."""
    store = store_of(path)
    with store.open(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
    return {"bytes": store.size(path), "sha256": digest}


def flatten(tensors: Tensors, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """(dotted name, tensor) for nested dicts, named as DCP names them."""
    for name, value in tensors.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One dict of several with different keys."""
    return {key: value for part in parts for key, value in part.items()}
