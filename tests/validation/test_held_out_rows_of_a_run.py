"""`evaluate` scores only rows of [data] that the run is known not to have trained on."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from titan_dit.commands.evaluate import check_held_out
from titan_dit.config.config_file import FORMAT
from titan_dit.config.section import UserError


def check(num=4, digest="a", **validation):
    record = {
        "config": {"validation": validation},
        "config_format": FORMAT,
        "data": {"digest": "a"},
    }
    source = SimpleNamespace(facts=SimpleNamespace(digest=digest))
    check_held_out(Path("run"), record, num, source)


def test_the_rows_that_the_run_held_out_are_scored():
    check(samples=4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"samples": 4, "digest": "b"}, r"\[data\] differs from the dataset that run was trained"),
        ({"samples": 5}, r"--validation\.samples 4: run has held out 5 samples and trained on all"),
        ({}, r"run has held out no samples of its \[data\].* --reference DIR"),
        ({"samples": 4, "path": "elsewhere"}, r"run has held out no samples of its \[data\]"),
    ],
)
def test_rows_that_it_may_have_trained_on_are_refused(given, message):
    with pytest.raises(UserError, match=message):
        check(**given)
