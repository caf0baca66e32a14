"""Write a checkpoint that is a weighted sum of others; one group of tensors is in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from titan_dit.checkpoint import grouped
from titan_dit.checkpoint.checkpoint import contents, ignore, read_into
from titan_dit.checkpoint.staging import TensorTree
from titan_dit.checkpoint.store import Location
from titan_dit.config.section import UserError
from titan_dit.system.files import reason_of

Shapes: TypeAlias = dict[str, tuple[torch.Size, torch.dtype]]
GROUP = 1 << 22
"""Maximum elements of a group, or 1 / LARGEST_SHARE of the model if that is more. An element takes
12 bytes, and 4 more for every average of a checkpoint."""
LARGEST_SHARE = 32
CHUNK = 1 << 20
"""Elements that are converted to fp64 at once."""


@dataclass(frozen=True)
class Term:
    """Tensors of one checkpoint, and their weights in the sum."""

    path: Location
    weights: Mapping[str, float]
    """Prefix of the tensors' names, such as "ema.power_0.05." -> weight."""


def shapes_of(terms: Sequence[Term]) -> Shapes:
    """Name without prefix -> (shape, dtype). Raises UserError if the terms differ."""
    found: Shapes | None = None
    for term in terms:
        saved = contents(term.path)
        for prefix in term.weights:
            own = {n.removeprefix(prefix): saved[n] for n in saved if n.startswith(prefix)}
            if found is not None and own != found:
                raise UserError(
                    f"{term.path}: its tensors {prefix}* are not those of {terms[0].path}. Delete "
                    "the one that is of another model."
                )
            found = own
    assert found is not None, "no terms"
    return found


def write_sum(
    final: Location,
    part: str,
    sums: Sequence[tuple[Shapes, Sequence[Term]]],
    record: Mapping[str, Any],
    read: Callable[[int], None] = ignore,
) -> None:
    """Write the checkpoint `final`: under `part`, each name of `sums` is the sum of its terms.

    The sums are added in fp64. `read` gets the bytes read. The terms' files have been verified.
    Leaves nothing on an error. Raises OSError if `final` cannot be written, UserError if a term
    cannot be read.
    """
    jobs = [(group, terms) for shapes, terms in sums for group in groups(shapes)]

    def made(group: Shapes, terms: Sequence[Term]) -> TensorTree:
        return {part: summed(group, terms, read)}

    grouped.write(
        final,
        record,
        [({part: outline(group)}, partial(made, group, terms)) for group, terms in jobs],
    )


def groups(shapes: Shapes) -> Iterator[Shapes]:
    """Yield consecutive tensors of few elements together; a large one alone."""
    limit = max(GROUP, sum(math.prod(shape) for shape, _ in shapes.values()) // LARGEST_SHARE)
    group, elements = Shapes(), 0
    for name, (shape, dtype) in shapes.items():
        if group and elements + math.prod(shape) > limit:
            yield group
            group, elements = Shapes(), 0
        group[name] = shape, dtype
        elements += math.prod(shape)
    if group:
        yield group


def outline(shapes: Shapes) -> dict[str, Tensor]:
    """Tensors of these shapes without memory."""
    return {name: grouped.outline(shape, dtype) for name, (shape, dtype) in shapes.items()}


def summed(shapes: Shapes, terms: Sequence[Term], read: Callable[[int], None]) -> dict[str, Tensor]:
    """The weighted sums of a group, in their own dtypes."""
    sums = {name: torch.zeros(shape, dtype=torch.float64) for name, (shape, _) in shapes.items()}
    prefixes = {prefix for term in terms for prefix in term.weights}
    # Allocated once, and read into for every term.
    buffers = {
        f"{p}{n}": torch.empty(shape, dtype=t) for p in prefixes for n, (shape, t) in shapes.items()
    }
    for term in terms:
        wanted = {
            f"{prefix}{name}": (name, w) for prefix, w in term.weights.items() for name in shapes
        }
        try:
            read_into({name: buffers[name] for name in wanted}, term.path)
        except (OSError, RuntimeError) as error:
            raise UserError(f"{term.path} cannot be read: {reason_of(error)}.") from None
        for key, (name, weight) in wanted.items():
            add(sums[name], buffers[key], weight)
            read(buffers[key].nbytes)
    del buffers
    return {name: sums.pop(name).to(dtype) for name, (_, dtype) in shapes.items()}


def add(total: Tensor, tensor: Tensor, weight: float) -> None:
    """Add weight times tensor to an fp64 total, without an fp64 copy of the tensor."""
    sums, values = total.view(-1), tensor.view(-1)
    for first in range(0, len(sums), CHUNK):
        sums[first : first + CHUNK].add_(values[first : first + CHUNK], alpha=weight)
