"""Megatron's .bin and .idx: byte-equal to its own writer, and every damage is one clear error."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from refusals import refused

from titan_dit.data import indexed_file
from titan_dit.data.indexed_file import IndexedFile, IndexedWriter, bin_of, dtype_for, idx_of

FIXTURES = Path(__file__).parent.parent / "fixtures"
DOCUMENTS = [[[1, 2, 3], [4]], [[65499, 7]], [], [[5], [6, 7, 8, 9], [0]]]


def write(prefix, documents, dtype):
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            ids = np.array([i for sequence in document for i in sequence], dtype)
            writer.add(ids, [len(sequence) for sequence in document], [len(document)])
    return prefix


@pytest.fixture
def prefix(tmp_path):
    return write(tmp_path / "set.text", DOCUMENTS, "uint16")


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_both_files_are_byte_equal_to_megatrons(dtype, tmp_path):
    prefix = write(tmp_path / "own", DOCUMENTS, dtype)
    for suffix in ("bin", "idx"):
        theirs = FIXTURES / f"megatron_{dtype}.{suffix}"
        assert prefix.with_suffix(f".{suffix}").read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_megatrons_files_are_read_by_sequence_and_document(dtype):
    file = IndexedFile(FIXTURES / f"megatron_{dtype}")
    file.check()
    assert file.dtype == dtype
    sequences = [sequence for document in DOCUMENTS for sequence in document]
    assert [file[i].tolist() for i in range(len(file))] == sequences
    assert np.diff(file.documents).tolist() == list(map(len, DOCUMENTS))
    flat = [i for sequence in sequences for i in sequence]
    owners = [n for n, document in enumerate(DOCUMENTS) for part in document for _ in part]
    for first in range(len(DOCUMENTS)):
        for end in range(first, len(DOCUMENTS) + 1):
            a, b = file.tokens_of(first, end)
            inside = [i for i, n in zip(flat, owners, strict=True) if first <= n < end]
            assert file.ids[a:b].tolist() == inside
    assert [file.document_at(token) for token in range(len(flat))] == owners


def test_ids_take_two_bytes_below_megatrons_bound():
    assert (dtype_for(65_499), dtype_for(65_500)) == (np.uint16, np.int32)


def test_an_error_while_writing_leaves_nothing(tmp_path):
    def fail():
        with IndexedWriter(tmp_path / "set", np.dtype("u2")) as writer:
            writer.add(np.array([1]), [1], [1])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not list(tmp_path.iterdir())


def test_a_missing_half_is_named(prefix):
    idx_of(prefix).rename(prefix.parent / "aside")
    assert re.search(r"set.text.bin is there, but set.text.idx is missing", opened(prefix))
    (prefix.parent / "aside").rename(idx_of(prefix))
    bin_of(prefix).unlink()
    assert re.search(r"set.text.idx is there, but set.text.bin is missing", opened(prefix))
    idx_of(prefix).unlink()
    assert "there is neither a .idx nor a .bin" in opened(prefix)


def opened(prefix):
    return refused(lambda: IndexedFile(prefix))


@pytest.mark.parametrize("keep", [0, 5, 9])
def test_a_file_of_another_kind_is_no_index(prefix, keep):
    shutil.copy(bin_of(prefix), idx_of(prefix))
    idx_of(prefix).write_bytes(idx_of(prefix).read_bytes()[:keep])
    assert "not the index of a Megatron dataset" in opened(prefix)


@pytest.mark.parametrize("at", [9, 17])
def test_another_version_or_dtype_is_refused(prefix, at):
    data = bytearray(idx_of(prefix).read_bytes())
    data[at] = 6
    idx_of(prefix).write_bytes(data)
    assert "is not supported" in opened(prefix)


@pytest.mark.parametrize("suffix", ["bin", "idx"])
@pytest.mark.parametrize("change", [-1, 1])
def test_a_truncated_or_lengthened_file_is_refused(prefix, suffix, change):
    file = prefix.with_name(f"{prefix.name}.{suffix}")
    data = file.read_bytes()
    file.write_bytes(data[:change] if change < 0 else data + b"\0")
    assert f"{len(data) + change:,} bytes, but" in opened(prefix)


def test_an_index_with_modes_of_sequences_is_read(prefix):
    with idx_of(prefix).open("ab") as file:
        file.write(bytes(6))
    assert len(IndexedFile(prefix)) == 6


@pytest.mark.parametrize("part", [2, 1 << 22])
def test_sequences_out_of_order_are_refused(prefix, part, monkeypatch):
    monkeypatch.setattr(indexed_file, "PART", part)
    IndexedFile(prefix).check()
    data = bytearray(idx_of(prefix).read_bytes())
    at = 34 + 4 * 6 + 8 * 2
    data[at] ^= 2
    idx_of(prefix).write_bytes(data)
    assert "do not lie one after another" in refused(IndexedFile(prefix).check)


def test_a_dataset_without_documents_is_read(tmp_path):
    file = IndexedFile(write(tmp_path / "empty", [], "int32"))
    file.check()
    assert (len(file), file.num_documents, len(file.ids)) == (0, 0, 0)
