"""Plans of the tiny run on any mesh."""

import math

from tiny import tiny_config

from titan_dit.checks import validate
from titan_dit.plan import resolve


def planned(sizes=None, resuming=False, ranks=None, **sections):
    """The config and plan of a mesh of these sizes; dp_shard defaults to 1."""
    sizes = {"dp_shard": 1} | (sizes or {})
    config = tiny_config(**sections | {"parallel": sections.get("parallel", {}) | sizes})
    return config, resolve(config, ranks or math.prod(sizes.values()), resuming)


def check(sizes=None, resuming=False, **sections):
    """Run every check that needs no device; raises what they refuse."""
    return validate(*planned(sizes, resuming, **sections))
