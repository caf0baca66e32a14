"""Every test runs with the shapes and types of titan_dit's annotations checked."""

import pytest
from jaxtyping import install_import_hook

# Before the first import of titan_dit; the pure-Python config needs no shape checks.
install_import_hook(
    [
        "titan_dit.rng",
        "titan_dit.noise_schedule",
        "titan_dit.models",
        "titan_dit.objectives",
        "titan_dit.samplers",
        "titan_dit.data",
        "titan_dit.evaluation",
        "titan_dit.state.original_weights",
        "titan_dit.observe.images",
    ],
    # As for mypy, an int will do where a float is wanted.
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)


ALONE = (
    "faults/test_agents.py",
    "faults/test_chaos.py",
    "faults/test_stop_request.py",
    "faults/test_stops.py",
    "faults/test_watchdog.py",
    "benchmarks/test_step_benchmark.py",
    "test_loader_benchmark.py",
)
"""Tests of time, beside which nothing else runs: see run_tests.sh."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.as_posix().endswith(ALONE):
            item.add_marker("alone")
