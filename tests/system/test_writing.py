"""Files are written whole or not at all, and a killed writer leaves nothing behind for long."""

import errno
import os
import stat

import forked
import pytest
import torch
from kills import kill_self
from safetensors.torch import load_file, save_file

from titan_dit.config.section import UserError
from titan_dit.ranks import disk_errors
from titan_dit.system import files
from titan_dit.system.files import new_path, replacing, write_json, write_whole


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_replaced_with_its_permissions_and_a_link_stays_one(tmp_path):
    file, link = tmp_path / "new" / "a.txt", tmp_path / "link"
    write_whole(file, "one ä\n")
    assert mode_of(file) == 0o666 & ~umask()
    file.chmod(0o640)
    link.symlink_to(file)
    write_json(link, {"b": 2})
    assert file.read_text() == '{\n  "b": 2\n}\n'
    assert link.is_symlink()
    assert mode_of(file) == 0o640
    assert [path.name for path in file.parent.iterdir()] == ["a.txt"]


def umask():
    now = os.umask(0)
    os.umask(now)
    return now


def test_a_library_that_makes_its_own_file_does_not_choose_the_permissions(tmp_path):
    with replacing(tmp_path / "a") as aside:
        (tmp_path / "own").write_text("whole")
        (tmp_path / "own").chmod(0o600)
        (tmp_path / "own").replace(aside)
    assert mode_of(tmp_path / "a") == 0o666 & ~umask()


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_full_disk_leaves_the_old_file_alone(tmp_path, monkeypatch, call):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    file = tmp_path / "a"
    write_whole(file, b"old")
    monkeypatch.setattr(*((type(file), "replace") if call == "rename" else (files.os, call)), full)
    with pytest.raises(UserError) as caught, disk_errors.writing(f"--out {file}", "Repeat it."):
        write_whole(file, b"new")
    assert str(caught.value) == (
        f"--out {file} cannot be written: No space left on device. Free some space, or name "
        "another path. Repeat it."
    )
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def write_and_die(file):
    with replacing(file) as aside:
        aside.write_bytes(b"a long part of it")
        kill_self()


def test_what_a_killed_process_left_is_used_up_by_the_next_one(tmp_path):
    process = forked.call(write_and_die, tmp_path / "a")
    process.join(60)
    [left] = tmp_path.iterdir()
    assert left.name == f"a.{files.this_host()}-{process.pid}.0.partial"
    elsewhere = tmp_path / f"a.another-{process.pid}.0.partial"
    elsewhere.touch()
    with replacing(tmp_path / "a") as own:
        assert sorted(tmp_path.iterdir()) == sorted([own, elsewhere])
        own.write_bytes(b"b")
        files.delete_left(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", elsewhere.name]
    assert (tmp_path / "a").read_bytes() == b"b"


def test_a_library_that_makes_its_own_file_shares_it_with_no_other_writer(tmp_path):
    with replacing(tmp_path / "a") as first:
        save_file({"x": torch.ones(9)}, first)
        with replacing(tmp_path / "a") as second:
            second.write_bytes(b"2")
        assert load_file(first)["x"].sum() == 9
    assert load_file(tmp_path / "a")["x"].sum() == 9


def test_a_write_protected_file_stays(tmp_path, monkeypatch):
    write_whole(tmp_path / "a", b"old")
    monkeypatch.setattr(files.os, "access", lambda *_: False)  # Root may write everything.
    with pytest.raises(PermissionError, match="Permission denied"):
        write_whole(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"


def test_long_names_have_room(tmp_path):
    write_whole(tmp_path / ("ä" * 120), b"1")
    assert [path.name for path in tmp_path.iterdir()] == ["ä" * 120]


def test_two_writers_of_one_file_do_not_mix(tmp_path):
    with replacing(tmp_path / "a") as first, replacing(tmp_path / "a") as second:
        assert first != second
        first.write_bytes(b"1" * 9)
        second.write_bytes(b"22")
    assert (tmp_path / "a").read_bytes() == b"1" * 9
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_pipe_is_written_itself(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_whole(tmp_path / "pipe", "text")
    assert os.read(reader, 9) == b"text"
    os.close(reader)


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    (tmp_path / "set").mkdir()
    with pytest.raises(FileExistsError), new_path(tmp_path / "set") as place:
        [place.mkdir() for _ in range(2)]
    assert list(tmp_path.rglob("*")) == [tmp_path / "set"]
    with new_path(tmp_path / "set") as place:
        write_whole(place / "a", "1")
        assert not list((tmp_path / "set").iterdir())
    assert [path.name for path in (tmp_path / "set").iterdir()] == ["a"]
