"""Frozen networks that complete a batch before `prepare`: a text encoder, and that of [repa]."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from titan_dit.config.section import UserError
from titan_dit.config.training import RepaConfig, TextConfig
from titan_dit.data.base import Batch, Field
from titan_dit.data.latent_facts import FEATURES, LatentFacts
from titan_dit.objectives.base import Placement

if TYPE_CHECKING:
    from titan_dit.diffusion.online_text import OnlineText
    from titan_dit.pictures.features import PictureFeatures


@dataclass
class FrozenNetworks:
    """The frozen networks of a run. Mutable: `open_text` and `Diffusion.aligned` fill it."""

    text: OnlineText | None = None
    """The text encoder of [text]; None if embeddings are stored."""
    features: PictureFeatures | None = None
    """The network of [repa]; None if features are stored, or not needed."""

    def open_text(self, text: TextConfig, data: LatentFacts) -> None:
        """Load the text encoder, for data that hold token ids. UserError if it does not fit."""
        if text.mode == "cached":
            raise UserError(
                '[text] mode="cached", but [data] holds the captions as token ids alone. Set mode '
                '= "online", or store embeddings: `data encode --text-encoder` without '
                "--text-dtype none."
            )
        # Imported late: most runs embed no captions.
        from titan_dit.diffusion import online_text

        self.text = online_text.opened(text, data)

    def place(self, placement: Placement, flops_per_sample: int) -> Sequence[str]:
        """See `Objective.place_frozen`: the text encoder; () without one."""
        return self.text.place(placement, flops_per_sample) if self.text else ()

    def collect(self, batch: Batch, repa: RepaConfig) -> Batch:
        """See `Objective.collect`: embed captions, and compute features of trained batches.

        Features are left out after [repa] last_step.
        """
        fields = self.text.embed(batch.fields) if self.text else batch.fields
        if repa.last_step is not None and batch.step > repa.last_step:
            fields = {name: value for name, value in fields.items() if name != FEATURES}
        elif self.features and batch.is_trained:
            self.features.to(batch.weight.device)
            found = self.features.of(fields["latent"].to(torch.uint8)).flatten(1, 2)
            fields = {**fields, FEATURES: found}
        return dataclasses.replace(batch, fields=fields)

    def collected(self, fields: Mapping[str, Field], data: LatentFacts) -> Mapping[str, Field]:
        """See `Objective.collected`."""
        text = data.text
        if self.features:
            found = dataclasses.replace(data, features=self.features.facts)
            fields = {**fields, FEATURES: found.fields(torch.uint8)[FEATURES]}
        if not text or not text.is_online:
            return fields
        kept = {name: field for name, field in fields.items() if name != "text_ids"}
        size = (None if data.bucket_text else text.tokens, text.width)
        return {**kept, "text": Field(text.torch_dtype, size)}

    def readings(self) -> Mapping[str, float]:
        """`text_ms`: mean milliseconds in which the captions of a batch are embedded."""
        found = self.text.clock.read() if self.text else None
        return {} if found is None else {"text_ms": found}
