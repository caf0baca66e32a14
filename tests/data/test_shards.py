"""Rows of shards: every row at its place, few open files, errors that name file and row."""

import errno
import os
import resource
from pathlib import Path

import numpy as np
import pytest
from small_shards import FIRST, ten_latents, write_ten

from titan_dit.config.section import UserError
from titan_dit.data import shards
from titan_dit.data.latents import LatentShards
from titan_dit.data.shards import RowFile, ShardRows, read_header

SIZE = 24
"""Bytes of a row."""


def files_of(folder, counts):
    """Files with a header of 5 bytes; byte j of row i of file f is a function of all three."""
    rows = [rows_of(number, np.arange(count)) for number, count in enumerate(counts)]
    files = []
    for number, data in enumerate(rows):
        path = folder / str(number)
        path.write_bytes(b"head:" + data.tobytes())
        status = path.stat()
        files.append(RowFile(path, 5, status.st_size, status.st_mtime_ns))
    return files


def rows_of(file, row):
    numbers = np.asarray(row)[:, None] * 7 + np.arange(SIZE) + 31 * np.asarray(file).reshape(-1, 1)
    return (numbers % 251).astype(np.uint8)


def read(reader, file, row):
    out = np.zeros((len(row), SIZE), np.uint8)
    reader.read(np.asarray(file), np.asarray(row), shards.bytes_of(out))
    return out


def assert_right(reader, file, row):
    assert (read(reader, file, row) == rows_of(np.asarray(file), row)).all()


BATCHES = {
    "one": ([0], [2]),
    "any": ([2, 0, 1, 0, 2, 1], [4, 0, 3, 5, 0, 1]),
    "neighbours in disorder": ([0] * 6, [5, 3, 4, 0, 1, 2]),
    "the same twice": ([1, 1, 1, 1], [3, 3, 4, 3]),
    "ends that touch": ([0, 1, 2], [99, 0, 0]),
    "none": ([], []),
}


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("batch", BATCHES)
def test_every_row_is_read_to_its_place(tmp_path, batch, asks):
    reader = ShardRows(files_of(tmp_path, [100, 50, 60]), SIZE)
    reader.can_ask = asks
    file, row = (np.array(part, dtype=np.int64) for part in BATCHES[batch])
    assert_right(reader, file, row)


def test_more_neighbours_than_one_read_can_take(tmp_path):
    reader = ShardRows(files_of(tmp_path, [3000]), SIZE)
    row = np.random.default_rng(0).permutation(3000)
    reads = list(reader.reads(row * 0, row, memoryview(b"")))
    assert [len(buffers) for _, _, buffers in reads] == [1024, 1024, 952]
    assert_right(reader, row * 0, row)


@pytest.mark.parametrize("most", [1, 7, 24, 100])
def test_short_reads_and_cold_pages_are_completed(tmp_path, monkeypatch, most):
    """A read that may not wait finds nothing or a part; one that may returns `most` bytes."""
    original, seen = os.preadv, []

    def short(descriptor, buffers, offset, flags=0):
        seen.append(flags)
        if flags and len(seen) % 2:
            raise BlockingIOError
        return original(descriptor, [buffers[0][:most]], offset)

    monkeypatch.setattr(os, "preadv", short)
    reader = ShardRows(files_of(tmp_path, [30, 30]), SIZE)
    assert_right(reader, [1, 0, 0, 0, 1], [4, 7, 8, 9, 0])
    assert {0, os.RWF_NOWAIT} == set(seen)


def test_all_rows_are_requested_before_one_is_waited_for(tmp_path, monkeypatch):
    calls, original = [], os.preadv

    def cold(descriptor, buffers, offset, flags=0):
        if flags:
            raise BlockingIOError
        calls.append("read")
        return original(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", cold)
    advise = os.posix_fadvise
    monkeypatch.setattr(
        os,
        "posix_fadvise",
        lambda fd, offset, size, what: (
            calls.append((offset, size)) if what == os.POSIX_FADV_WILLNEED else None,
            advise(fd, offset, size, what),
        ),
    )
    reader = ShardRows(files_of(tmp_path, [30]), SIZE)
    assert_right(reader, [0, 0, 0], [9, 2, 3])
    # Rows 2 and 3 are neighbours: one request, one read.
    assert calls == [(5 + 2 * SIZE, 2 * SIZE), (5 + 9 * SIZE, SIZE), "read", "read"]
    calls.clear()
    monkeypatch.setattr(shards, "AHEAD_BYTES", 2 * SIZE)
    assert_right(reader, [0] * 5, [1, 5, 9, 13, 17])
    assert [call == "read" for call in calls] == [False, False, True, True] * 2 + [False, True]


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM])
def test_a_file_system_that_cannot_tell_what_is_cached_is_not_asked_again(
    number, tmp_path, monkeypatch
):
    asked, original = [], os.preadv

    def network(descriptor, buffers, offset, flags=0):
        if flags:
            asked.append(offset)
            raise OSError(number, os.strerror(number))
        return original(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", network)
    reader = ShardRows(files_of(tmp_path, [30]), SIZE)
    assert_right(reader, [0, 0, 0], [9, 2, 5])
    assert len(asked) == 1


def num_open():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_few_files_stay_open_and_each_is_closed_once(tmp_path):
    reader = ShardRows(files_of(tmp_path, [4] * 30), SIZE)
    reader.most_open = 5
    before = num_open()
    for turn in range(3):
        file = np.random.default_rng(turn).permutation(30)
        assert_right(reader, file, file % 4)
        assert num_open() == before + 5
    del reader
    assert num_open() == before


@pytest.mark.parametrize(
    ("limit", "most"),
    [
        (1024, 16),
        (32_768, 16),
        (1 << 20, 65_536),
        (40_000, 1808),
        (resource.RLIM_INFINITY, 65_536),
    ],
)
def test_open_files_leave_most_of_the_limit_to_others(monkeypatch, limit, most):
    monkeypatch.setattr(shards.resource, "getrlimit", lambda which: (limit, limit))
    assert shards.max_open() == most


@pytest.fixture
def latents(tmp_path):
    return LatentShards(write_ten(tmp_path / "set"))


def test_a_file_that_is_cut_off_while_it_is_used_names_the_first_missing_row(latents):
    latents.read([0, 1, 2])
    path = latents.path / FIRST
    file = latents.shards[0].latents
    row_bytes = (file.size - file.start) // len(latents.shards[0].labels)
    os.truncate(path, file.start + 2 * row_bytes + 1)
    assert (latents.read([1, 0])["latent"] == ten_latents(latents.dtype)[[1, 0]]).all()
    with pytest.raises(UserError, match=rf"{path}: row 2 is missing: the file has been cut off"):
        latents.read([0, 2, 1])


def test_a_disk_that_cannot_read_a_row_is_named(latents, monkeypatch):
    original, start = os.preadv, latents.shards[0].latents.start

    def broken(descriptor, buffers, offset, *flags):
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == FIRST and offset > start:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(descriptor, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", broken)
    latents.read([0, 5, 9])
    with pytest.raises(UserError, match=rf"{FIRST}: row 3 cannot be read: Input/output error"):
        latents.read([5, 3, 9])


REPLACED = {
    "bytes": "has changed since the run began: 313 bytes instead of 312; modified 2001-.* not 20",
    "shape": r"latent F16 \[4, 3, 2, 3\] from byte \d+ instead of .*latent F16 \[4, 2, 3, 3\] from",
    "dtype": r"latent BF16 \[4, 2, 3, 3\] .*instead of .*latent F16 \[4, 2, 3, 3\] from byte",
    "header": r"no header instead of label I64 \[4\] .*run the same command again",
    "gone": "cannot be opened: No such file",
    "time": None,
}


def replacement(change, data):
    """The bytes of a file after a change; what the header says stays as long as it was."""
    texts = {"shape": (b"[4,2,3,3]", b"[4,3,2,3]"), "dtype": (b'"F16"', b'"BF16"')}
    if change in texts:
        start = 8 + int.from_bytes(data[:8], "little")
        header = data[8:start].replace(*texts[change]).rstrip().ljust(start - 8)
        return data[:8] + header + data[start:]
    return {"bytes": data + b".", "header": b"x" * len(data)}.get(change, data)


@pytest.mark.parametrize("change", REPLACED)
def test_a_replaced_file_is_refused_unless_only_its_time_has_changed(latents, change):
    path = latents.path / FIRST
    assert latents.read([0])["label"].tolist() == [0]
    copy = path.read_bytes()
    path.unlink()
    # The open file stays: its rows are those of the file that the run began with.
    assert (latents.read([1])["latent"] == ten_latents(latents.dtype)[[1]]).all()
    os.close(latents._latents.descriptors.popitem()[1])
    if change != "gone":
        path.write_bytes(replacement(change, copy))
        os.utime(path, (1_000_000_000, 1_000_000_000))
    if REPLACED[change] is None:
        assert (latents.read([2])["latent"] == ten_latents(latents.dtype)[[2]]).all()
        return
    with pytest.raises(UserError, match=f"{FIRST}: .*{REPLACED[change]}"):
        latents.read([0])
    assert not latents._latents.descriptors


def test_a_header_nested_too_deeply_is_none(tmp_path):
    file = tmp_path / "shard"
    file.write_bytes((10**5).to_bytes(8, "little") + b"[" * 10**5)
    with file.open("rb") as opened, pytest.raises(ValueError, match="no safetensors header"):
        read_header(opened.fileno())
