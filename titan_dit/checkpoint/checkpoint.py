"""One distributed checkpoint: atomic, and loadable on any layout.

torch.distributed.checkpoint (DCP) stores the tensors under their original names. After every rank
has written its shards, rank 0 writes `manifest.json` with the SHA-256 of every file. On a disk the
folder is then renamed to its final name. A folder with the final name and a manifest is complete.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException

from titan_dit.checkpoint.planning import Digests, Plans
from titan_dit.checkpoint.record import FORMAT, digest_of, read_manifest, set_aside
from titan_dit.checkpoint.staging import TensorTree
from titan_dit.checkpoint.store import MANIFEST, Location, Store, store_of
from titan_dit.checkpoint.torch_files import METADATA, Reader, Writer, WrongTable
from titan_dit.config.section import UserError
from titan_dit.ranks.failure import Disruption
from titan_dit.ranks.process_group import Failed, Ranks

OWN = "objective."
"""Prefix of the parameters of an objective's own modules, which are not the network's."""
SMALL = 4 << 20
"""Maximum bytes of a `.metadata` that every load compares with tensors.json: 0.5 s."""

LAG_S = 60.0
"""Time for the mount of another rank to show what rank 0 sees; caches of NFS last up to 60 s."""


def write(
    final: Location,
    tensors: TensorTree,
    record: Mapping[str, Any],
    ranks: Ranks | None = None,
    begin: Callable[[], None] | None = None,
    plans: Plans | None = None,
) -> None:
    """Write a checkpoint to the folder `final`. Collective; returns when it is complete.

    `begin` runs first on every rank and raises if the rank cannot take part. `plans` are those of
    the run's earlier saves. If any rank fails, Failed is raised on all ranks and the partial files
    are deleted where possible.
    """
    ranks, plans = ranks or Ranks(), plans or Plans()
    try:
        folders = ranks.run_on_all(lambda: begin_save(final, ranks, begin))
        aside = folders[0]
        local, chosen = plans.plan(tensors, ranks)
        results: list[Any] = []

        def write_chosen() -> tuple[dict[str, Any], Digests]:
            writer = Writer(aside)
            results.extend(writer.write_plan(chosen, local.planner, ranks.rank))
            return writer.written, plans.digests(results)

        outcomes = ranks.run_on_all(write_chosen)
        metadata = plans.describe(local, results, [digests for _, digests in outcomes], ranks)
        written = merge([files for files, _ in outcomes])
        last = partial(commit, aside, final, record, written, metadata)
        ranks.run_on_all(last if ranks.is_first else do_nothing)
    except Failed:
        plans.forget()
        # Collective, so that no rank reports the failure before the clean-up is done.
        ranks.run_on_all(partial(clean_up, final) if ranks.is_first else do_nothing)
        raise


def do_nothing() -> None:
    """No-op that the other ranks pass to `run_on_all` when only rank 0 acts."""


def begin_save(final: Location, ranks: Ranks, begin: Callable[[], None] | None) -> Any:
    """Run `begin`; rank 0 creates and returns the folder to write to, others return None."""
    if begin:
        begin()
    return store_of(final).begin(final) if ranks.is_first else None


def commit(
    aside: Location,
    final: Location,
    record: Mapping[str, Any],
    written: Mapping[str, Any],
    metadata: Mapping[str, bytes],
) -> None:
    """Write the metadata and the manifest, then commit the folder as `final` (rename it).

    A long embedding of the empty caption is a file, see `record.set_aside`.
    """
    store = store_of(aside)
    check_shared(store, aside, written)
    writer = Writer(aside)
    record, beside = set_aside(record)
    for name, data in {**metadata, **beside}.items():
        writer.write_whole(name, data)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    files = {**written, **writer.written}
    manifest = {"format": FORMAT, **record, "written_at": now, "files": files}
    manifest["digest"] = digest_of(manifest)
    store.write(aside / MANIFEST, json.dumps(manifest, indent=2))
    store.commit(aside, final)


def clean_up(final: Location) -> None:
    """Delete the uncommitted files of a save of `final`; a folder with a manifest stays.

    Ignores errors.
    """
    with contextlib.suppress(Exception):
        store = store_of(final)
        aside = store.aside(final)
        if aside != final or not store.has(final / MANIFEST):
            store.remove(aside)


def check_shared(store: Store, folder: Location, written: Mapping[str, Any]) -> None:
    """Raise UserError unless rank 0 sees every rank's files: the folder must be shared."""
    for name, expected in written.items():
        if not store.has(folder / name) or store.size(folder / name) != expected["bytes"]:
            raise UserError(
                f"[job] dir: {folder / name} was written by another node, but the first node "
                "does not see it. Put the run directory on a file system that all nodes share."
            )


def ignore(_: int) -> None:
    """Do nothing: the default of `read`, which gets the bytes of each file."""


def load(
    path: Location,
    tensors: TensorTree,
    *,
    verified: bool = False,
    read: Callable[[int], None] = ignore,
) -> None:
    """Load into `tensors` in place, resharding from the saved layout to theirs.

    `tensors` may be a subset of the saved names. `verified` skips the digest check; `read` gets the
    bytes of each file that it has read. Raises UserError, with `tensors` unchanged, if a file is
    damaged, a name is missing or a shape differs.
    """
    ranks = Ranks()
    if not verified:
        verify(path, ranks, read)
    check_fits(path, dict(flatten(tensors)))
    read_into(tensors, path, ranks)


def check_fits(path: Location, tensors: Mapping[str, Tensor]) -> None:
    """Raise UserError unless a checkpoint has tensors of these names and shapes."""
    saved = contents(path)
    for name, tensor in tensors.items():
        if name not in saved:
            raise UserError(
                f"[checkpoint] {path} has no tensor {name}: it is another model's. Give one of "
                "this model."
            )
        shape, _ = saved[name]
        if shape != tensor.shape:
            raise UserError(
                f"[checkpoint] {path}: {name} is {list(shape)}, but the model's is "
                f"{list(tensor.shape)}: it is another model's. Give one of this model."
            )


def open_reader(path: Location) -> Reader:
    """A reader of a checkpoint's tensors. Raises OSError or UserError if it has no manifest."""
    return Reader(path, read_manifest(path)["files"])


def read_into(tensors: TensorTree, source: Location | Reader, ranks: Ranks | None = None) -> None:
    """`load` without its checks: the tensors are known to fit, and the files to be undamaged.

    Who reads a checkpoint often gives its reader, which reads the table of tensors once: a
    checkpoint of 1,024 ranks lists a million chunks.

    Raises the exception of the first rank that failed, such as OSError.
    """
    ranks = ranks or Ranks()
    alone = ranks.count == 1
    with warnings.catch_warnings():
        # A single process loading without a process group is intended.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavail")
        try:
            reader = source if isinstance(source, Reader) else open_reader(source)
            reader.wanted = {name for name, _ in flatten(tensors)}
            state_dict_loader.load(dict(tensors), storage_reader=reader, no_dist=alone)
        except CheckpointException as error:  # A BaseException: no caller would catch it.
            cause, _ = next(iter(error.failures.values()))
            raise cause from None


def of_the_network(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Drop the parameters of an objective's own modules."""
    return {name: t for name, t in tensors.items() if not name.startswith(OWN)}


def without_own(tensors: Mapping[str, Tensor], saved: Collection[str]) -> dict[str, Tensor]:
    """Drop the parameters of the objective's modules that a checkpoint with `saved` lacks."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith(OWN) or f"model.{name}" in saved
    }


def contents(source: Location | Reader) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Map tensor name to (shape, dtype) of a checkpoint. Raises UserError or OSError."""
    reader = source if isinstance(source, Reader) else open_reader(source)
    return {name: (entry.shape, entry.dtype) for name, entry in reader.contents.tensors.items()}


def holds(path: Location, part: str) -> bool:
    """Return True if a checkpoint has tensors under a top-level key such as "optimizer"."""
    return any(name.startswith(f"{part}.") for name in contents(path))


def verify(
    path: Location, ranks: Ranks | None = None, read: Callable[[int], None] = ignore
) -> dict[str, Any]:
    """Check size and SHA-256 of every file; return the manifest. Collective.

    `read` gets the bytes of each file that has been read.
    Raises UserError on every rank if a file is damaged.
    """
    ranks = ranks or Ranks()
    record = ranks.run_on_first(lambda: read_manifest(path))
    if damaged := damaged_files(path, record, ranks, read):
        others = "an older checkpoint with --checkpoint.resume PATH"
        raise UserError(f"[checkpoint] {path} is damaged: {', '.join(damaged)}. Use {others}.")
    return record


def damaged_files(
    path: Location,
    record: Mapping[str, Any],
    ranks: Ranks,
    read: Callable[[int], None] = ignore,
    largest: float = SMALL,
) -> list[str]:
    """Names of files whose size or SHA-256 differs from the manifest; ranks share the work.

    If all are equal, the result of `wrong_contents`. What rank 0 can read is not damaged: the mount
    of another rank may lag. Raises Disruption on every rank if it still does after LAG_S.

    `read` gets the bytes of each file that has been read.
    """
    store, files, damaged = store_of(path), sorted(record["files"].items()), list[str]()
    for name, expected in files[ranks.rank :: ranks.count]:
        if not is_whole(store, path / name, expected):
            damaged.append(name)
        read(expected["bytes"])
    names = sorted(name for part in ranks.gather(damaged) for name in part)
    if names and ranks.count > 1:
        names = wrong_on_first(path, record["files"], names, damaged, ranks)
    return names or ranks.run_on_first(lambda: wrong_contents(path, record["files"], largest))


def wrong_on_first(
    path: Location, files: Mapping[str, Any], names: list[str], own: list[str], ranks: Ranks
) -> list[str]:
    """Return which of the files `names` neither the first nor the last rank can read.

    They are on different nodes, if there are several. A rank that cannot read another file waits
    for its mount. `own`: those that this rank could not read.
    """
    store = store_of(path)

    def cannot_read(those: Iterable[str]) -> list[str]:
        return [name for name in those if not can_read(name)]

    def can_read(name: str) -> bool:
        try:
            return is_whole(store, path / name, files[name])
        except OSError:  # A stale handle, too: the other ranks wait in the gather below.
            return False

    missed = cannot_read(names) if ranks.rank in (0, ranks.count - 1) else own
    first, *_, last = ranks.gather(missed)
    damaged = sorted(set(first) & set(last))
    late, deadline = [name for name in missed if name not in damaged], time.monotonic() + LAG_S
    while (late := cannot_read(late)) and time.monotonic() < deadline:
        time.sleep(LAG_S / 20)
    for rank, behind in enumerate(ranks.gather(late)):
        if behind:
            raise Disruption(
                f"[checkpoint] {path / behind[0]}: another rank can read it, rank {rank} cannot. "
                "Look at the mount of its node, and run the same command again."
            )
    return damaged


def wrong_contents(
    path: Location, files: Mapping[str, Any], largest: float = math.inf
) -> list[str]:
    """Errors in tensors.json and `.metadata`, at most one line.

    Commands read `.metadata` only in checkpoints without tensors.json, but torch's tools unpickle
    it, which can run code. So it is compared with tensors.json, if it has at most `largest` bytes.
    """
    reader = Reader(path, files)
    try:
        if files[METADATA]["bytes"] <= largest:
            reader.check_metadata()
        else:
            _ = reader.contents
    except WrongTable as error:
        return [error.what]
    return []


def is_whole(store: Store, file: Location, expected: Mapping[str, Any]) -> bool:
    """Return True if a file has the expected size and SHA-256."""
    try:
        # `has` is false for a device or a pipe, which would have no end.
        return (
            store.has(file)
            and store.size(file) == expected["bytes"]
            and describe(file)["sha256"] == expected["sha256"]
        )
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return False
    except OSError as error:
        # EIO is a bad block. Other errors (network, permission) do not mean a damaged file.
        if error.errno != errno.EIO:
            raise
        return False


def describe(path: Location) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file."""
    store = store_of(path)
    with store.open(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
    return {"bytes": store.size(path), "sha256": digest}


def flatten(tensors: TensorTree, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (dotted name, tensor) of nested dicts, with DCP's names."""
    for name, value in tensors.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge dicts with disjoint keys."""
    return {key: value for part in parts for key, value in part.items()}
