"""A torch outside the range is refused in one line, before it is imported."""

import importlib.metadata
import sys
import tomllib

import pytest
from commands import ROOT

from titan_dit import __main__, train
from titan_dit.config.section import UserError
from titan_dit.launcher import torch_range


def installed(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)


@pytest.mark.parametrize("version", ["2.11.0a0+nv25.12", "2.13.1+cpu", "2.15.2"])
def test_a_torch_in_the_range_starts(monkeypatch, version):
    installed(monkeypatch, version)
    torch_range.check_torch()


@pytest.mark.parametrize("version", ["2.10.2", "1.13.1", "2.16.0", "3.0"])
@pytest.mark.parametrize("words", [["train"], ["sample", "--run", "x"], ["train", "--dry-run"]])
def test_another_torch_is_refused_with_the_range_and_a_way_out(monkeypatch, version, words):
    installed(monkeypatch, version)
    monkeypatch.setattr(sys, "argv", ["titan_dit", *words])
    with pytest.raises(UserError) as error:
        __main__.main()
    assert "\n" not in str(error.value)
    assert f"torch {version} is installed, but titan_dit runs with 2.11 to 2.15" in str(error.value)
    assert "pip install torch==2.15.0" in str(error.value)


def test_a_rank_that_was_started_without_the_command_line_refuses_too(monkeypatch):
    installed(monkeypatch, "2.10.0")
    monkeypatch.setattr(sys, "argv", ["train", "--config", "digits"])
    with pytest.raises(UserError, match=r"torch 2\.10\.0 is installed"):
        train.main()


def test_the_range_is_that_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (major, oldest), (_, newest) = torch_range.OLDEST, torch_range.NEWEST
    wanted = f"torch>={major}.{oldest},<{major}.{newest + 1}"
    assert wanted in project["dependencies"]
