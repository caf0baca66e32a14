"""`train --help` and `train --list`, and the keys that they read without torch."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, measured

from titan_dit.commands import train
from titan_dit.config import catalog, config_file, help_text
from titan_dit.config.section import Section


def test_help_takes_less_than_a_second(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    done, used = measured([ROOT / "run_train.sh", "--config", "digits", "--help"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert used.ru_utime + used.ru_stime < 1
    for words in ("--dry-run [WORLD]", "--list", "NGPU", "MAX_RESTARTS", "--model.hidden_size INT"):
        assert words in done.stdout
    basic, _, others = done.stdout.partition("ALL OTHER KEYS")
    assert basic.index("--data.name") < basic.index("--training.steps INT  = 1500 (default: unset)")
    assert "--faults" not in basic
    assert "--faults.step_timeout_s FLOAT  = 300.0\n" in others


def test_help_of_every_recipe_imports_no_torch():
    code = (
        "import sys\n"
        "from titan_dit.config import help_text\n"
        "for file in help_text.config_file.CONFIG_DIR.glob('*.toml'):\n"
        "    assert 'Write --config' not in help_text.help_of(['--config', str(file)])\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    modules = set(done.stdout.split())
    assert "titan_dit.config.help_text" in modules, done.stderr
    assert not modules & {"torch", "tyro", "numpy", "jaxtyping", "titan_dit.models.dit"}


def test_every_key_stands_in_the_help_once():
    said = help_text.help_of(["--config", "sit_xl2", "--optimizer.name", "muon"])
    listed = re.findall(r"^  --(\w+\.\w+) ", said, re.MULTILINE)
    config = config_file.load(["--config", "sit_xl2", "--optimizer.name", "muon"], catalog.variant)
    keys = [
        f"{section}.{key}"
        for section, table in config_file.to_tables(config).items()
        for key in {f.name for f in dataclasses.fields(getattr(config, section))} | {*table}
    ]
    assert sorted(listed) == sorted({*keys} - {*help_text.SERVE_OLD_RUNS})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own(Section):
    section = "job"

    first: tuple[int, ...] = (1, 2)
    """What the first
    key does."""
    second: float | None = None


def test_a_key_is_shown_with_its_kind_value_and_meaning():
    assert help_text.docstrings(Own) == {"first": "What the first\nkey does."}
    own = Own(second=0.5)
    assert help_text.value_of(own, "first") == "[1, 2]"
    assert help_text.value_of(own, "second") == "0.5 (default: unset)"
    lines = help_text.entry("job.first", "[INT, ...]", "[1, 2]", "What the first\nkey does.")
    assert list(lines) == ["  --job.first [INT, ...]  = [1, 2]", "      What the first key does."]


def test_a_wrong_config_is_named_before_the_help():
    said = help_text.help_of(["--config", "digits", "--training.step", "1"])
    assert said.startswith("[training] step: unknown key. Did you mean steps?\n")
    assert "Values are those of digits.toml" in said
    assert help_text.help_of(["--dry-run", "x", "--config", "digits"]).startswith("--dry-run x: ")


def test_the_recipes_are_listed_with_a_line_each(capsys):
    with pytest.raises(SystemExit) as ended:
        train.main(["--list"])
    assert ended.value.code == 0
    listed = capsys.readouterr().out.splitlines()
    files = sorted(path.name for path in config_file.CONFIG_DIR.glob("*.toml"))
    assert [line.split()[0] for line in listed[: len(files)]] == files
    [digits] = [line for line in listed[: len(files)] if line.split()[0] == "digits.toml"]
    assert digits.split(maxsplit=1)[1].startswith("The default run: 1,797 real")
    for line in listed:
        assert len(line) <= 120, line
