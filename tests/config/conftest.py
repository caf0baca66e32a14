"""Fixtures of the config tests: a small TOML config, loaded, or the error that refuses it."""

from functools import partial

import pytest
from small_config import load_small, refuse_small


@pytest.fixture
def load(tmp_path):
    return partial(load_small, tmp_path)


@pytest.fixture
def refused(tmp_path):
    return partial(refuse_small, tmp_path)
