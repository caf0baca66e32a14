"""Importing what a config names, and the errors."""

import subprocess
import sys

import commands
import pytest

from titan_dit.config import dotted_names
from titan_dit.config.section import UserError

TABLE = {"plain": "titan_dit.rng:permutation", "other": "titan_dit.nowhere:nothing"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A temporary current folder; modules imported from it are unloaded afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def refused(name, table=TABLE):
    with pytest.raises(UserError) as caught:
        dotted_names.look_up(table, "[model] name", name)
    message = str(caught.value)
    assert message.startswith(f'[model] name="{name}"')
    return message


def test_ours_stand_in_a_table_and_are_imported_when_asked_for():
    from titan_dit.rng import permutation

    assert dotted_names.look_up(TABLE, "[model] name", "plain") is permutation


def test_an_unknown_name_is_answered_with_the_nearest_and_the_way_to_one_s_own():
    message = refused("plane")
    assert "is unknown. Did you mean plain?" in message
    assert 'Your own are written "package.module:Name".' in message
    assert "Valid: other, plain." in refused("xyz")
    assert "is unknown. Your own" in refused("xyz", {})


def test_a_user_s_own_is_found_in_the_current_folder(folder):
    (folder / "door_own.py").write_text("class Net:\n    pass\n")
    found = dotted_names.look_up(TABLE, "[model] name", "door_own:Net")
    assert (found.__module__, found.__name__) == ("door_own", "Net")
    (folder / "door_pkg").mkdir()
    (folder / "door_pkg" / "inner.py").write_text("def make():\n    pass\n")
    assert dotted_names.look_up(TABLE, "", "door_pkg.inner:make").__name__ == "make"


def test_the_current_folder_hides_no_installed_module(folder):
    (folder / "colorsys.py").write_text("raise RuntimeError\n")
    sys.modules.pop("colorsys", None)
    import colorsys

    del sys.modules["colorsys"]
    found = dotted_names.look_up(TABLE, "[model] name", "colorsys:rgb_to_hsv")
    assert found.__code__.co_filename == colorsys.__file__


@pytest.mark.parametrize("name", ["door_gone:Net", "door_gone.deeper:Net"])
def test_a_module_that_is_not_there_is_named_with_where_it_was_looked_for(folder, name):
    message = refused(name)
    assert "there is no module door_gone, neither installed nor in" in message
    assert str(folder) in message


def test_an_attribute_that_is_not_there_is_answered_with_the_nearest(folder):
    (folder / "door_near.py").write_text("class Network:\n    pass\n")
    message = refused("door_near:Netwerk")
    assert f"{folder / 'door_near.py'} has no Netwerk. Did you mean Network?" in message
    assert "has no name after the colon" in refused("door_near:")


def test_a_module_that_raises_is_told_with_what_it_raised(folder):
    (folder / "door_bad.py").write_text("raise ValueError('not today')\n")
    assert "importing door_bad raised ValueError: not today" in refused("door_bad:Net")
    (folder / "door_odd.py").write_text("def broken(:\n")
    assert "importing door_odd raised SyntaxError" in refused("door_odd:Net")


def test_a_module_that_imports_what_is_missing_names_that(folder):
    (folder / "door_needs.py").write_text("import door_absent.part\n")
    message = refused("door_needs:Net")
    assert "door_needs imports door_absent, which is not installed." in message


def test_an_error_of_the_user_s_own_words_goes_through(folder):
    (folder / "door_says.py").write_text(
        "from titan_dit.config.section import UserError\nraise UserError('[model] read this')\n"
    )
    with pytest.raises(UserError, match=r"^\[model\] read this$"):
        dotted_names.look_up(TABLE, "[model] name", "door_says:Net")


def test_what_is_a_user_s_is_told_with_its_file(folder):
    (folder / "door_tell.py").write_text("class Net:\n    pass\n")
    net = dotted_names.look_up(TABLE, "", "door_tell:Net")
    lines = list(
        dotted_names.origins({"model": net(), "data": dotted_names.look_up(TABLE, "", "plain")})
    )
    assert lines == [f"[model] door_tell:Net is from {folder / 'door_tell.py'}"]


@pytest.mark.parametrize("section", dotted_names.OF_RUN)
def test_a_run_s_own_modules_are_imported_only_if_it_is_trusted(section, folder):
    tables = {section: {dotted_names.OF_RUN[section]: "theirs:Thing"}}
    with pytest.raises(UserError) as caught:
        dotted_names.check_trusted(tables, "--run r", False)
    message = str(caught.value)
    for words in ("--run r: ", f"[{section}] ", '"theirs:Thing"', f"{folder}", "--trust"):
        assert words in message
    dotted_names.check_trusted(tables, "--run r", True)
    dotted_names.check_trusted({section: {dotted_names.OF_RUN[section]: "dit"}}, "--run r", False)


def test_every_key_that_takes_a_dotted_name_asks_or_is_of_train_alone():
    from titan_dit.config import config_file
    from titan_dit.config.section import OneOf, hints_of

    found = {
        (section, key)
        for section, kind in config_file.plain_sections().items()
        for key, hint in hints_of(kind).items()
        if any(isinstance(rule, OneOf) for rule in getattr(hint, "__metadata__", ()))
    }
    assert found
    assert found <= {*dotted_names.OF_RUN.items(), ("sampling", "sampler")}


def test_an_error_about_a_run_s_key_imports_none_of_its_modules(folder):
    from titan_dit.config import catalog, config_file

    (folder / "theirs.py").write_text("from pathlib import Path\nPath('imported').touch()\n")
    tables = {"model": {"name": "dit", "hidde": 3}, "data": {"name": "theirs:Data"}}
    for only in (("model",), ("model", "unknown")):
        with pytest.raises(UserError, match=r"hidde: unknown key\. Did you mean hidden"):
            config_file.build_sections(tables | {"unknown": {}}, catalog.variant, only)
    assert not (folder / "imported").exists()


def test_a_command_takes_no_library_from_the_current_folder(folder):
    (folder / "tyro.py").write_text("raise SystemExit('taken from here')")
    words = [sys.executable, "-m", "titan_dit", "runs", "--help"]
    done = subprocess.run(words, env=commands.environment(), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"usage: python -m titan_dit runs" in done.stdout
