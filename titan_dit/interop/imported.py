"""Write imported weights as a checkpoint for runs to start from, a group of tensors at a time.

It appears whole or not at all, even if its writer is killed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan_dit import __version__
from titan_dit.checkpoint.averages import Group, outline_of_groups, write_grouped
from titan_dit.checkpoint.staging import TensorTree
from titan_dit.config import catalog, config_file
from titan_dit.data.base import DataFacts
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.interop.tensor_file import OnDemand, writing
from titan_dit.models.dit_config import DiTConfig
from titan_dit.ranks import disk_errors
from titan_dit.system.files import new_path


@contextmanager
def new_output(target: Path) -> Iterator[Path]:
    """Yield a path to write, as `files.new_path`. Raises UserError if the target cannot be written.

    The path is in a folder beside the target, which may hold other files, too. Leftovers of killed
    processes are deleted. Raises UserError if the target cannot be written. Code that reads tensors
    within the block should use `tensor_file.reading`, or its errors name the target.
    """
    # torch.save raises a RuntimeError.
    with disk_errors.writing(f"--out {target}", also=(RuntimeError,)), new_path(target) as place:
        yield place


EMA_DECAY = "0.9999"
"""Decay of the imported average. A run with another decay starts from it, too."""
GROUP = 32 * 2**20
"""Maximum bytes of tensors in memory at once; a larger tensor is a group of its own."""


def record_of(tables: config_file.Tables, facts: DataFacts) -> dict[str, Any]:
    """Return the checkpoint's record, as of a run at step 0.

    `tables`: [model], [objective] and [data]; other sections are unknown and get their defaults.
    """
    filled = tables | {
        "training": {"steps": 1, "global_batch_size": 1},
        "ema": {"decays": [float(EMA_DECAY)], "warmup": False},
    }
    whole = config_file.build(filled, catalog.variant)
    whole = replace(whole, job=whole.job.settled())
    return {
        **new_record(),
        "config": config_file.to_tables(whole),
        "config_format": config_file.FORMAT,
        "data": facts.as_json(),
    }


def record_made_of(record: Mapping[str, Any], **tables: Any) -> dict[str, Any]:
    """The record of weights made from a run's, without averages; `tables` replace sections."""
    averages = {**record["config"]["ema"], "decays": [], "power": [], "warmup": False}
    return {
        **new_record(),
        "config": {**record["config"], "ema": averages, **tables},
        "config_format": record.get("config_format", 1),
        "data": record["data"],
    }


def new_record() -> dict[str, Any]:
    """The keys common to the records of all weights without a run."""
    return {
        "step": 0,
        "cursor": 0,
        "nan_steps": 0,
        "imported": True,
        "versions": {"titan_dit": __version__, "torch": torch.__version__},
    }


def dit_record(
    config: DiTConfig, objective: Mapping[str, Any], facts: LatentFacts
) -> dict[str, Any]:
    """`record_of` for a DiT."""
    return record_of({**dit_tables(config), "objective": dict(objective)}, facts)


def dit_tables(config: DiTConfig) -> dict[str, dict[str, Any]]:
    """[model] and [data] of a DiT; [data] is a placeholder, as the weights' data are unknown."""
    keys = (
        "latent_size",
        "in_channels",
        "num_classes",
        "hidden_size",
        "num_layers",
        "num_heads",
        "patch_size",
        "mlp_ratio",
        "timestep_frequencies",
    )
    return {
        "model": {"name": "dit", **{key: getattr(config, key) for key in keys}},
        "data": {
            "name": "synthetic",
            "latent_size": config.latent_size,
            "channels": config.in_channels,
            "num_classes": config.num_classes,
        },
    }


def save(
    target: Path,
    tensors: Mapping[str, Any],
    record: Mapping[str, Any],
    files: Mapping[str, Path] | None = None,
) -> None:
    """Write the checkpoint and copies of `files`, by their names in it; whole or not at all.

    `tensors`: nested as in a run's checkpoint; mappings may be read on demand.
    """
    found = list(leaves(tensors, tensors["model"]))
    with writing(target, (leaf.outline for leaf in found)), new_output(target) as place:
        write_grouped(place, record, list(groups(found)))
        for name, file in (files or {}).items():
            (place / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, place / name)


@dataclass(frozen=True)
class Leaf:
    """A tensor of a nested dict."""

    keys: tuple[str, ...]
    outline: Tensor
    get: Callable[[], Tensor]
    source: tuple[int, str]
    """Identifier of the tensor, equal for one tensor under several keys."""


def leaves(tree: Mapping[str, Any], model: Mapping[str, Tensor]) -> Iterator[Leaf]:
    """The tensors of a tree; a model parameter and its averages are adjacent."""
    order = {name: number for number, name in enumerate(model)}
    found = list(flattened(tree))
    yield from sorted(found, key=lambda leaf: next(order[k] for k in leaf.keys if k in order))


def flattened(tree: Mapping[str, Any], keys: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """The tensors of a tree, in its order."""
    outlines: Mapping[str, Any] = tree.outline if isinstance(tree, OnDemand) else tree
    for name, value in outlines.items():
        if isinstance(value, Mapping):
            yield from flattened(value, (*keys, name))
        else:
            outline = outline_of_groups(value.shape, value.dtype)
            yield Leaf((*keys, name), outline, partial(tree.__getitem__, name), (id(tree), name))


def groups(found: list[Leaf]) -> Iterator[Group]:
    """Groups of consecutive tensors, of at most GROUP bytes each."""
    group, size = list[Leaf](), 0
    for leaf in found:
        if group and size + leaf.outline.nbytes > GROUP:
            yield group_of(group)
            group, size = [], 0
        group.append(leaf)
        size += leaf.outline.nbytes
    yield group_of(group)


def group_of(group: list[Leaf]) -> Group:
    """(outline, make) of a group; `make` computes a source that several leaves share once."""

    def make() -> TensorTree:
        made: dict[tuple[int, str], Tensor] = {}
        for leaf in group:
            if leaf.source not in made:
                made[leaf.source] = leaf.get()
        return nested({leaf.keys: made[leaf.source] for leaf in group})

    return nested({leaf.keys: leaf.outline for leaf in group}), make


def nested(tensors: Mapping[tuple[str, ...], Tensor]) -> TensorTree:
    """Nested dicts of tensors, by their keys."""
    tree: dict[str, Any] = {}
    for keys, tensor in tensors.items():
        inner = tree
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[keys[-1]] = tensor
    return tree
