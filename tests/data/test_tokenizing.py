"""Text files to ids: every container, every bad line, and the library's own ids."""

import errno
import gzip
import io
import json
import lzma
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from refusals import refused
from small_tokens import byte_level_file

from titan_dit.commands import data_show, data_tokenize, data_train_tokenizer
from titan_dit.config import user_text
from titan_dit.config.section import UserError
from titan_dit.data.indexed_file import IndexedFile, IndexedWriter
from titan_dit.data.tokenizer_file import read_tokenizer
from titan_dit.data.tokenizing import chunks, pool
from titan_dit.data.tokenizing import tokenizer as tokenizers
from titan_dit.data.tokenizing.chunks import TextChunk, read_chunks, texts_of

TEXTS = ["To be, or not to be. That is the question!", "Out, out, brief candle.", "Ünïcode \u2603"]
LINES = "".join(json.dumps({"text": text, "id": 3}) + "\n" for text in TEXTS).encode()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A tokenizer of 280 tokens."""
    path = tmp_path_factory.mktemp("made") / "tokenizer.json"
    text = path.with_name("a.jsonl")
    text.write_bytes(LINES * 20)
    data_train_tokenizer.main(
        data_train_tokenizer.DataTrainTokenizerFlags(
            input=(str(text),), out=str(path), vocabulary=280
        )
    )
    return path


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tokenize(*inputs, made, out="out", **options):
    options = {"workers": 1, "tokenizer": str(made)} | options
    data_tokenize.main(data_tokenize.DataTokenizeFlags(input=inputs, out=out, **options))
    level = "sentence" if options.get("split_sentences") else "document"
    return IndexedFile(Path(f"{out}_text_{level}"))


def sequences(file):
    return [file[i].tolist() for i in range(len(file))]


def library(made, texts):
    read = tokenizers.read(made, "a test")
    return [found.ids for found in read.encode_batch(list(texts), add_special_tokens=False)]


def write_inputs(folder):
    """The same three documents in every kind of file; returns their names."""
    (folder / "a.jsonl").write_bytes(LINES)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(LINES))
    (folder / "c.JSONL.xz").write_bytes(lzma.compress(LINES[:-1]))
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text)
    for name, mode in (
        ("d.tar", "w"),
        ("e.tar.gz", "w:gz"),
        ("f.tgz", "w:gz"),
        ("g.tar.xz", "w:xz"),
    ):
        with tarfile.open(folder / name, mode) as tar:
            members = {f"in/{n}.txt.gz": gzip.compress(t.encode()) for n, t in enumerate(TEXTS)}
            members |= {"in/README.md": b"no text", "in/h.jsonl.xz": lzma.compress(LINES)}
            for member, data in members.items():
                entry = tarfile.TarInfo(member)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    plain = ["a.jsonl", "b.jsonl.gz", "c.JSONL.xz", "0.txt", "1.txt", "2.txt"]
    return [*plain, "d.tar", "e.tar.gz", "f.tgz", "g.tar.xz"]


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_every_kind_of_file_gives_the_librarys_ids(here, made, size, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", size)
    names = write_inputs(here)
    file = tokenize(*names, made=made)
    assert sequences(file) == library(made, TEXTS) * (4 + 2 * 4)
    assert np.diff(file.documents).tolist() == [1] * len(file)
    assert file.dtype == np.uint16


def test_progress_counts_bytes_of_the_files_and_lines_are_numbered(here, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 10)
    paths = [here / name for name in write_inputs(here)]
    size = chunks.check_inputs(paths, "a test")
    done = [bytes_read for _, bytes_read in read_chunks(paths, "a test")]
    assert done == sorted(done)
    assert done[-1] <= size
    found = [chunk.first_line for chunk, _ in read_chunks(paths[:1], "a test")]
    assert found == [1, 2, 3]


def test_the_end_of_a_document_follows_its_last_sentence(here, made):
    (here / "a.jsonl").write_bytes(LINES)
    file = tokenize("a.jsonl", made=made, split_sentences=True, append_eod=True)
    parts = [["To be, or not to be.", "That is the question!"], TEXTS[1:2], TEXTS[2:]]
    ids = [library(made, part) for part in parts]
    end = read_tokenizer(made).end_of_document
    assert sequences(file) == [
        [*own, end] if own is part[-1] else own for part in ids for own in part
    ]
    assert np.diff(file.documents).tolist() == [2, 1, 1]


@pytest.mark.parametrize("split", [False, True])
def test_the_data_that_train_on_the_files_are_named(here, made, capsys, split):
    (here / "a.jsonl").write_bytes(LINES)
    tokenize("a.jsonl", made=made, split_sentences=split)
    name = "sentence_pairs" if split else "tokens"
    assert f'to train on them: [data] name = "{name}", paths = [' in capsys.readouterr().out


def test_workers_do_not_change_the_files(here, made, monkeypatch):
    (here / "a.jsonl").write_bytes(LINES * 40)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 500)
    alone = tokenize("a.jsonl", made=made, append_eod=True)
    pooled = tokenize("a.jsonl", made=made, append_eod=True, out="pooled", workers=2)
    for ours, theirs in ((alone.bin, pooled.bin), (alone.idx, pooled.idx)):
        assert ours.read_bytes() == theirs.read_bytes()
    assert len(alone) == 120


BAD = {
    b"not json": "not JSON",
    b'{"other": 1}': 'no key "text"',
    b'{"text": 3}': '"text" is no text',
    b"[1]": "not an object",
    b"\xff\xfe": "not UTF-8",
    b"[" * 100_000: "not JSON",
}


def test_bad_lines_are_listed_and_counted(here, made, capsys):
    lines = [*BAD, b'{"text": ""}', b"", *LINES.splitlines()]
    lines[-3] = b"\xef\xbb\xbf" + lines[-3]
    (here / "a.jsonl").write_bytes(b"\n".join(lines))
    (here / "b.txt").write_bytes(b"\xff\xfe")
    file = tokenize("a.jsonl", "b.txt", made=made)
    assert len(file) == 3
    said = capsys.readouterr().out
    assert f"skipped {len(BAD) + 1} bad lines, listed in out_bad_lines.txt" in said
    assert "skipped 1 documents without tokens" in said
    assert "wrote 3 documents, 3 sequences" in said
    listed = (here / "out_bad_lines.txt").read_text().splitlines()
    expected = [f"a.jsonl:{n}: {reason}" for n, reason in enumerate(BAD.values(), 1)]
    assert listed == [*expected, "b.txt:1: not UTF-8"]


def test_several_keys_have_files_of_their_own(here, made):
    (here / "a.jsonl").write_text(json.dumps({"title": TEXTS[1], "text": TEXTS[0]}))
    text = tokenize("a.jsonl", made=made, json_keys=("title", "text"))
    title = IndexedFile(here / "out_title_document")
    assert [*sequences(text), *sequences(title)] == library(made, TEXTS[:2])


def test_a_text_file_is_one_document_for_every_key():
    chunk = TextChunk("a.txt", "txt", 1, b"hello", 100)
    assert list(texts_of(chunk, ("x", "y"))) == [("hello", "hello")]


def refused_tokenize(*inputs, made, **options):
    message = refused(lambda: tokenize(*inputs, made=made, **options))
    assert not list(Path().glob("out*"))
    return message


def test_what_cannot_be_tokenized_is_refused_and_leaves_nothing(here, made):
    (here / "a.jsonl").write_bytes(LINES)
    (here / "a.md").write_bytes(LINES)
    (here / "cut.jsonl.gz").write_bytes(gzip.compress(os.urandom(9000))[:-100])
    (here / "cut.jsonl.xz").write_bytes(lzma.compress(os.urandom(9000))[:-100])
    (here / "cut.tar.gz").write_bytes(gzip.compress(os.urandom(9000)))
    (here / "bad.jsonl").write_text("bad\n")
    assert "input=b.jsonl does not exist" in refused_tokenize("b.jsonl", made=made)
    assert "input=. is a folder" in refused_tokenize(".", made=made)
    assert "is of an unknown kind" in refused_tokenize("a.md", made=made)
    for name in ("cut.jsonl.gz", "cut.jsonl.xz", "cut.tar.gz"):
        assert f"input={name}: damaged, cut off" in refused_tokenize("a.jsonl", name, made=made)
    message = refused_tokenize("bad.jsonl", made=made)
    assert "no document found: 1 bad lines; the first is bad.jsonl:1: not JSON" in message
    assert "give one of --tokenizer" in refused_tokenize("a.jsonl", made=made, vocab_file="x")
    assert "belong to --vocab-file" in refused_tokenize("a.jsonl", made=made, lower=True)
    assert "not a tokenizer.json" in refused_tokenize("a.jsonl", made="a.md")
    assert "has no <x>" in refused_tokenize("a.jsonl", made=made, append_eod=True, eod_token="<x>")
    twice = {"json_keys": ("text", "text")}
    assert "name each key once" in refused_tokenize("a.jsonl", made=made, **twice)
    for alone in ({"eod_token": "<x>"}, {"language": "de"}):
        assert "Add it, or leave both" in refused_tokenize("a.jsonl", made=made, **alone)
    of_gpt2 = {"tokenizer": None, "vocab_file": "v.json", "merge_file": "m.txt", "lower": True}
    assert "--lower is of BERT's" in refused_tokenize("a.jsonl", made=made, **of_gpt2)
    tokenize("a.jsonl", made=made)
    with pytest.raises(UserError, match="is there already"):
        tokenize("a.jsonl", made=made)


def test_a_full_disk_is_one_line_and_leaves_nothing(here, made, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    (here / "a.jsonl").write_bytes(LINES)
    monkeypatch.setattr(IndexedWriter, "add", full)
    message = refused_tokenize("a.jsonl", made=made)
    assert "--out out_text_document cannot be written: No space left on device" in message


def test_full_shared_memory_is_one_line(here, made, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    (here / "a.jsonl").write_bytes(LINES)
    monkeypatch.setattr(pool, "ProcessPoolExecutor", full)
    message = refused_tokenize("a.jsonl", made=made, workers=2)
    assert "/dev/shm is full" in message
    assert message.endswith("docker run --shm-size=8g, or --workers 1; nothing was written.")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_deletes_what_was_begun_and_says_nothing(here, made, number):
    (here / "a.jsonl").write_bytes(LINES * 100_000)
    words = [sys.executable, "-m", "titan_dit", "data", "tokenize", "--input", "a.jsonl"]
    words += ["--out", "out", "--tokenizer", str(made), "--workers", "2"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        words,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        while not list(here.glob("*.partial")):
            time.sleep(0.02)
        time.sleep(0.3)
        os.killpg(process.pid, number)  # As a terminal and Slurm do.
        _, said = process.communicate(timeout=60)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    assert said == ""
    assert not list(here.glob("out*"))


def test_a_missing_library_names_its_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sentencex", None)
    message = refused(lambda: tokenizers.needed("sentencex", "data tokenize"))
    assert "needs the package sentencex" in message
    assert "titan_dit[text]" in message


def test_vocabulary_files_of_bert_and_gpt2_become_a_tokenizer(here, made, capsys):
    (here / "a.jsonl").write_bytes(LINES)
    words = ["[PAD]", "[UNK]", "[SEP]", "out", "brief", "candle", ",", "."]
    (here / "vocab.txt").write_text("\n".join(words))
    bert = {"tokenizer": None, "vocab_file": "vocab.txt", "lower": True, "append_eod": True}
    file = tokenize("a.jsonl", made=made, **bert)
    assert sequences(file)[1] == [3, 6, 3, 6, 4, 5, 7, 2]
    assert "wrote out_tokenizer.json" in capsys.readouterr().out
    assert read_tokenizer(here / "out_tokenizer.json").end_of_document == 2
    model = json.loads(made.read_text())["model"]
    (here / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(
        pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]
    )
    (here / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    gpt = {"tokenizer": None, "vocab_file": "vocab.json", "merge_file": "merges.txt"}
    assert sequences(tokenize("a.jsonl", made=made, out="gpt", **gpt)) == library(made, TEXTS)
    again = refused(lambda: tokenize("a.jsonl", made=made, out="x", **gpt | {"merge_file": None}))
    assert "without it BERT's vocab.txt" in again


def test_a_tokenizer_is_trained_to_its_size_and_kind(here, made):
    assert read_tokenizer(made).vocabulary == 280
    (here / "a.txt").write_text(" ".join(TEXTS) * 5)
    options = {"input": ("a.txt",), "out": "wp.json", "vocabulary": 60, "kind": "wordpiece"}
    data_train_tokenizer.main(data_train_tokenizer.DataTrainTokenizerFlags(**options, lower=True))
    found = read_tokenizer(here / "wp.json")
    assert {"[MASK]", "[CLS]", "to"} <= found.ids.keys()
    assert found.token_bytes() is None
    with pytest.raises(UserError, match="is there already"):
        data_train_tokenizer.main(data_train_tokenizer.DataTrainTokenizerFlags(**options))
    options |= {"out": "new.json", "vocabulary": 20}
    for kind, least in (("bpe", 257), ("wordpiece", "")):
        with pytest.raises(UserError, match=f"vocabulary=20 is fewer than the {least}"):
            data_train_tokenizer.main(
                data_train_tokenizer.DataTrainTokenizerFlags(**options | {"kind": kind})
            )
    assert not (here / "new.json").exists()


def test_bytes_of_tokens_are_those_of_the_text(made):
    sizes = read_tokenizer(made).token_bytes()
    for text, ids in zip(TEXTS, library(made, TEXTS), strict=True):
        assert sizes[ids].sum() == len(text.encode())


NO_TOKENIZERS = {
    "empty": "",
    "no model": "{}",
    "no table": '{"model": {"vocab": 3}}',
    "no text": "\x00",
    "a negative id": '{"model": {"vocab": {"a": -1}}}',
    "an id that needs an exabyte": '{"model": {"vocab": {"a": 4611686018427387904}}}',
    "an id of text": '{"model": {"vocab": {"a": "b"}}}',
    "many digits": '{"model": {"vocab": {"a": ' + "9" * 5000 + "}}}",
    "deep": "[" * 100_000 + "]" * 100_000,
}


@pytest.mark.parametrize("text", NO_TOKENIZERS.values(), ids=NO_TOKENIZERS)
def test_another_file_is_no_tokenizer(tmp_path, text):
    (tmp_path / "t.json").write_text(text)
    assert "not a tokenizer.json" in refused(lambda: read_tokenizer(tmp_path / "t.json"))


def test_data_show_prints_counts_and_text(here, made, capsys):
    (here / "a.jsonl").write_bytes(LINES)
    tokenize("a.jsonl", made=made, append_eod=True)
    for path in ("out_text_document", "out_text_document.bin"):
        data_show.main(data_show.DataShowFlags(path=path, tokenizer=str(made), num=2))
        said = capsys.readouterr().out
        assert "documents  3" in said
        assert "ends       3 of id 0" in said
        assert "To be, or not to be. That is the question!<|endoftext|>" in said
    other = byte_level_file(here / "other.json")
    with pytest.raises(UserError, match="has 4 tokens, but the file holds id"):
        data_show.main(data_show.DataShowFlags(path="out_text_document", tokenizer=other))
    with pytest.raises(UserError, match="tokens are printed, not drawn"):
        data_show.main(data_show.DataShowFlags(path="out_text_document", out="a.png"))
    with pytest.raises(UserError, match="no such folder, and no"):
        data_show.main(data_show.DataShowFlags(path="gone"))


def test_ids_far_above_the_vocabulary_are_refused(tmp_path):
    """The library would hold a list of all ids that are not used."""
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "vocab.json").write_text(json.dumps({"<|endoftext|>": 0, "a": 2**31}))
    with pytest.raises(UserError, match=r"vocab\.json has the id 2,147,483,648, above 16,777,216"):
        tokenizers.from_vocabulary(
            tmp_path / "vocab.json", tmp_path / "merges.txt", lower=False, where="data tokenize"
        )
    made = {"model": {"type": "BPE", "vocab": {"a": 2**31}, "merges": []}, "added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    with pytest.raises(UserError, match=r"has the id 2,147,483,648"):
        tokenizers.read(tmp_path / "tokenizer.json", "data tokenize")


def test_files_of_a_tokenizer_have_a_largest_size(tmp_path, monkeypatch):
    monkeypatch.setattr(user_text, "MAX_BYTES", 10)
    file = tmp_path / "tokenizer.json"
    file.write_text("x" * 11)
    for read in (
        lambda: tokenizers.read(file, "data tokenize"),
        lambda: tokenizers.from_vocabulary(file, None, lower=False, where="data tokenize"),
    ):
        with pytest.raises(UserError, match=r"is larger than 10 bytes.*set TITAN_DIT_LIMITS=2"):
            read()
