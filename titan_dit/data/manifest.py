"""manifest.json: metadata of a folder of shards or of latent files."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from titan_dit.config import schema, user_text
from titan_dit.config.section import (
    Dim,
    Few,
    Finite,
    FrameRate,
    NonNegativeInt,
    PositiveInt,
    UserError,
    conform,
    conform_made,
    few,
    show,
)
from titan_dit.data.latent_facts import MaskMean, Units

FORMAT = "titan_dit.latents/1"
ENCODED_FORMAT = "titan_dit.latents/2"
"""Format of the shards of `data encode`: with the autoencoder, the crop and the source."""
BUCKETS_FORMAT = "titan_dit.latents/3"
"""Format of shards of several shapes: a shard holds rows of one bucket, and a bucket's shards are
consecutive."""
SHARD_FORMATS = (FORMAT, ENCODED_FORMAT, BUCKETS_FORMAT)
FOLDER_FORMAT = "titan_dit.folder/1"
MANIFEST, CLAIM = "manifest.json", "pack.json"
MANIFEST_KEYS = {
    "source": str,
    "shape": tuple[PositiveInt, ...],
    "dtype": Literal["float16", "float32", "uint8"],
    "count": PositiveInt,
    "num_classes": PositiveInt,
    "classes": tuple[str, ...] | None,
    "value_range": tuple[Finite, ...] | None,
    "copies": PositiveInt | None,
    "posterior": Literal["both", "mean"] | None,
    "fps": FrameRate | None,
}
UNITS = ("scale", "shift")
"""Keys that hold a number, or a list of one per channel."""
VAE_KEYS = {
    "class": str,
    "source": str,
    "digest": str,
    "factor": PositiveInt,
    "frames_factor": PositiveInt | None,
}
FEATURE_KEYS = {"name": str, "digest": str, "grid": tuple[Few, ...], "dim": Dim}
"""Keys of `features`: features of pictures, in the tensor `features` of every shard, float16 [n,
rows, columns, dim]; `grid` holds rows and columns."""
BUCKET_KEYS = {"shape": tuple[PositiveInt, ...], "count": PositiveInt}
SHARD_KEYS = {"file": str, "count": PositiveInt, "bytes": PositiveInt, "sha256": str}
TEXT_KEYS = {
    "class": str,
    "source": str,
    "digest": str,
    "tokenizer": str,
    "template": str,
    "padding": Literal["removed", "kept"] | None,
    "dtype": Literal["float16", "bfloat16", "float32", "none"],
    "width": Dim,
    "tokens": Few,
    "captions": PositiveInt,
    "cut": NonNegativeInt,
}
"""Keys of `text`, the embeddings of captions: see `data.caption_embeddings`."""
REFERENCE_KEYS = {"kind": Literal["picture", "first_frame"], "channels": Few}
"""Keys of `reference`: each shard holds the references' latents beside the samples'."""
MASK_KEYS = {"mean": MaskMean}
"""Keys of `mask`: each shard holds uint8 weights of its samples' latent pixels."""
INDEX_KEYS = {"file": str, "bytes": PositiveInt, "sha256": str}
FOLDER_KEYS = {
    "format": str,
    "source": str | None,
    "classes": tuple[str, ...] | None,
    "num_classes": PositiveInt | None,
    "scale": None,
    "shift": None,
}
OPTIONAL = {"value_range", "classes", "copies", "posterior", "padding", "frames_factor", "fps"}
BYTES_PER_FILE = 4096
"""Maximum bytes of a large manifest per file in its folder: a shard of 16 channels takes 1,000."""

REMEDY = "Restore the manifest, or write the dataset again."


def damaged(where: str | Path, what: str) -> UserError:
    """The error for a manifest whose entries contradict each other. `where`: file and key."""
    return UserError(f"[data] {where}: {what}. {REMEDY}")


def read_json(path: Path) -> dict[str, Any]:
    """Read `path`/manifest.json, unchecked; {} if there is none.

    Raises UserError if it is no manifest.
    """
    file = path / MANIFEST
    if not file.is_file():
        return {}
    size = file.stat().st_size
    # Of terabytes of shards it is larger, but then they are there.
    if size > schema.LARGEST and size > BYTES_PER_FILE * sum(1 for _ in path.iterdir()):
        raise damaged(
            file,
            f"more than {schema.LARGEST >> 20} MiB, and more than {BYTES_PER_FILE} bytes for each "
            "file beside it, so no manifest",
        )
    try:
        # utf-8-sig: a person may have written it, in an editor that begins with a byte order mark.
        values = user_text.parse_json(file.read_text(encoding="utf-8-sig"), unique=True)
    except ValueError as error:
        raise UserError(f"[data] {file} is not valid JSON: {error}. Correct the file.") from None
    if not isinstance(values, dict) or values.get("format") not in (*SHARD_FORMATS, FOLDER_FORMAT):
        raise UserError(
            f'[data] {file}: not a dataset. Add "format": "{FOLDER_FORMAT}" for a folder of '
            f"latent files; shards have one of {', '.join(SHARD_FORMATS)}."
        )
    return values


def read_manifest(path: Path, buckets: Sequence[str] | None = None) -> dict[str, Any]:
    """Read and check the manifest of a folder of shards. Raises UserError.

    `buckets`: keep only these, see `of_buckets`.
    """
    manifest = read_json(path)
    if manifest.get("format") not in SHARD_FORMATS:
        raise UserError(
            f"[data] path={path}: there is no {MANIFEST} of shards ({FORMAT}). `data pack` and "
            "`data encode` write one."
        )
    return of_buckets(check_manifest(manifest, path / MANIFEST), buckets, path)


def bucket_names(manifest: dict[str, Any]) -> list[str]:
    """The names of the buckets in `data report`: "832x480", or "17 x 832x480" of clips.

    Width x height in pixels, after the frames if there are several; in units of the stored samples
    if no autoencoder is recorded.
    """
    vae = manifest.get("vae") or {"factor": 1, "frames_factor": 1}
    found = []
    for bucket in manifest["buckets"]:
        *frames, height, width = bucket["shape"][1:]
        name = f"{width * vae['factor']}x{height * vae['factor']}"
        several = [(f - 1) * (vae["frames_factor"] or 1) + 1 for f in frames if f > 1]
        found.append(f"{several[0]} x {name}" if several else name)
    return found


def of_buckets(manifest: dict[str, Any], names: Sequence[str] | None, path: Path) -> dict[str, Any]:
    """The manifest with only the buckets of these names, and their shards; None: with all.

    `left_out` maps the names of the others to their rows, and `left_out_before` of a bucket counts
    those before its own. Raises UserError for an unknown name.
    """
    known = bucket_names(manifest)
    if unknown := [name for name in names or () if name not in known]:
        raise UserError(
            f"[data] buckets: {show(unknown[0])} is no bucket of {path}. Name some of "
            f"{few(list(map(show, known)), 50)}."
        )
    left_out, buckets, numbers = dict[str, int](), list[dict[str, Any]](), dict[int, int]()
    for number, (name, bucket) in enumerate(zip(known, manifest["buckets"], strict=True)):
        if names is None or name in names:
            numbers[number] = len(buckets)
            buckets.append(bucket | {"left_out_before": sum(left_out.values())})
        else:
            left_out[name] = bucket["count"]
    shards = [
        entry | {"bucket": numbers[entry["bucket"]]}
        for entry in manifest["shards"]
        if entry["bucket"] in numbers
    ]
    count = sum(bucket["count"] for bucket in buckets)
    chosen = {"buckets": buckets, "shards": shards, "count": count, "left_out": left_out}
    return manifest | chosen


def check_manifest(manifest: dict[str, Any], file: Path) -> dict[str, Any]:
    """Check the keys, types and counts of a manifest of shards. Raises UserError.

    The result has the buckets of any version in `buckets`, and in each shard's `bucket`.
    """
    in_buckets = manifest.get("format") == BUCKETS_FORMAT
    hints = {key: hint for key, hint in MANIFEST_KEYS.items() if key != "shape" or not in_buckets}
    manifest = conform_keys(manifest, hints, str(file), UNITS)
    if not isinstance(manifest.get("shards"), list):
        raise damaged(file, "shards must be a list")
    manifest["buckets"] = buckets_of(manifest, in_buckets, file)
    if manifest["value_range"] is not None and len(manifest["value_range"]) != 2:
        raise damaged(file, f"value_range={manifest['value_range']} must hold two numbers")
    for key in UNITS:
        manifest[key] = conform_units(manifest[key], key, file)
        check_channels(manifest[key], key, manifest["buckets"][0]["shape"][0], file)
    check_networks(manifest, file)
    check_beside(manifest, file)
    names = manifest["classes"]
    if names and len(names) != manifest["num_classes"]:
        raise UserError(
            f"[data] {file}: classes holds {len(names)} names, but num_classes="
            f"{manifest['num_classes']}. List one name per class, or none: []."
        )
    keys = SHARD_KEYS | ({"bucket": NonNegativeInt} if in_buckets else {})
    manifest["shards"] = [
        conform_keys(entry, keys, f"{file} shards[{number}]")
        | ({} if in_buckets else {"bucket": 0})
        for number, entry in enumerate(manifest["shards"])
    ]
    files = [entry["file"] for entry in manifest["shards"]]
    if manifest.get("text") is not None:
        manifest["text"] = text = check_text(manifest["text"], file)
        files += [entry["file"] for entry in (*text["files"], text["index"])]
    check_files(files, file)
    manifest["copies"] = manifest["copies"] or 1
    if any(entry["count"] % manifest["copies"] for entry in manifest["shards"]):
        raise damaged(file, f"a shard cuts the {manifest['copies']} rows of a picture")
    counted = sum(entry["count"] for entry in manifest["shards"])
    if counted != manifest["count"] or not counted:
        raise damaged(file, f"count={manifest['count']}, but its shards hold {counted} samples")
    if in_buckets:
        check_buckets(manifest, file)
    return manifest


def check_beside(manifest: dict[str, Any], file: Path) -> None:
    """Check the keys of `reference` and `mask`, if the shards hold these tensors.

    Raises UserError.
    """
    if manifest.get("reference") is not None:
        found = conform_keys(manifest["reference"], REFERENCE_KEYS, f"{file} reference")
        manifest["reference"] = found
        if found["channels"] not in (c := manifest["buckets"][0]["shape"][0], c / 2):
            raise damaged(file, f"reference has {found['channels']} channels, a sample {c}")
        if found["kind"] == "first_frame" and len(manifest["buckets"][0]["shape"]) < 4:
            raise damaged(file, "reference holds the first frames of clips, but rows are pictures")
    if manifest.get("mask") is not None:
        manifest["mask"] = conform_keys(manifest["mask"], MASK_KEYS, f"{file} mask")


def check_networks(manifest: dict[str, Any], file: Path) -> None:
    """Check the keys and types of the autoencoder and of the features, if they are there.

    Raises UserError.
    """
    for name, keys in (("vae", VAE_KEYS), ("features", FEATURE_KEYS)):
        if manifest.get(name) is not None:
            manifest[name] = conform_keys(manifest[name], keys, f"{file} {name}")
    features = manifest.get("features")
    if features is not None and len(features["grid"]) != 2:
        raise damaged(f"{file} features", "grid must hold two numbers: rows and columns")


def check_text(values: Any, file: Path) -> dict[str, Any]:
    """Check the keys, types and counts of the embeddings of captions. Raises UserError."""
    where = f"{file} text"
    text = conform_keys(values, TEXT_KEYS, where, ("layer", "index", "files"))
    text["padding"] = text["padding"] or "removed"
    several = isinstance(text["layer"], list | tuple)
    hint = tuple[NonNegativeInt, ...] if several else NonNegativeInt
    text["layer"] = conform_made(text["layer"], hint, f"[data] {where}: layer")
    if text["layer"] == ():
        raise UserError(f"[data] {where}: layer must hold a number. Restore the file.")
    if not isinstance(text["files"], list):
        raise damaged(where, "files must be a list")
    text["files"] = [
        conform_keys(entry, SHARD_KEYS, f"{where} files[{number}]")
        for number, entry in enumerate(text["files"])
    ]
    text["index"] = conform_keys(text["index"], INDEX_KEYS, f"{where} index")
    counted = sum(entry["count"] for entry in text["files"])
    if counted != text["captions"]:
        raise damaged(where, f"captions={text['captions']}, but its files hold {counted}")
    return text


def buckets_of(manifest: dict[str, Any], in_buckets: bool, file: Path) -> list[dict[str, Any]]:
    """Shape and count of each bucket; of versions with one shape, that one.

    Raises UserError for damaged entries.
    """
    buckets = [{"shape": manifest.get("shape"), "count": manifest["count"]}]
    if in_buckets:
        buckets = manifest.get("buckets") or []
        if not isinstance(buckets, list) or not buckets:
            raise damaged(file, "buckets must be a list of shapes and counts")
        buckets = [
            conform_keys(bucket, BUCKET_KEYS, f"{file} buckets[{number}]")
            for number, bucket in enumerate(buckets)
        ]
    for bucket in buckets:
        if len(bucket["shape"]) not in (3, 4):
            what = "must be [c, h, w], or [c, f, h, w] of clips"
            raise damaged(file, f"shape={schema.brief(list(bucket['shape']))} {what}")
    if len({len(bucket["shape"]) for bucket in buckets}) > 1:
        raise damaged(
            file, "some of its buckets hold pictures and some clips: a picture is [c, 1, h, w]"
        )
    return buckets


def check_buckets(manifest: dict[str, Any], file: Path) -> None:
    """Raise UserError unless a bucket's shards are consecutive and hold the bucket's rows."""
    numbers = [entry["bucket"] for entry in manifest["shards"]]
    buckets = manifest["buckets"]
    if numbers != sorted(numbers) or set(numbers) != set(range(len(buckets))):
        raise damaged(file, f"the shards of its {len(buckets)} buckets do not follow each other")
    counts = [0] * len(buckets)
    for entry in manifest["shards"]:
        counts[entry["bucket"]] += entry["count"]
    for number, (bucket, count) in enumerate(zip(buckets, counts, strict=True)):
        if bucket["count"] != count:
            what = f"has count={bucket['count']}, but its shards hold {count} samples"
            raise damaged(file, f"buckets[{number}] {what}")
    if len({bucket["shape"][0] for bucket in buckets}) > 1:
        raise damaged(file, "the shapes of its buckets differ in their channels")
    if len({bucket["shape"] for bucket in buckets}) < len(buckets):
        raise damaged(file, "two buckets have the same shape")


def check_files(names: Sequence[str], file: Path) -> None:
    """Raise UserError for a shard that is not beside the manifest, or is listed twice."""
    for number, name in enumerate(names):
        if wrong := schema.wrong_name(name):
            raise damaged(file, f"shards[{number}] file = {schema.brief(name)} {wrong}")
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise damaged(file, f"shards has the file {schema.brief(twice[0])} twice")


def read_folder_manifest(path: Path) -> dict[str, Any]:
    """Read the optional manifest of a folder of latent files; missing keys are None.

    Raises UserError for an unknown key or a class twice.
    """
    values, file = read_json(path), path / MANIFEST
    if unknown := sorted(values.keys() - FOLDER_KEYS.keys()):
        raise UserError(
            f"[data] {file}: unknown key {unknown[0]}. Valid: {', '.join(FOLDER_KEYS)}."
        )
    checked = {
        key: conform(values.get(key), hint, f"[data] {file}: {key}")
        for key, hint in FOLDER_KEYS.items()
        if key != "format" and key not in UNITS
    }
    for key in UNITS:
        value = values.get(key)
        checked[key] = None if value is None else conform_units(value, key, file)
    names = checked["classes"]
    if names and len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"[data] {file}: classes names {twice!r} twice. Name every class once.")
    return checked


def conform_units(value: Any, key: str, file: Path) -> Units:
    """Check a scale or a shift: a number, or a list of one per channel.

    Raises UserError for a scale of 0.
    """
    hint = tuple[Finite, ...] if isinstance(value, list | tuple) else Finite
    units: Units = conform(value, hint, f"[data] {file}: {key}")
    if key == "scale" and not all(units if isinstance(units, tuple) else (units,)):
        raise UserError(
            f"[data] {file}: scale={show(units)} makes all latents equal. Set none of it to 0."
        )
    return units


def check_channels(units: Units, key: str, channels: int, file: Path) -> None:
    """Raise UserError for units per channel of another number than the channels.

    A mean and a std share their number.
    """
    if isinstance(units, tuple) and len(units) not in (channels, channels / 2):
        raise UserError(
            f"[data] {file}: {key} holds {len(units)} numbers, but a sample has {channels} "
            "channels. Give one number, or one per channel of the model."
        )


def conform_keys(
    values: Any, hints: dict[str, Any], where: str, more: Sequence[str] = ()
) -> dict[str, Any]:
    """Check the types of the known keys; keep the others unchecked. `more` must be there, too.

    Raises UserError.
    """
    if not isinstance(values, dict):
        raise damaged(where, f"must be a table of {', '.join(hints)}")
    if missing := [key for key in (*hints, *more) if key not in values and key not in OPTIONAL]:
        raise damaged(where, f"{', '.join(missing)} missing")
    checked = {
        key: conform_made(values.get(key), hint, f"[data] {where}: {key}")
        for key, hint in hints.items()
    }
    return values | checked


def agreed(
    key: str, wanted: float | None, stated: Units | None, default: float, path: Path
) -> Units:
    """Return `scale` or `shift`. Raises UserError for a config that contradicts the manifest."""
    if wanted is not None and stated is not None and wanted != stated:
        raise UserError(
            f"[data] {key}={wanted}, but {path / MANIFEST} says {key}={show(stated)}. Remove the "
            "key from [data], or correct the manifest."
        )
    if key == "scale" and wanted == 0:
        raise UserError("[data] scale=0 makes all latents equal. Set another one, or none.")
    return next(value for value in (wanted, stated, default) if value is not None)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(parts: Sequence[str]) -> str:
    """Return one SHA-256 over several strings."""
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()
