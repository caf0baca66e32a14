"""Folders of pictures to score: their classes, of which some may be missing, and errors."""

import json
import shutil
import struct
import tarfile
import zlib

import numpy as np
import pytest
from PIL import Image
from refusals import refused

from titan_dit.config.section import UserError
from titan_dit.scores import pictures

LABELS = (0, 2, 2, -1)
"""-1: `sample` has drawn it without a class."""


def save(root, *names):
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (6, 6, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(root / name)
    return root


def described(root, lines):
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (root / "metadata.jsonl").write_text(text)
    return root


@pytest.fixture
def root(tmp_path):
    return save(tmp_path / "in", *(f"{number}.png" for number in range(len(LABELS))))


def classes_of(folder):
    return pictures.open_folder(folder, 6, "--samples").classes


def test_listed_pictures_may_lack_a_class_or_a_label(root, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    names = [f"{number}.png" for number in range(len(LABELS))]
    pairs = [*zip(names, LABELS, strict=True)]
    lines = [{"file_name": name, "label": label} for name, label in pairs]
    assert classes_of(described(root, lines)) == {"0": 1, "2": 2}
    found = pictures.open_folder(root, 6, "--samples")
    assert found.read(range(4)).shape == (4, 6, 6, 3)
    assert classes_of(described(root, [{"file_name": name} for name in names])) == {}
    info = {"info": {"features": {"label": {"names": ["cat", "dog", "owl"]}}}}
    rows = [{"image": (root / n).read_bytes(), "label": max(x, 0)} for n, x in pairs]
    table = pyarrow.Table.from_pylist(rows)
    (tmp_path / "table").mkdir()
    table = table.replace_schema_metadata({b"huggingface": json.dumps(info).encode()})
    parquet.write_table(table, tmp_path / "table" / "train-0.parquet")
    assert classes_of(tmp_path / "table") == {"cat": 2, "owl": 2}
    (tmp_path / "tars").mkdir()
    with tarfile.open(tmp_path / "tars" / "0.tar", "w") as archive:
        (root / "0.cls").write_text("3")
        for name in ("0.png", "0.cls"):
            archive.add(root / name, name)
    assert classes_of(tmp_path / "tars") == {"3": 1}


def test_classes_without_a_list_are_the_first_folders(tmp_path):
    numbered = save(tmp_path / "numbered", "000/a.png", "007/a.png", "007/deep/b.png", ".x/c.png")
    (numbered / "003").mkdir()
    (numbered / "007" / "notes.txt").write_text("no picture")
    (numbered / "007" / "._a.png").write_text("no picture")
    assert classes_of(numbered) == {"0": 1, "7": 2}
    shutil.copytree(numbered / "007", tmp_path / "named" / "owl")
    (tmp_path / "named" / "dog").symlink_to(numbered / "000")
    (tmp_path / "named" / "owl" / "deep" / "loop").symlink_to(tmp_path / "named" / "owl")
    assert classes_of(tmp_path / "named") == {"dog": 1, "owl": 2}
    assert classes_of(save(tmp_path / "named", "top.png")) == {}
    assert pictures.open_folder(tmp_path / "named", 6, "--samples").count == 4
    (tmp_path / "named" / "owl" / "b.GIF").write_text("a picture that would be missing")
    said = refused(lambda: classes_of(tmp_path / "named"))
    assert "owl/b.GIF has a format that is not read. Convert it to one of .png" in said


def test_errors_begin_with_the_users_flag(root):
    def said():
        return refused(lambda: pictures.open_folder(root, 6, "--reference"))

    (root / "metadata.jsonl").write_text("{")
    assert said().startswith(f"--reference {root}/metadata.jsonl, line 1: not JSON")
    described(root, [{"file_name": "0.png", "label": 0}] * 2)
    assert said().startswith(f"--reference {root}: 0.png is listed twice")
    (root / "metadata.csv").write_text("")
    assert said().startswith(f"--reference {root} holds metadata.jsonl, metadata.csv. Keep one")
    for name in ("metadata.jsonl", "metadata.csv"):
        (root / name).unlink()
    (root / "a.tar").write_text("no archive")
    assert said().startswith(f"--reference {root}/a.tar is not a readable tar file")
    (root / "a.tar").unlink()
    (root / "test-0.parquet").write_text("no table")
    assert said().startswith(f"--reference {root}/test-0.parquet is not readable parquet")
    (root / "train-0.parquet").write_text("no table")
    assert (
        said() == f"--reference {root} holds the splits test, train. Give a folder of one of them."
    )


def test_a_listed_picture_that_is_missing_is_named_by_its_digest_too(root):
    found = pictures.open_folder(described(root, [{"file_name": "9.png"}]), 6, "--reference")
    for fails in (found.digest, lambda: found.read(range(1))):
        with pytest.raises(
            UserError, match=rf"^--reference: {root}/9.png: no such file\. Restore or"
        ):
            fails()


def header_of(width, height):
    """A PNG that declares a size, and has no pixels."""
    data = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + data
    parts = (
        b"\x89PNG\r\n\x1a\n",
        struct.pack(">I", 13),
        chunk,
        struct.pack(">I", zlib.crc32(chunk)),
    )
    return b"".join(parts) + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [("0.png", (6000, 6000), "more than .*TITAN_DIT_LIMITS=2"), ("b.png", (9, 8), r"not \[3")],
)
def test_a_declared_size_is_judged_before_the_picture_is_decoded(name, size, words, tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / name).write_bytes(header_of(*size))
    found = pictures.open_folder(tmp_path, None, "--samples")
    with pytest.raises(UserError, match=rf"{name}: .*{words}"):
        found.read(range(1, 2))
