"""Refuses ranks whose configs differ: files or flags of another host."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from titan_dit.config.config_file import Tables, to_tables
from titan_dit.config.job import JobConfig
from titan_dit.config.section import UserError, show

OF_A_HOST = (("pipeline", "network"),)
"""Keys that may differ: each host names its own."""


def check_same_config(config: JobConfig, gather: Callable[[Any], list[Any]]) -> None:
    """Raise UserError, with the first difference, if a rank's config is not that of rank 0.

    Collective. `gather`: all-gather of a value over the ranks.
    """
    mine = shared_keys(config)
    digests = gather(hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest())
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if not others:
        return
    # The whole config travels only if there is something to report.
    tables, rank = gather(mine), others[0]
    section, key, first, other, more = next(differences(tables[0], tables[rank]))
    also = f" ({more} more keys differ)" if more else ""
    raise UserError(
        f"[{section}] {key}={show(first)} on rank 0, but {show(other)} on rank {rank}{also}. "
        "Launch the same command and config file on all hosts."
    )


def differences(first: Tables, other: Tables) -> Iterator[tuple[str, str, Any, Any, int]]:
    """Keys with different values: section, key, both values, how many follow."""
    keys = [
        (section, key)
        for section, table in first.items()
        for key in dict.fromkeys([*table, *other.get(section, {})])
        if table.get(key) != other.get(section, {}).get(key)
    ]
    for number, (section, key) in enumerate(keys, start=1):
        yield section, key, first[section].get(key), other[section].get(key), len(keys) - number


def shared_keys(config: JobConfig) -> Tables:
    """The config as tables without the keys of `OF_A_HOST`."""
    tables = to_tables(config)
    return {
        section: {key: value for key, value in table.items() if (section, key) not in OF_A_HOST}
        for section, table in tables.items()
    }
