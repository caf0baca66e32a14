"""Captions padded to a multiple of tokens: each drawn with its own length, as in training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from titan_dit.diffusion.base import text_multiple
from titan_dit.diffusion.conditions import Given, rows_of
from titan_dit.objectives.base import DataShare


def by_text_length(
    model: Any,
    conditions: Sequence[Given],
    run: Callable[[Tensor | slice, Sequence[Given]], Mapping[str, Tensor]],
    share: DataShare | None = None,
) -> Mapping[str, Tensor]:
    """`run(rows, their conditions)` for rows whose texts are padded alike; joined in order.

    All rows at once, unless captions are padded to a multiple of tokens: each then gets its own
    length, cut, and no row depends on those beside it. `model`: the [model] section.
    `conditions`: those of the same rows, such as prompts and negative ones. `share`: the data ranks
    that call this together with as many rows each. All make the same sequence of runs with as many
    rows, since a sharded network is gathered in each: a rank with fewer rows of a length repeats
    its first one.
    """
    multiple = text_multiple(model)
    if not multiple:
        return run(slice(None), conditions)
    lengths = torch.stack([given["text_length"] for given in conditions], 1)
    own = -(-lengths.clamp(min=1) // multiple) * multiple
    share = share or DataShare(own.device)
    everyone = share.gather(own)
    parts, places = [], []
    for wanted in torch.unique(everyone, dim=0):
        is_of_ranks = (everyone == wanted).all(1).view(share.num_ranks, -1)
        place = is_of_ranks[share.rank].nonzero()[:, 0]
        rows = functional.pad(place, (0, int(is_of_ranks.sum(1).max()) - len(place)))
        fitted = [
            fitted_to(tokens, rows_of(given, rows))
            for tokens, given in zip(wanted.tolist(), conditions, strict=True)
        ]
        found = run(rows, fitted)
        parts.append({name: value[: len(place)] for name, value in found.items()})
        places.append(place)
    order = torch.cat(places).argsort()
    return {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}


def fitted_to(tokens: int, given: Given) -> Given:
    """A condition with texts of `tokens` tokens."""
    return {
        **given,
        "text": given["text"][:, :tokens],
        "text_length": given["text_length"].clamp(max=tokens),
    }
