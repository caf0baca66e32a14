"""The loss on samples that are not trained on: [validation]."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from titan_dit.config import ValidationConfig
from titan_dit.data import loader
from titan_dit.data.base import DataConfig, Source
from titan_dit.data.held_out import held_out_rows
from titan_dit.evaluation.overlap import check_apart
from titan_dit.objectives.base import DataShare, Objective, Prepared
from titan_dit.observe.console import LOSS
from titan_dit.parallel.runtime import World
from titan_dit.pipeline.base import Executor
from titan_dit.rng import SampleRNG
from titan_dit.section import UserError, hints_of


@dataclass(frozen=True)
class ValidationSet:
    """Rows of a source."""

    source: Source
    rows: Sequence[int]


def held_out_of(config: ValidationConfig, source: Source, seed: int) -> tuple[int, ...]:
    """The rows that leave a dataset, ascending."""
    return held_out_rows(source, seed, config.num_held_out)


def open_set(
    config: ValidationConfig, data: DataConfig, source: Source, held_out: Sequence[int]
) -> ValidationSet | None:
    """What to validate on; None where nothing asks for it. Raises UserError."""
    if not config.every:
        return None
    if not config.path:
        return ValidationSet(source, held_out)
    keys = hints_of(type(data))
    if "path" not in keys:
        raise UserError(
            f"[validation] path={config.path}: [data] name={data.name} is read from no path. Leave "
            "path out and set samples."
        )
    tables = {key: getattr(data, key) for key in keys} | {"path": config.path}
    other = type(data)(**tables).open()
    differing = {k for k in source.fields if other.fields.get(k) != source.fields[k]}
    if differing or other.fields.keys() != source.fields.keys():
        raise UserError(
            f"[validation] path={config.path} holds {dict(other.fields)}, but [data] holds "
            f"{dict(source.fields)}. Give a dataset of the same kind."
        )
    if config.samples > len(other):
        raise UserError(
            f"[validation] samples={config.samples}, but {config.path} holds {len(other)}. "
            f"Set samples = {len(other)}, or 0 for all."
        )
    return ValidationSet(other, range(config.samples or len(other)))


def open_apart(
    config: ValidationConfig,
    data: DataConfig,
    source: Source,
    held_out: Sequence[int],
    world: World,
) -> ValidationSet | None:
    """`open_set`, whose rows are none of those that are trained on; every rank calls."""
    found = open_set(config, data, source, held_out)
    if found is not None and config.path:
        check_apart(config.path, found.source, found.rows, source, world)
    return found


def losses(
    chosen: ValidationSet,
    objective: Objective,
    executor: Executor,
    share: DataShare,
    *,
    seed: int,
    batch_size: int,
    alive: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """The loss over all rows, and of every evaluation of the objective that has a name.

    Each data rank takes its share of the rows, `batch_size` at a time. Sample i of the set has
    number i: the same draws every time, on every layout.
    """
    count = -(-len(chosen.rows) // share.num_ranks)
    mine = range(share.rank * count, (share.rank + 1) * count)
    parts: dict[str, list[Tensor]] = {}
    for first in range(0, count, batch_size):
        # Every rank evaluates equally many; those behind the end count for nothing.
        numbers = [min(i, len(chosen.rows) - 1) for i in mine[first : first + batch_size]]
        pairs = [(i, chosen.rows[i]) for i in numbers]
        inspect, device = objective.inspect, share.device
        batch = loader.load_samples(chosen.source, pairs, inspect, device, len(pairs))
        rng = SampleRNG(seed, batch.sample_numbers)
        for name, prepared in objective.evaluations(batch, rng).items():
            sums = sums_of(executor.evaluate(prepared), prepared)
            parts.setdefault(name, []).append(sums)
        alive()
    means = {}
    for name, found in parts.items():
        whole = share.gather(torch.cat(found))[: len(chosen.rows)].sum(0)
        means[name] = float(whole[0] / whole[1])
    named: Mapping[str, float] = {f"{LOSS}_{name}": v for name, v in means.items() if name}
    return {LOSS: sum(means.values()) / len(means), **named}


def sums_of(per_token: Float[Tensor, "b n"], prepared: Prepared) -> Float[Tensor, "b 2"]:
    """The weighted sum of every sample's losses and the sum of their weights, in fp64."""
    weight = prepared.weight if prepared.weight.ndim == 2 else prepared.weight[:, None]
    weight = weight.expand_as(per_token).double()
    return torch.stack(((per_token.double() * weight).sum(1), weight.sum(1)), 1)
