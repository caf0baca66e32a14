"""A checkpoint that is a weighted sum of others, made a few tensors at a time.

Only a group of tensors is in memory. Each group is a file of its own, as if a rank had written it.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from titan_dit.checkpoint.checkpoint import clean_up, commit, contents, ignore, read_into
from titan_dit.checkpoint.save_plan import GlobalPlan, plan_locally
from titan_dit.checkpoint.staging import TensorTree
from titan_dit.checkpoint.store import Location, store_of
from titan_dit.checkpoint.torch_files import Writer
from titan_dit.config.section import UserError

Shapes: TypeAlias = dict[str, tuple[torch.Size, torch.dtype]]
GROUP = 1 << 22
"""Elements of a group: at least these, and a 32nd of the model. Each takes 12 bytes, and 4 more for
every average of a checkpoint."""
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
    Raises OSError, and leaves nothing, if `final` cannot be written.
    """
    try:
        write_groups(final, part, sums, record, read)
    except BaseException:
        clean_up(final)
        raise


def write_groups(
    final: Location,
    part: str,
    sums: Sequence[tuple[Shapes, Sequence[Term]]],
    record: Mapping[str, Any],
    read: Callable[[int], None],
) -> None:
    """`write_sum`; on an error the folder is left."""
    jobs = [(group, terms) for shapes, terms in sums for group in groups(shapes)]
    outlines = [plan_locally({part: outline(group)}, not i) for i, (group, _) in enumerate(jobs)]
    whole = GlobalPlan()
    choices = whole.choose([pickle.dumps(local.plan) for local in outlines])
    aside, written, places = store_of(final).begin(final), dict[str, Any](), list[bytes]()
    for number, (group, terms) in enumerate(jobs):
        tensors = {part: summed(group, terms, read)}
        files, place = write_group(aside, tensors, number, choices[number])
        del tensors  # Before the next ones are made.
        written |= files
        places.append(place)
    commit(aside, final, record, written, whole.describe(places))


def write_group(
    aside: Location, tensors: TensorTree, number: int, choice: bytes
) -> tuple[dict[str, Any], bytes]:
    """Write a group as rank `number` would; return its files and where its tensors are."""
    local, writer = plan_locally(tensors, not number), Writer(aside, on_cpu=True)
    results = writer.write_plan(local.chosen(pickle.loads(choice)), local.planner, number)
    return writer.written, pickle.dumps(results)


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
    """Tensors of these shapes without memory: a plan looks at nothing else."""
    return {name: torch.zeros((), dtype=t).expand(shape) for name, (shape, t) in shapes.items()}


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
        read_into({name: buffers[name] for name in wanted}, term.path)
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
