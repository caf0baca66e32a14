"""Compressed streams and long documents: refused or listed before they take memory."""

import bz2
import gzip
import io
import json
import lzma
import os
import resource
import tarfile
from pathlib import Path

import pytest
from refusals import refused

from titan_dit.commands import data_tokenize, data_train_tokenizer
from titan_dit.data.indexed_file import IndexedFile
from titan_dit.data.tokenizing import chunks
from titan_dit.data.tokenizing.chunks import (
    BZ2,
    GZIP,
    XZ,
    BadLine,
    Limits,
    Unpacking,
    read_chunks,
    texts_of,
)

PACK = {GZIP: gzip.compress, XZ: lzma.compress, BZ2: bz2.compress}


def unpacked(data, magic, ratio=200):
    return io.BufferedReader(Unpacking(io.BytesIO(data), magic, "a", ratio)).read()


@pytest.mark.parametrize("magic", PACK)
def test_streams_of_several_parts_are_unpacked(magic):
    parts = [os.urandom(1000), b"", b"ab" * 2_000_000, os.urandom(100_000)]
    data = b"".join(map(PACK[magic], parts))
    assert unpacked(data, magic) == b"".join(parts)
    assert unpacked(data + bytes(1000), magic) == b"".join(parts)
    assert unpacked(b"", magic) == b""
    with pytest.raises(EOFError):
        unpacked(data[:-20], magic)
    with pytest.raises((OSError, lzma.LZMAError, chunks.zlib.error)):
        unpacked(data + b"other", magic)


def bomb(magic):
    """Two hundred million bytes in a few thousand."""
    return PACK[magic](b"a " * 1_000_000) * 100


@pytest.mark.parametrize(
    ("name", "magic"), [("a.jsonl.gz", GZIP), ("a.jsonl.xz", XZ), ("a.tar.gz", GZIP), ("a.txz", XZ)]
)
def test_a_stream_that_unpacks_to_too_much_is_refused(tmp_path, name, magic):
    (tmp_path / name).write_bytes(bomb(magic))
    if "t" in Path(name).suffixes[0]:
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as tar:
            member = tarfile.TarInfo("picture.png")  # Of no kind that is read: skipped.
            member.size = 70 * 10**6
            tar.addfile(member, io.BytesIO(bytes(member.size)))
        (tmp_path / name).write_bytes(PACK[magic](data.getvalue()))
    said = refused(lambda: list(read_chunks([tmp_path / name], "a test")))
    assert said == (
        f"[a test] input={tmp_path / name}: unpacks to more than 200 times its size. If it is no "
        "forgery, raise --max-ratio."
    )


def texts_in(folder, limits):
    paths = sorted(folder.iterdir())
    return [
        str(found) if isinstance(found, BadLine) else found[0]
        for chunk, _ in read_chunks(paths, "a test", limits)
        for found in texts_of(chunk, ("text",))
    ]


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_a_long_document_is_left_out_by_its_line(tmp_path, monkeypatch, size):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", size)
    lines = [json.dumps({"text": text}) for text in ("a", "b" * 100, "c", "d" * 3000, "e")]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.txt").write_text("f" * 51)
    (tmp_path / "c.txt").write_text("g" * 50)
    long = "longer than --max-document-bytes 50"
    wanted = ["a", f"{tmp_path}/a.jsonl:2: {long}", "c", f"{tmp_path}/a.jsonl:4: {long}", "e"]
    found = texts_in(tmp_path, Limits(max_document_bytes=50))
    assert found == [*wanted, f"{tmp_path}/b.txt:1: {long}", "g" * 50]


def test_a_bomb_is_not_unpacked_to_be_left_out(tmp_path):
    (tmp_path / "a.txt.xz").write_bytes(bomb(XZ))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = texts_in(tmp_path, Limits(max_document_bytes=1000))
    assert found == [f"{tmp_path}/a.txt.xz:1: longer than --max-document-bytes 1000"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_a_sparse_member_is_refused(tmp_path):
    member = tarfile.TarInfo("x")
    member.size = 512
    member.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "0.txt",
        "GNU.sparse.realsize": str(30 * 10**9),
    }
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.addfile(member, io.BytesIO(b"1\n0\n0\n".ljust(512, b"\0")))
    said = refused(lambda: list(read_chunks([tmp_path / "a.tar"], "a test")))
    assert said.startswith(f"[a test] input={tmp_path}/a.tar: 0.txt is a sparse member.")


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 10)
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n' * 3)
    reading = read_chunks([file], "a test")
    next(reading)
    file.write_text('{"text": "b"}\n' * 2)
    assert "a.jsonl changed while it was read" in refused(lambda: list(reading))


def test_half_a_surrogate_pair_is_a_bad_line_and_the_rest_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = ['{"text": "To be"}', '{"text": "lone \\ud83d here"}', '{"text": "\\ud83d\\ude00"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    bad = 'a.jsonl:2: "text" has half a surrogate pair\n'
    options = {"out": "new.json", "vocabulary": 260}
    data_train_tokenizer.main(
        data_train_tokenizer.DataTrainTokenizerFlags(input=("a.jsonl",), **options)
    )
    assert Path("new.bad_lines.txt").read_text() == bad
    assert f"  {bad}" in capsys.readouterr().out
    for workers in (1, 2):
        out = f"out{workers}"
        options = {"tokenizer": "new.json", "out": out, "workers": workers}
        data_tokenize.main(data_tokenize.DataTokenizeFlags(input=("a.jsonl",), **options))
        assert Path(f"{out}_bad_lines.txt").read_text() == bad
        assert len(IndexedFile(Path(f"{out}_text_document"))) == 2
