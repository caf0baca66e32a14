"""manifest.json of a checkpoint: its files with their digests, and the record of the run.

A long embedding of the empty caption is a file of its own, so that a manifest stays small.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from titan_dit.checkpoint.store import MANIFEST, Location, read_text, store_of
from titan_dit.checkpoint.torch_files import METADATA
from titan_dit.config import schema, user_text
from titan_dit.config.schema import COUNT, Each, Maybe, OrNone, Row, Rows, Ruled
from titan_dit.config.section import Finite, PositiveInt, UserError

FORMAT = "titan_dit.checkpoint/1"
HEX = frozenset("0123456789abcdef")
EMPTY_CAPTION = "empty_caption.f32"
"""File of the record's `data.text.null`, as little-endian float32 values; its name stands there."""
LONG = 1 << 15
"""Bytes of an embedding from which on it is a file."""
MOST = 1 << 28
"""Maximum bytes of the file: 17 times the size for FLUX.2 klein."""


class Damaged(UserError):
    """A checkpoint with a corrupt manifest; `what` is wrong with it."""

    def __init__(self, path: Location, what: str) -> None:
        self.what = what.rstrip(".")
        super().__init__(
            f"[checkpoint] {path / MANIFEST} is damaged: {self.what}. Use another one."
        )


def wrong_digest(text: str) -> str | None:
    """Message about a value that is no SHA-256; None if it is one."""
    return None if len(text) == 64 and HEX.issuperset(text) else "is not a SHA-256 in hex"


def wrong_time(text: str) -> str | None:
    """Message about a value that is no time; None if it is one."""
    try:
        return None if datetime.fromisoformat(text).tzinfo else "has no time zone"
    except ValueError:
        return "is not a time such as 2026-01-31T12:00:00+00:00"


FILES = {"files": Each({"bytes": COUNT, "sha256": Ruled(str, wrong_digest)}, schema.wrong_name)}
GUARD = {
    **dict.fromkeys(("spike_steps", "overflow_steps", "in_a_row"), Maybe(COUNT)),
    **dict.fromkeys(("nan_steps", "num_good", "num_losses"), Maybe(COUNT)),
    "average": Maybe(float),
    "smooth_loss": Maybe(OrNone(float)),
    "streak": Maybe(OrNone(Row((COUNT, COUNT)))),
    "loss_scale": Maybe({"value": Finite, "num_good": Finite, "tolerated": Finite}),
}
LEDGER = {
    "skipped": Maybe(Rows((COUNT, COUNT, str))),
    "untrained": Maybe(Rows((COUNT, COUNT, COUNT, COUNT))),
    "samples_per_epoch": Maybe(PositiveInt),
}
AVERAGES = {
    "decays": tuple[Finite, ...],
    "power": Maybe(tuple[Finite, ...]),
    "every": Maybe(PositiveInt),
}
RECORD = {
    "step": COUNT,
    "cursor": COUNT,
    "nan_steps": Maybe(COUNT),
    "guard": Maybe(GUARD),
    "ledger": Maybe(LEDGER),
    "config": {
        **{section: {"name": str} for section in ("model", "objective", "data")},
        "optimizer": {"name": Maybe(str)},
        "job": {},
        "checkpoint": {"resume": str},
        "ema": AVERAGES,
    },
    "config_format": Maybe(COUNT),
    "data": {"count": COUNT, "digest": str, "class_names": Maybe(OrNone(tuple[str, ...]))},
    "imported": Maybe(bool),
    "averaged": Maybe({"run": str, "step": COUNT, "sigma_rel": Finite}),
    "layout": Maybe(str),
    "versions": Maybe(Each(str)),
    "written_at": Maybe(Ruled(str, wrong_time)),
}
"""The record of a run; the sections of its config check their own keys when they are built."""


def read_manifest(path: Location) -> dict[str, Any]:
    """Read the manifest, and check its digest and its `files`.

    Raises UserError if there is none, Damaged if it is not as it was written or names wrong files.
    """
    manifest = path / MANIFEST
    if not store_of(path).has(manifest):
        raise UserError(
            f"[checkpoint] {path} is not a checkpoint: it has no {MANIFEST}. Give a folder such as "
            "outputs/RUN/checkpoints/step-00001000."
        )
    if store_of(path).size(manifest) > schema.LARGEST:
        raise Damaged(path, f"it has more than {schema.LARGEST >> 20} MiB")
    try:
        record = user_text.parse_json(read_text(manifest), unique=True)
        digest = record.pop("digest", None) if isinstance(record, dict) else None
        sealed = digest is not None and digest == digest_of(record)
    except (ValueError, RecursionError) as error:
        raise Damaged(path, str(error)) from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        what = (
            f"[checkpoint] {manifest} does not have the format {FORMAT}. Read it with the version "
            "of titan_dit that wrote it."
        )
        # A whole manifest of another format is a later version's.
        raise UserError(what) if sealed else Damaged(path, f"it does not have the format {FORMAT}")
    if not sealed:
        raise Damaged(path, "its digest differs")
    check(path, record, FILES)
    if METADATA not in record["files"]:
        raise Damaged(path, f"its files do not name {METADATA}")
    return record


def read_record(path: Location) -> dict[str, Any]:
    """Read the manifest of a run's checkpoint: the record, plus `format`, `written_at`, `files`.

    Raises as `read_manifest`, also for a missing key and a wrong type or number.
    """
    record = read_manifest(path)
    check(path, record, RECORD)
    check(path, record, {"config": Each(Each(schema.PLAIN))})
    put_back(path, record)
    return record


def set_aside(record: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, bytes]]:
    """(a record for a manifest, the files beside it): inverse of `put_back`."""
    data = record.get("data", {})
    text = data.get("text") or {}
    try:
        null = base64.b64decode(text.get("null", ""), validate=True)
    except ValueError:  # It is refused where it is read.
        null = b""
    if len(null) < LONG:
        return dict(record), {}
    short = {**data, "text": {**text, "null": EMPTY_CAPTION}}
    return {**record, "data": short}, {EMPTY_CAPTION: null}


def put_back(path: Location, record: dict[str, Any]) -> None:
    """Read the file of the empty caption into a record that names it. Raises Damaged."""
    text = record["data"].get("text")
    if not isinstance(text, dict) or text.get("null") != EMPTY_CAPTION:
        return
    file, entry = path / EMPTY_CAPTION, record["files"].get(EMPTY_CAPTION)
    store = store_of(file)
    if entry is None or not store.has(file) or store.size(file) != entry["bytes"]:
        raise Damaged(path, f"{EMPTY_CAPTION} is missing or has another size")
    if entry["bytes"] > MOST:
        raise Damaged(path, f"{EMPTY_CAPTION} has more than {MOST >> 20} MiB")
    with store.open(file) as opened:
        null = opened.read()
    if hashlib.sha256(null).hexdigest() != entry["sha256"]:
        raise Damaged(path, f"the digest of {EMPTY_CAPTION} differs")
    text["null"] = base64.b64encode(null).decode()


def check(path: Location, record: Mapping[str, Any], keys: Mapping[str, Any]) -> None:
    """Raise Damaged unless a record fits a schema."""
    for key, inner in keys.items():
        try:
            schema.check({key: record[key]} if key in record else {}, {key: inner}, "")
        except UserError as error:
            raise Damaged(path, str(error).strip()) from None


def digest_of(record: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON-serialisable mapping, independent of key order."""
    text = json.dumps(record, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
