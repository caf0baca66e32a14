"""Hidden dropout of a language model: drawn by sample number, off in evaluations."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from titan_dit.models.base import ModelSpec
from titan_dit.objectives.base import Prepared
from titan_dit.rng import SampleRNG

NAME = "dropout_keys"
"""Name of the keys in the context of a model with dropout, int64 [b]; see `SampleDropout`."""


def drops(spec: ModelSpec) -> bool:
    """True if a model has dropout."""
    return NAME in spec.context


def context(rng: SampleRNG) -> dict[str, Tensor]:
    """The context for a model with dropout: a key for each sample."""
    return {NAME: rng.keys("dropout")}


def without(prepared: Prepared) -> Prepared:
    """The batch with dropout off: negative keys drop nothing."""
    if NAME not in prepared.context:
        return prepared
    off = -torch.ones_like(prepared.context[NAME])
    return replace(prepared, context={**prepared.context, NAME: off})
