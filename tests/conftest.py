"""Runs every test with titan_dit's shape and type annotations checked."""

import gc
import multiprocessing
import shutil
import signal
import sys
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

# The sections of models import torch late, so names in their annotations are unknown at run time.
MODELS = [
    f"titan_dit.models.{file.stem}"
    for file in (Path(__file__).parent.parent / "titan_dit" / "models").glob("*.py")
    if not file.stem.endswith("_config")
]
# Before the first import of titan_dit; the pure-Python config needs no shape checks.
install_import_hook(
    [
        "titan_dit.rng",
        "titan_dit.diffusion",
        *MODELS,
        "titan_dit.objectives",
        "titan_dit.data",
        "titan_dit.validation",
        "titan_dit.interop.original_dit",
        "titan_dit.observe.curve",
    ],
    # An int is accepted as a float, as in mypy.
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="also run tests marked `long`")


# Python would go through all modules and tests again and again: a seventh of the time.
gc.set_threshold(100_000, 50, 50)


def pytest_collection_finish():
    """Leave what has been imported out of collections until a test calls `gc.unfreeze`."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _leaves_no_process_group():
    """A test that fails in `process_group.start` leaves its group open, see there."""
    yield
    if "torch.distributed" in sys.modules:
        from torch import distributed as dist

        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Fail if tests have left processes: Python's exit would wait for them."""
    left = multiprocessing.active_children()
    if left:
        # torch's handler raises for data workers that are killed.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for process in left:
            process.kill()
        print(f"\nProcesses that tests have left: {left}")
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def needs_of(module):
    """Markers for modules whose tests start ranks or processes, from the helpers they import."""
    names = vars(module)
    homes = {getattr(names.get(name), "__module__", "") for name in STARTERS}
    if "harness" in homes:
        yield "ranks"
    if homes & {"commands", "running"} or names.keys() & {"commands", "forked", "subprocess"}:
        yield "process"


STARTERS = ("on_ranks", "environment", "run", "train", "sample", "Running", "undisturbed_run")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        for marker in needs_of(item.module):
            item.add_marker(marker)
        if item.get_closest_marker("compiler") and shutil.which("g++") is None:
            item.add_marker(pytest.mark.skip(reason="torch.compile needs a C++ compiler"))
    if not config.getoption("--long"):
        later = [item for item in items if item.get_closest_marker("long")]
        items[:] = [item for item in items if not item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=later)
