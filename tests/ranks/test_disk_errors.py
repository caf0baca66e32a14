"""Errors of files name the flag or key, the path, the reason and the fix."""

import errno
import os
from pathlib import Path

import pytest

from titan_dit.config import catalog, config_file
from titan_dit.config.section import UserError
from titan_dit.ranks import failure
from titan_dit.ranks.disk_errors import FIXES, line_of, naming, shared_memory_is_full

PATHS = [("--run", "runs/a"), ("--out", "x/y.png"), ("[job] dir", "runs")]


@pytest.mark.parametrize(
    ("path", "flag"),
    [
        ("runs/a/config.toml", "--run"),
        ("x/y.png", "--out"),
        ("x", "--out"),
        ("x/y.png.123.partial", "--out"),
        ("runs/b/metrics.jsonl", "[job] dir"),
    ],
)
def test_the_flag_that_named_the_path_is_named(path, flag):
    with pytest.raises(UserError) as error, naming(lambda: PATHS):
        raise PermissionError(errno.EACCES, "Permission denied", path)
    assert str(error.value) == (
        f"{flag} {path}: Permission denied. Change its permissions or its owner, or name another "
        "path."
    )


def test_the_file_of_a_package_is_not_the_users():
    with pytest.raises(OSError, match="package"), naming(lambda: PATHS):
        raise OSError(errno.EACCES, "Permission denied", "/package/x.so")


@pytest.mark.parametrize("number", [*FIXES, errno.EBUSY])
def test_no_line_is_a_bare_errno(number):
    code, line = failure.describe(OSError(number, os.strerror(number), "a/b"))
    assert code == 2
    assert line.startswith(f"error: a/b: {os.strerror(number)}. ".rstrip())
    assert "Errno" not in line
    assert line == line.splitlines()[0]
    assert line.removeprefix("error: ") == line_of(OSError(number, os.strerror(number), b"a/b"))


def test_a_link_to_itself_is_a_file_error(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    # Path.resolve before 3.13.
    for raised in (
        RuntimeError(f"Symlink loop from {str(loop)!r}"),
        OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(loop)),
    ):
        with (
            pytest.raises(UserError, match=r"--run .*A link leads to itself"),
            naming(lambda: [("--run", str(loop))]),
        ):
            raise raised


def test_a_path_that_is_not_utf8_is_one_line_wherever_it_comes_from():
    with pytest.raises(UnicodeEncodeError) as error:
        "b\udcff".encode()
    code, line = failure.describe(error.value)
    assert code == 2
    assert line.startswith(r"error: 'b\udcff' is not UTF-8. Rename")
    words = ["--config", "digits", "--job.dir", os.fsdecode(b"b\xff")]
    with pytest.raises(UserError, match=r"\[job\] dir: .b.udcff. is not UTF-8"):
        config_file.load(words, catalog.variant)
    with pytest.raises(UserError, match="NUL"):
        config_file.load(["--config", "digits", "--job.dir", '"a\\u0000"'], catalog.variant)


def test_a_name_with_a_line_break_stays_in_its_line():
    _, line = failure.describe(UserError("a\nerror: b is:\n  first\n  second"))
    assert line == "error: a\\nerror: b is:\n  first\n  second"


@pytest.mark.parametrize("name", ["../../x", "a/b", "..", ".", "/", "a\0b"])
def test_the_name_of_a_run_is_one_folder(name):
    with pytest.raises(UserError, match=r"\[job\] name=.*--job.dir"):
        config_file.load(["--config", "digits", f"--job.name={name}"], catalog.variant)


def test_the_paths_of_a_run_have_their_keys():
    words = ["--config", "digits", "--job.name", "a", "--checkpoint.init", "b"]
    found = dict(config_file.load(words, catalog.variant).paths())
    assert found["[job] dir"] == str(Path("outputs/a"))
    assert found["[checkpoint] init"] == "b"


def test_full_shared_memory_says_what_helps():
    line = shared_memory_is_full("--data.num_workers 0")
    assert line.startswith("/dev/shm is full (")
    assert line.endswith("MB): docker run --shm-size=8g, or --data.num_workers 0")
