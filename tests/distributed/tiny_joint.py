"""A tiny text-to-image DiT on random pictures with random captions of random lengths."""

from dataclasses import dataclass
from typing import Literal

import torch

from titan_dit.config import catalog, config_file
from titan_dit.config.section import PositiveInt
from titan_dit.data.base import DataConfig, Field, Source
from titan_dit.data.buckets import BucketOrder
from titan_dit.data.latent_facts import LatentFacts, ReferenceFacts, TextFacts

# Not that of the masks here: another constant does not change which layouts agree.
MASK_MEAN = 120.0

TABLES = {
    "model": {
        "name": "joint_dit",
        "hidden_size": 32,
        "num_layers": 3,
        "num_heads": 4,
        "patch_size": 2,
        "latent_size": [4, 8],  # Wider than high, so that rows are not columns.
        "in_channels": 2,
        "text_tokens": 8,
        "text_dim": 12,
        "intermediate_size": 48,
    },
    "objective": {"name": "rectified_flow", "condition_dropout": 0.25},
    "data": {"name": "tiny_joint:Captioned", "channels": 2, "text_dim": 12},
    "training": {"steps": 4, "gc_every": 0, "global_batch_size": 8},
    "precision": {"dtype": "fp32"},
    "optimizer": {"lr": 1e-3, "weight_decay": 0.01},
    "ema": {"decays": [0.9]},
    "checkpoint": {"every": 0},
    "metrics": {"every": 1, "tensorboard": False},
}


@dataclass(frozen=True, kw_only=True)
class Captioned(DataConfig):
    """64 latents, each with the embeddings of some words, and zeros for removed padding."""

    channels: PositiveInt
    latent_size: tuple[PositiveInt, ...]
    """[height, width], or [frames, height, width] of clips."""
    text_tokens: PositiveInt
    text_dim: PositiveInt
    text_padding: Literal["removed", "kept"] = "removed"
    reference: Literal["", "picture", "first_frame"] = ""
    """Further latents of each sample, which the network is given."""
    masks: bool = False
    """True: the loss of each latent pixel has a weight."""
    others: tuple[tuple[PositiveInt, ...], ...] = ()
    """Sizes of further buckets, which share the rows evenly."""

    def bucket_counts(self):
        facts = self.open().facts
        shapes = [(shape, 0) for shape in facts.bucket_shapes]
        return dict(zip(shapes, facts.bucket_counts, strict=True))

    def open(self):
        sizes = (self.latent_size, *self.others)
        return Captions(
            [(self.channels, *size) for size in sizes],
            (self.text_tokens, self.text_dim),
            self.text_padding,
            self.reference,
            self.masks,
        )


def reference_facts(kind, channels):
    """References; a clip's latent frame is made of four frames."""
    frames = 4 if kind == "first_frame" else 0
    return ReferenceFacts(kind=kind, channels=channels, frame_channels=frames)


class Captions(Source):
    def __init__(self, shapes, text, padding="removed", reference="", masks=False):
        self.shapes, self.text, self.padding = shapes, text, padding
        latent, several = shapes[0], len(shapes) > 1
        each = 64 // len(shapes)
        tokens, width = text
        # The empty prompt has two tokens, where its padding is removed.
        num_empty = 2 if padding == "removed" else tokens
        empty = torch.randn(num_empty, width, generator=torch.Generator().manual_seed(1000))
        self.facts = LatentFacts(
            count=each * len(shapes),
            digest="captions",
            shape=latent,
            bucket_shapes=tuple(shapes) if several else (),
            bucket_counts=(each,) * len(shapes) if several else (),
            num_classes=1,
            # Three channels are pixels.
            value_range=(-1.0, 1.0) if latent[0] == 3 else None,
            reference=reference_facts(reference, latent[0]) if reference else None,
            mask_mean=MASK_MEAN if masks else None,
            text=TextFacts(
                kind="T5EncoderModel",
                digest="text",
                tokenizer="words",
                layer=0,
                template="{}",
                width=width,
                tokens=tokens,
                padding=padding,
                null=TextFacts.null_text(empty),
            ),
        )
        self.fields = {
            "latent": Field(torch.float32, latent),
            "text": Field(torch.float16, text),
            "text_length": Field(torch.int64, ()),
        }
        if reference:
            self.fields["reference"] = Field(torch.float32, latent)
        if masks:
            self.fields["mask"] = Field(torch.uint8, latent[1:])

    def captions(self, rows):
        return [f"caption {row}" for row in rows]

    @property
    def bucket_rows(self):
        each = 64 // len(self.shapes)
        return [range(first, first + each) for first in range(0, len(self), each)]

    @property
    def bucket_names(self):
        return ["x".join(map(str, shape)) for shape in self.shapes]

    def bucket_fields(self, bucket):
        shape = self.shapes[bucket]
        found = {**self.fields, "latent": Field(torch.float32, shape)}
        sizes = {"reference": shape, "mask": shape[1:]}
        return found | {
            name: Field(self.fields[name].dtype, size)
            for name, size in sizes.items()
            if name in found
        }

    def order(self, seed, held_out, data_order, batch_sizes=()):
        if not batch_sizes:
            return super().order(seed, held_out, data_order)
        sizes = [len(rows) for rows in self.bucket_rows]
        return BucketOrder.of(seed, self.bucket_names, sizes, batch_sizes, held_out)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        words = torch.randn(self.text, generator=generator, dtype=torch.float32)
        length = index % (self.text[0] + 1) if self.padding == "removed" else self.text[0]
        words[length:] = 0
        shape = self.shapes[index // (64 // len(self.shapes))]
        found = {
            "latent": torch.randn(shape, generator=generator),
            "text": words.half(),
            "text_length": torch.tensor(length),
        }
        if self.facts.reference:
            found["reference"] = torch.randn(shape, generator=generator)
        if self.facts.mask_mean is not None:
            found["mask"] = torch.randint(256, shape[1:], generator=generator).byte()
        return found


NETWORKS = {
    "z_image": {
        "model": {
            "name": "z_image",
            "hidden_size": 36,  # Three heads on each of two ranks.
            "num_layers": 3,
            "num_refiner_layers": 1,
            "num_heads": 6,
            "latent_size": [6, 12],  # 18 tokens, padded to 32.
            "in_channels": 2,
            "text_tokens": 32,
            "text_dim": 12,
        },
        "objective": {"direction": "to_data"},
    },
    "flux2": {
        "model": {
            "name": "flux2",
            "hidden_size": 48,
            "num_double_layers": 2,
            "num_single_layers": 3,
            "num_heads": 6,
            "latent_size": [2, 4],
            "in_channels": 8,
            "text_tokens": 8,
            "text_dim": 12,
        },
        "data": {"channels": 8, "text_padding": "kept"},
    },
    "wan": {
        "model": {
            "name": "wan",
            "hidden_size": 48,
            "num_layers": 3,
            "num_heads": 4,
            "intermediate_size": 56,
            "latent_frames": 2,
            "latent_size": [4, 8],
            "in_channels": 2,
            "text_tokens": 8,
            "text_dim": 12,
        },
    },
}
"""Sections of the released networks, in place of or beside those of TABLES."""


def joint_config(network="joint_dit", **sections):
    """TABLES, or those of another network, with keys of some sections replaced."""
    tables = {name: dict(table) for name, table in TABLES.items()}
    if network != "joint_dit":
        tables["model"] = {}
        for name, table in NETWORKS[network].items():
            tables[name] |= table
    for name, table in sections.items():
        tables.setdefault(name, {}).update(table)
    model = tables["model"]
    frames = [model["latent_frames"]] if "latent_frames" in model else []
    sizes = {
        "latent_size": [*frames, *model["latent_size"]],
        "text_tokens": model["text_tokens"],
    }
    tables["data"] = sizes | tables["data"]
    return config_file.build(tables, catalog.variant)
