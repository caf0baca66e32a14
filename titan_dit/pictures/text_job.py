"""Encode the captions of a finished dataset: files of embeddings, or token ids, beside its shards.

Captions are those of captions.jsonl, which `data encode` writes. `data.caption_embeddings` has the
form of the files. The manifest names them once all are written; until then `text.json` is locked.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import torch as safetensors
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.data.caption_embeddings import CAPTIONS, ID_BYTES, INDEX, texts_of
from titan_dit.data.latent_facts import ONLINE, TEXT_DTYPES, TextFacts
from titan_dit.data.manifest import MANIFEST, check_manifest, read_json
from titan_dit.data.packing.output import (
    SHARD_BYTES,
    ChunkRecord,
    has_size,
    lock,
    read_record,
    write_record,
    writing,
)
from titan_dit.pictures.encode import same_bits
from titan_dit.pictures.picture_set import Caption, is_empty
from titan_dit.pictures.text_encoder import TextEncoder
from titan_dit.system.files import write_json, write_whole

COMMAND = "data encode"
CLAIM = "text.json"
PREFIX = "text"
"""Name of an output whose shards would have the names of the files of embeddings."""
AT_ONCE = 10_000
"""Captions that are tokenized at once."""
SHOWN = 60
"""Characters of a caption in a message."""


@dataclass(frozen=True)
class Tokenized:
    """Token ids of captions, one after another."""

    ids: NDArray[np.int32]
    ends: NDArray[np.int64]
    """Tokens before the end of each caption."""
    cut: int
    """Captions with more tokens than the maximum."""

    @classmethod
    def of(cls, encoder: TextEncoder, captions: Sequence[str]) -> Tokenized:
        """Tokenize captions."""
        parts, lengths, num_cut = [np.empty(0, np.int32)], [0], 0
        for first in range(0, len(captions), AT_ONCE):
            ids, cut = encoder.tokenize(captions[first : first + AT_ONCE])
            num_cut += len(cut)
            lengths += map(len, ids)
            parts.append(np.array([token for tokens in ids for token in tokens], np.int32))
        return cls(np.concatenate(parts), np.cumsum(lengths[1:], dtype=np.int64), num_cut)

    @cached_property
    def begins(self) -> NDArray[np.int64]:
        """Tokens before the begin of each caption."""
        return np.concatenate([np.zeros(1, np.int64), self.ends[:-1]])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each caption."""
        return self.ends - self.begins

    def tokens(self, caption: int) -> list[int]:
        """Token ids of a caption."""
        found: list[int] = self.ids[self.begins[caption] : self.ends[caption]].tolist()
        return found

    def num_embedded(self, encoder: TextEncoder) -> int:
        """Tokens with an embedding."""
        is_kept = encoder.padding == "kept"
        return len(self.ends) * encoder.max_tokens if is_kept else len(self.ids)

    def num_bytes(self, encoder: TextEncoder, dtype: str) -> int:
        """Bytes of the embeddings."""
        itemsize = 0 if dtype == ONLINE else TEXT_DTYPES[dtype].itemsize
        return self.num_embedded(encoder) * encoder.width * itemsize


def distinct(texts: Sequence[Sequence[str]]) -> tuple[list[str], list[int], list[int]]:
    """(each caption once, the number of each picture's captions, their ends by picture).

    Number 0 is the empty caption.
    """
    numbers, of_pictures, ends = {"": 0}, list[int](), list[int]()
    for captions in texts:
        known = [caption if caption.strip() else "" for caption in captions]
        of_pictures += [numbers.setdefault(caption, len(numbers)) for caption in known]
        ends.append(len(of_pictures))
    return list(numbers), of_pictures, ends


@dataclass(frozen=True, kw_only=True)
class TextJob:
    """The captions of a dataset, and how they are encoded."""

    command: ClassVar[str] = COMMAND

    output: Path
    encoder: TextEncoder
    dtype: str
    batch_size: int
    """Captions that are encoded at once. Another number changes last bits."""
    tokens: int
    """Tokens to which samples are padded."""
    captions: list[str]
    """Each caption once, the empty one first."""
    of_pictures: list[int]
    """Numbers of the pictures' captions, one picture after another."""
    picture_ends: list[int]
    tokenized: Tokenized
    source_digest: str
    """SHA-256 of captions.jsonl."""

    @cached_property
    def chunks(self) -> list[range]:
        """Numbers of the captions of each file: up to SHARD_BYTES."""
        tokens = max(1, self.tokenized.num_embedded(self.encoder))
        size = self.tokenized.num_bytes(self.encoder, self.dtype) // tokens or ID_BYTES
        most = max(1, SHARD_BYTES // size)
        starts, begun = [0], 0
        for number, end in enumerate(self.ends.tolist()):
            if end - begun > most and number > starts[-1]:
                starts.append(number)
                begun = int(self.ends[number - 1])
        return [range(a, b) for a, b in zip(starts, [*starts[1:], len(self.captions)], strict=True)]

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """Tokens with an embedding, or token ids, before the end of each caption."""
        if self.encoder.padding == "removed" or self.dtype == ONLINE:
            return self.tokenized.ends
        return np.arange(1, len(self.captions) + 1) * self.encoder.max_tokens

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all that determines the files' bytes, except the device."""
        encoder = self.encoder
        layer = encoder.layers[0] if len(encoder.layers) == 1 else encoder.layers
        how: tuple[Any, ...] = encoder.kind, encoder.digest, layer, encoder.template
        how = (*how, encoder.max_tokens, *(["kept"] if encoder.padding == "kept" else []))
        values = (*how, self.dtype, self.batch_size, self.tokens, self.source_digest)
        ids = hashlib.sha256(self.tokenized.ids.tobytes()).hexdigest()
        return hashlib.sha256(json.dumps([*values, ids]).encode()).hexdigest()

    def facts(self) -> TextFacts:
        """The facts of the dataset, without the embedding of the empty caption."""
        return self.encoder.facts(self.tokens, self.dtype, torch.empty(0, self.encoder.width))


def make_text_job(
    output: Path, encoder: TextEncoder, *, tokens: int | None, dtype: str, batch_size: int
) -> TextJob:
    """Plan the embeddings of a dataset's captions.

    `tokens`: those to which samples are padded, the encoder's maximum; None: as many as the longest
    caption has. Raises UserError if captions.jsonl is missing or was changed.
    """
    check_name(output)
    manifest = read_json(output)
    about = manifest.get("captions")
    if not isinstance(about, dict):
        raise UserError(
            f"[{COMMAND}] out={output} holds no captions. Encode captioned pictures, or leave "
            "--text-encoder out."
        )
    file = output / CAPTIONS
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UserError(
            f"[{COMMAND}] {file} cannot be read: {error.strerror}. Restore it, or encode the "
            "pictures again."
        ) from None
    sha = hashlib.sha256(data).hexdigest()
    if sha != about.get("sha256"):
        raise UserError(
            f"[{COMMAND}] {file}: its SHA-256 differs from the manifest's. Restore the file, or "
            "encode the pictures again."
        )
    texts = [
        texts_of(line, f"[{COMMAND}] {file}, line {number}")
        for number, line in enumerate(data.splitlines(), 1)
    ]
    if len(texts) * (manifest.get("copies") or 1) != manifest.get("count"):
        raise UserError(
            f"[{COMMAND}] {file} has {len(texts):,} lines, but {output / MANIFEST} counts "
            f"{manifest.get('count')} rows. Encode the pictures again."
        )
    captions, of_pictures, ends = distinct(texts)
    tokenized = Tokenized.of(encoder, captions)
    longest = int(tokenized.lengths.max())
    if encoder.padding == "kept":
        longest = encoder.max_tokens
    return TextJob(
        output=output,
        encoder=encoder,
        dtype=dtype,
        batch_size=batch_size,
        tokens=tokens or max(1, longest),
        captions=captions,
        of_pictures=of_pictures,
        picture_ends=ends,
        tokenized=tokenized,
        source_digest=sha,
    )


def check_name(output: Path) -> None:
    """Raise UserError if the shards of an output take the names of the files of embeddings."""
    if output.resolve().name == PREFIX:
        raise UserError(
            f"[{COMMAND}] out={output}: its shards would have the names of the embeddings of "
            "captions, text-00000.safetensors. Choose another --out."
        )


def check_captions(texts: Sequence[Caption], names: Sequence[str], may_lack: bool) -> None:
    """Raise UserError if pictures have no captions; `may_lack`: some may be empty."""
    empty = [name for name, text in zip(names, texts, strict=False) if is_empty(text)]
    if len(empty) == len(names) or not texts:
        raise UserError(
            "--text-encoder: the pictures have no captions. Add them (NAME.txt beside NAME.jpg), "
            "or leave it out."
        )
    if empty and not may_lack:
        raise UserError(
            f"--text-encoder: {len(empty):,} of {len(names):,} pictures have no caption, such as "
            f"{empty[0]}. Add it, or choose --no-caption skip or --no-caption empty."
        )


def check_same_encoder(output: Path, encoder: TextEncoder, dtype: str) -> None:
    """Raise UserError if the dataset holds embeddings that were made otherwise."""
    text = read_json(output).get("text")
    if not isinstance(text, dict):
        return
    made_by = TextFacts(
        kind=str(text.get("class")),
        digest=str(text.get("digest")),
        tokenizer=str(text.get("tokenizer")),
        layer=tuple(layer) if isinstance(layer := text.get("layer", -1), list) else layer,
        template=str(text.get("template")),
        padding=text.get("padding") or "removed",
        width=text.get("width", 0),
        tokens=text.get("tokens", 0),
        dtype=str(text.get("dtype")),
    )
    encoder.check_fits(made_by, "--text-encoder")
    if dtype != made_by.dtype:
        raise UserError(
            f"--text-dtype {dtype}: the embeddings of {output} are {made_by.dtype}. Give that one, "
            "or choose another --out."
        )


def begin(job: TextJob, stack: ExitStack) -> list[int] | None:
    """Lock the output until `stack` ends; the missing files, None if the text is whole."""
    check_same_encoder(job.output, job.encoder, job.dtype)
    text = read_json(job.output).get("text") or {}
    if text.get("plan") == job.digest and all(
        has_size(job.output / entry["file"], entry["bytes"])
        for entry in (*text["files"], text["index"])
    ):
        clean(job)
        return None
    stack.callback(os.close, lock(job.output, COMMAND, CLAIM))
    return [number for number in range(len(job.chunks)) if record_of(job, number) is None]


def record_of(job: TextJob, chunk: int) -> ChunkRecord | None:
    """The record of a file that is written."""
    record = read_record(job.output, f"{PREFIX}-{chunk:05d}")
    return record if record is not None and record.plan == job.digest else None


def encode_texts(job: TextJob, chunks: Sequence[int], report: Callable[[int], None]) -> None:
    """Encode and write files; `report` gets increments of captions. Raises UserError."""
    for chunk in chunks:
        data: bytes = safetensors.save(tensors_of_chunk(job, job.chunks[chunk], report))
        write_record(
            job.output,
            f"{PREFIX}-{chunk:05d}",
            data,
            command=COMMAND,
            plan=job.digest,
            count=len(job.chunks[chunk]),
            dropped=[],
            extra={},
        )


def tensors_of_chunk(job: TextJob, rows: range, report: Callable[[int], None]) -> dict[str, Tensor]:
    """The tensors of a file: see `data.caption_embeddings`."""
    tokens = job.tokenized
    first, last = int(tokens.begins[rows.start]), int(tokens.ends[rows.stop - 1])
    begun = int(job.ends[rows.start - 1]) if rows.start else 0
    found = {
        "ends": torch.from_numpy(job.ends[rows.start : rows.stop] - begun),
        "ids": torch.from_numpy(tokens.ids[first:last].copy()),
    }
    if job.dtype == ONLINE:
        report(len(rows))
        return found
    if job.encoder.padding == "kept":
        found["id_ends"] = torch.from_numpy(tokens.ends[rows.start : rows.stop] - first)
    with same_bits():
        return {**found, "embeddings": torch.cat(encoded(job, rows, report))}


def encoded(job: TextJob, rows: range, report: Callable[[int], None]) -> list[Tensor]:
    """The embeddings of a file's captions, in its dtype on the CPU."""
    # Captions of similar lengths in a batch: less padding.
    order = sorted(rows, key=lambda caption: (int(job.tokenized.lengths[caption]), caption))
    found: dict[int, Tensor] = {}
    for first in range(0, len(order), job.batch_size):
        batch = order[first : first + job.batch_size]
        embeddings = job.encoder.encode_ids([job.tokenized.tokens(caption) for caption in batch])
        for caption, embedding in zip(batch, embeddings, strict=True):
            found[caption] = stored(embedding, job.dtype, job.captions[caption])
        report(len(batch))
    return [found[caption] for caption in rows]


def stored(embedding: Tensor, dtype: str, caption: str) -> Tensor:
    """An embedding in its stored dtype. Raises UserError for a value outside of its range."""
    kept = embedding.to(TEXT_DTYPES[dtype]).cpu()
    if kept.isfinite().all():
        return kept
    shown = caption if len(caption) <= SHOWN else f"{caption[:SHOWN]}..."
    what = json.dumps(shown, ensure_ascii=False)
    if not embedding.isfinite().all():
        raise UserError(
            f"[{COMMAND}] the embedding of the caption {what} has values that are not finite. "
            "Give another --text-encoder or --text-layer."
        )
    raise UserError(
        f"[{COMMAND}] the embedding of the caption {what} has values up to "
        f"{embedding.abs().max():.4g}, outside of {dtype}. Choose --text-dtype "
        f"{'bfloat16 or float32' if dtype == 'float16' else 'float32'}."
    )


def finish(job: TextJob) -> dict[str, Any]:
    """Write the index and add `text` to the manifest; return it. Raises UserError."""
    records = [record_of(job, chunk) for chunk in range(len(job.chunks))]
    files = [record for record in records if record is not None]
    if len(files) != len(records):
        raise UserError(
            f"[{COMMAND}] another process changed {job.output} meanwhile. Run the command again."
        )
    tensors = {
        "captions": torch.tensor(job.of_pictures, dtype=torch.int32),
        "ends": torch.tensor(job.picture_ends, dtype=torch.int64),
    }
    if job.dtype == ONLINE:
        with same_bits():
            (null,) = job.encoder.encode_ids([job.tokenized.tokens(0)])
        tensors["null"] = stored(null, "float32", "").contiguous()
    index: bytes = safetensors.save(tensors)
    with writing(job.output / INDEX, COMMAND):
        write_whole(job.output / INDEX, index)
    facts = job.facts()
    text = {
        "class": facts.kind,
        "source": job.encoder.source,
        "digest": facts.digest,
        "tokenizer": facts.tokenizer,
        "layer": facts.layer,
        "template": facts.template,
        **({"padding": facts.padding} if facts.padding == "kept" else {}),
        "dtype": facts.dtype,
        "width": facts.width,
        "tokens": facts.tokens,
        "captions": len(job.captions),
        "cut": job.tokenized.cut,
        "plan": job.digest,
        "index": {
            "file": INDEX,
            "bytes": len(index),
            "sha256": hashlib.sha256(index).hexdigest(),
        },
        "files": [
            {key: getattr(record, key) for key in ("file", "count", "bytes", "sha256")}
            for record in files
        ],
    }
    with writing(job.output / MANIFEST, COMMAND):
        manifest = read_json(job.output)
        shards = manifest.pop("shards")
        manifest = {**manifest, "text": text, "shards": shards}
        check_manifest(dict(manifest), job.output / MANIFEST)
        write_json(job.output / MANIFEST, manifest)
    clean(job)
    return text


def clean(job: TextJob) -> None:
    """Delete the files kept for resuming."""
    for path in job.output.iterdir():
        if re.fullmatch(rf"{PREFIX}-\d{{5,}}\.json|{re.escape(CLAIM)}", path.name):
            path.unlink()
