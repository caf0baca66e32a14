"""Write a checkpoint a group of tensors at a time: each is a file, as if a rank had written it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from titan_dit.checkpoint.checkpoint import clean_up, commit
from titan_dit.checkpoint.save_plan import GlobalPlan, plan_locally
from titan_dit.checkpoint.staging import TensorTree
from titan_dit.checkpoint.store import Location, store_of
from titan_dit.checkpoint.torch_files import Writer

Group: TypeAlias = tuple[TensorTree, Callable[[], TensorTree]]
"""(outline of some tensors, function that makes them)."""


def write(final: Location, record: Mapping[str, Any], groups: Sequence[Group]) -> None:
    """Write the checkpoint `final`; one group is in memory.

    Raises OSError, and leaves nothing, if `final` cannot be written.
    """
    try:
        write_groups(final, record, groups)
    except BaseException:
        clean_up(final)
        raise


def write_groups(final: Location, record: Mapping[str, Any], groups: Sequence[Group]) -> None:
    """`write` without its clean-up after an error."""
    outlines = [plan_locally(tree, not number) for number, (tree, _) in enumerate(groups)]
    whole = GlobalPlan()
    choices = whole.choose([pickle.dumps(local.plan) for local in outlines])
    aside, written, places = store_of(final).begin(final), dict[str, Any](), list[bytes]()
    for number, (_, make) in enumerate(groups):
        tensors = make()
        files, place = write_group(aside, tensors, number, choices[number])
        del tensors  # Before the next ones are made.
        written |= files
        places.append(place)
    commit(aside, final, record, written, whole.describe(places))


def write_group(
    aside: Location, tensors: TensorTree, number: int, choice: bytes
) -> tuple[dict[str, Any], bytes]:
    """Write a group as rank `number` would; return its files and where its tensors are."""
    local, writer = plan_locally(tensors, not number), Writer(aside)
    results = writer.write_plan(local.chosen(pickle.loads(choice)), local.planner, number)
    return writer.written, pickle.dumps(results)


def outline(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor of this shape and dtype that takes no memory: planning reads no values."""
    return torch.zeros((), dtype=dtype).expand(shape)
