"""Every kind of input gives the same listing: names, labels, captions, bytes."""

import io
import json
import shutil
import tarfile

import pyarrow
import pyarrow.parquet
import pytest
from encoded_sets import LABELS, save_pictures
from refusals import refused

from titan_dit.pictures import library
from titan_dit.pictures.open_input import open_input
from titan_dit.pictures.picture_set import Asked


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Twelve pictures in every form."""
    root = tmp_path_factory.mktemp("inputs")
    lines = save_pictures(root / "jsonl")
    files = [(root / "jsonl" / line["file_name"]).read_bytes() for line in lines]
    for kind in ("csv", "table", "folder"):
        shutil.copytree(root / "jsonl", root / kind)
        (root / kind / "metadata.jsonl").unlink()
    rows = [f'{x["file_name"]},{x["label"]},"{x["text"]}"\n' for x in lines]
    (root / "csv" / "metadata.csv").write_text("file_name,label,text\n" + "".join(rows))
    table = pyarrow.Table.from_pylist(lines)
    pyarrow.parquet.write_table(table, root / "table" / "metadata.parquet")
    (root / "parquet").mkdir()
    features = {"label": {"names": list(LABELS), "_type": "ClassLabel"}}
    about = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    for part in range(2):
        rows = [
            {
                "image": {"bytes": files[i], "path": None},
                "label": LABELS.index(lines[i]["label"]),
                "text": lines[i]["text"],
            }
            for i in range(6 * part, 6 * part + 6)
        ]
        found = pyarrow.Table.from_pylist(rows).replace_schema_metadata(about)
        file = root / "parquet" / f"train-{part:05d}-of-00002.parquet"
        pyarrow.parquet.write_table(found, file, row_group_size=4)
    (root / "tars").mkdir()
    for part in range(2):
        with tarfile.open(root / "tars" / f"{part:05d}.tar", "w") as archive:
            for i in range(6 * part, 6 * part + 6):
                for suffix, data in (
                    ("png", files[i]),
                    ("cls", lines[i]["label"].encode()),
                    ("txt", lines[i]["text"].encode()),
                ):
                    member = tarfile.TarInfo(f"{i:04d}.{suffix}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
    return root


@pytest.mark.parametrize("kind", ["jsonl", "csv", "table", "folder", "parquet", "tars"])
def test_pictures_labels_and_captions_are_those_of_the_folder(root, kind):
    found, wanted = (open_input(root / name, Asked()) for name in (kind, "jsonl"))
    assert len(found) == 12
    assert found.class_names == LABELS
    assert found.labels.tolist() == [label for label in range(3) for _ in range(4)]
    assert list(found.texts) == ([] if kind == "folder" else list(wanted.texts))
    assert wanted.texts[5] == "a dog, 1"
    order = [11, 0, 5, 6, 4]
    assert [found.read(i) for i in order] == [wanted.read(i) for i in order]


def test_labels_may_be_numbered_by_a_list_and_be_missing(root):
    given = ["owl", "cat", "dog"]
    assert open_input(root / "tars", Asked(classes=given)).labels.tolist()[::4] == [1, 2, 0]
    found = open_input(root / "jsonl", Asked(classes=[*LABELS, "yak"], num_classes=4))
    assert (found.num_classes, found.class_names[3]) == (4, "yak")


def metadata(root, tmp_path, *lines):
    folder = tmp_path / "in"
    shutil.copytree(root / "folder", folder, dirs_exist_ok=True)
    (folder / "metadata.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return refused(lambda: open_input(folder, Asked(num_classes=2)))


def test_wrong_metadata_is_one_line(root, tmp_path):
    name = "cat/0.png"
    assert "row 1: file_name is missing" in metadata(root, tmp_path, {"label": "cat"})
    assert "is outside" in metadata(root, tmp_path, {"file_name": "../x.png"})
    assert "cat/0.png is listed twice" in metadata(root, tmp_path, *[{"file_name": name}] * 2)
    line = {"file_name": name, "label": 2}
    assert "has the label 2, outside 0 to 1" in metadata(root, tmp_path, line)
    assert "has the label -1" in metadata(root, tmp_path, line | {"label": -1})


def test_parquet_without_its_library_is_one_line(root, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(library.importlib, "import_module", missing)
    message = refused(lambda: open_input(root / "parquet", Asked()))
    assert "needs the library pyarrow" in message
    assert "titan_dit[pictures]" in message
