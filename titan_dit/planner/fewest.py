"""The fewest GPUs that hold a run: decided by memory, with the layouts that need least."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import NamedTuple

from titan_dit.config.job import JobConfig
from titan_dit.config.section import UserError
from titan_dit.dry_run.memory import StorageKind
from titan_dit.planner import memory as memory_of
from titan_dit.planner.candidates import KEYS, MODES, Candidate, Space
from titan_dit.planner.hardware import Device
from titan_dit.planner.memory import Needed
from titan_dit.planner.weighing import Held, Model, fullest

FREE = ("parallel.tp", "parallel.pp", "parallel.dp_shard")
"""The axes that are tried; replicas and more samples per microbatch save no memory that these do
not. cp does where activations need most: it is tried if nothing else fits."""


class Smallest(NamedTuple):
    """The layout that needs least on a number of GPUs."""

    gpus: int
    candidate: Candidate
    needed: Needed
    held: Held

    @property
    def is_mostly_activations(self) -> bool:
        """Whether what a microbatch keeps and works with is more than all else."""
        own = self.held[StorageKind.ACTIVATIONS] + self.held[StorageKind.TEMPORARY]
        return own > sum(self.held.values()) / 2


def gpu_counts(device: Device, first: int, last: int) -> Iterator[int]:
    """From `first` to `last`: 1, 2, 4, ... GPUs of a node, twice as many nodes each, and `last`."""
    count = 1
    while count < last:
        if count >= first:
            yield count
        following = 2 * count
        node = device.gpus_per_node
        count = node if count < node < following else following
    yield last


def fewest(
    config: JobConfig,
    device: Device,
    fixed: Collection[str],
    model: Model,
    gpus: tuple[int, int],
) -> Smallest | None:
    """The first number of GPUs within `gpus` (from, to) that holds the run; None if none does."""
    for count in gpu_counts(device, *gpus):
        found = smallest(config, device, fixed, model, count)
        if found and memory_of.fits(found.needed, device):
            return found
    return None


def smallest(
    config: JobConfig, device: Device, fixed: Collection[str], model: Model, gpus: int
) -> Smallest | None:
    """The layout that needs least on `gpus`; the first one that fits, if one does."""
    found = smallest_of(FREE, config, device, fixed, model, gpus)
    if found is None or memory_of.fits(found.needed, device) or not found.is_mostly_activations:
        return found
    return smallest_of((*FREE, "parallel.cp"), config, device, fixed, model, gpus) or found


def smallest_of(
    axes: Collection[str],
    config: JobConfig,
    device: Device,
    fixed: Collection[str],
    model: Model,
    gpus: int,
) -> Smallest | None:
    """`smallest` of all sizes of some axes."""
    best: Smallest | None = None
    modes = [config.remat.mode] if "remat.mode" in fixed else list(reversed(MODES))
    for mode in modes:
        for candidate, space in small_layouts(axes, config, device, fixed, gpus, mode):
            plan = space.plan(candidate)
            try:
                counts = model.counts(plan)
            except (UserError, ImportError):
                continue
            held, needed, _ = fullest(model, plan, counts, device)
            if best is None or needed.total < best.needed.total:
                best = Smallest(gpus, candidate, needed, held)
            if memory_of.fits(needed, device):
                return best
    return best


def small_layouts(
    axes: Collection[str],
    config: JobConfig,
    device: Device,
    fixed: Collection[str],
    gpus: int,
    mode: str,
) -> Iterator[tuple[Candidate, Space]]:
    """Layouts with one sample a microbatch and one replica, unless these are fixed."""
    values = {
        "parallel.dp_replicate": 1,
        "parallel.cp": 1,
        "parallel.reshard_after_forward": "auto",
        "parallel.sequence_parallel": True,
        "pipeline.schedule": "1f1b",
        "pipeline.virtual_stages": 1,
        "training.microbatch_size": 1,
        "remat.mode": mode,
        "precision.float8": "off",
    }
    for key, value in values.items():
        if key not in fixed:
            section, _, name = key.partition(".")
            changed = replace(getattr(config, section), **{name: value})
            config = replace(config, **{section: changed})
    free = [key for key in axes if key not in fixed]
    space = Space(config, gpus, device, [key for key in KEYS if key not in free])
    for candidate in sorted(space, key=lambda one: (one.cp, one.tp, one.pp)):
        yield candidate, space
