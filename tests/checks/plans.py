"""Plans of the tiny run on any mesh."""

import math

from tiny import tiny_config

from titan_dit.checks import validate
from titan_dit.plan import resolve


def planned(sizes=None, following=False, ranks=None, **sections):
    """The config of a mesh of these sizes (dp_shard 1 if it is not among them), and its plan."""
    sizes = {"dp_shard": 1} | (sizes or {})
    config = tiny_config(**sections | {"parallel": sections.get("parallel", {}) | sizes})
    return config, resolve(config, ranks or math.prod(sizes.values()), following)


def check(sizes=None, following=False, **sections):
    """All that is refused without a device; None where nothing is."""
    return validate(*planned(sizes, following, **sections))
