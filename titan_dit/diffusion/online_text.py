"""Captions embedded while a run trains: a frozen text encoder in place of stored embeddings.

Each rank encodes a share of its step's captions; the ranks with the same samples (along pp, cp, tp)
all-gather them. Nothing here has gradients, and nothing is saved.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional

from titan_dit.config.section import UserError
from titan_dit.config.training import TextConfig
from titan_dit.data.base import Fields
from titan_dit.data.latent_facts import LatentFacts, TextFacts
from titan_dit.data.manifest import MANIFEST, check_manifest, read_json
from titan_dit.objectives.base import DataShare, Placement
from titan_dit.objectives.sections import NO_FROZEN, FrozenWork
from titan_dit.pictures import text_encoder
from titan_dit.pictures.prompts import used_as
from titan_dit.pictures.text_encoder import TextEncoder

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""Values of [text] dtype."""
WHERE = "[text] encoder"


@dataclass
class Clock:
    """Time on a device between two readings, of blocks of code; it does not synchronise."""

    seconds: float = 0.0
    count: int = 0
    events: list[tuple[Any, Any]] = field(default_factory=list)

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Count the block."""
        self.count += 1
        if device.type == "cuda":
            events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            events[0].record()
            yield
            events[1].record()
            self.events.append((events[0], events[1]))
            return
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began

    def read(self) -> float | None:
        """Mean milliseconds of a block since the last reading; None without one."""
        for begin, end in self.events:
            end.synchronize()
            self.seconds += begin.elapsed_time(end) / 1e3
        found = 1e3 * self.seconds / self.count if self.count else None
        self.seconds, self.count, self.events = 0.0, 0, []
        return found


@dataclass
class OnlineText:
    """A text encoder that embeds the captions of batches."""

    encoder: TextEncoder
    facts: TextFacts
    peers: DataShare | None = None
    """The ranks that share the work; None until `place`."""
    clock: Clock = field(default_factory=Clock)
    grouped: bool = False
    """True if captions are padded as their ids are, by bucket, not all to the longest."""

    def place(self, placement: Placement, flops_per_sample: int) -> Sequence[str]:
        """Move the encoder to the device, sharded; return console lines about its cost."""
        module = self.encoder.module
        total = sum(p.numel() for p in module.parameters())
        item = next(module.parameters()).element_size()
        placement.shard(module, list(self.encoder.blocks))
        self.peers = placement.peers()
        flops, ranks = self.encoder.flops(self.facts.tokens), placement.num_shards
        share = f", {flops / flops_per_sample:.2%} of the network's" if flops_per_sample else ""
        dtype = "bf16" if item == 2 else "fp32"
        return [
            f"text    {self.facts}: {total:,} parameters in {dtype}, "
            f"{total * item / ranks / 2**20:,.1f} MiB on each of {ranks} data ranks; "
            f"{flops / 1e9:.3g} GFLOP a caption of {self.facts.tokens} tokens{share}"
        ]

    def embed(self, fields: Fields) -> dict[str, Tensor]:
        """The fields with `text` [b, tokens, d] in place of `text_ids` [b, n]. Collective.

        All ranks of `peers` give the same fields. The embeddings have the encoder's dtype.
        """
        assert self.peers is not None
        with self.clock.running(self.peers.device):
            text, lengths = self.shared(fields["text_ids"].long(), fields["text_length"])
        kept = {name: value for name, value in fields.items() if name != "text_ids"}
        return {**kept, "text": text, "text_length": lengths}

    def shared(
        self, ids: Int64[Tensor, "b n"], lengths: Int64[Tensor, " b"]
    ) -> tuple[Float[Tensor, "b m d"], Int64[Tensor, " b"]]:
        """Embeddings and lengths of all captions, of which this rank encodes its share."""
        peers, num = self.peers, len(ids)
        assert peers is not None
        size = -(-num // peers.num_ranks)
        # Past the end the last caption again: equal shares on every rank.
        rows = torch.arange(peers.rank * size, (peers.rank + 1) * size, device=ids.device)
        rows = rows.clamp(max=num - 1)
        text, kept = self.encoder.encode_padded(ids[rows], lengths[rows])
        tokens = ids.shape[1] if self.grouped else self.facts.tokens
        text = functional.pad(text, (0, 0, 0, tokens - text.shape[1]))
        return peers.gather(text)[:num], peers.gather(kept)[:num]


def work_of(config: TextConfig, path: str) -> FrozenWork:
    """The encoder's cost, of a dataset that is there; none without one.

    Reads the manifest and the encoder's config.
    """
    manifest = read_json(Path(path)) if path else {}
    if not isinstance(manifest.get("text"), dict):
        return NO_FROZEN
    text = check_manifest(manifest, Path(path) / MANIFEST)["text"]
    layers = text["layer"] if isinstance(text["layer"], tuple) else (text["layer"],)
    source, size = config.encoder or text["source"], DTYPES[config.dtype].itemsize
    return cost(source, layers, text["tokens"], size)


@lru_cache(maxsize=8)
def cost(source: str, layers: tuple[int, ...], tokens: int, element_bytes: int) -> FrozenWork:
    """The cost of an encoder by its config, without the layers behind the last one that is used."""
    module, blocks = text_encoder.on_meta(source, layers, WHERE)
    return FrozenWork(
        parameters=sum(p.numel() for p in module.parameters()),
        element_bytes=element_bytes,
        flops=text_encoder.flops_of(module, blocks, tokens),
        tokens=tokens,
        width=module.config.hidden_size,  # type: ignore[union-attr, arg-type]
    )


def opened(config: TextConfig, data: LatentFacts) -> OnlineText:
    """The encoder of [text] on the CPU. Raises UserError unless it is that of the data."""
    assert data.text is not None
    source = config.encoder or data.text_source
    if not source:
        raise UserError(
            f"{WHERE} is not set, and the folder of the text encoder of the captions, {data.text}, "
            "is not recorded. Set it."
        )
    found = text_encoder.load(source, torch.device("cpu"), dtype=DTYPES[config.dtype], where=WHERE)
    encoder = used_as(found, data.text, data.text.tokens, WHERE)
    return OnlineText(encoder, data.text, grouped=bool(data.bucket_text))
