"""Every kind of input gives the same listing: names, labels, captions, bytes."""

import io
import json
import resource
import shutil
import tarfile
from pathlib import Path

import pytest
from encoded_sets import LABELS, save_pictures
from refusals import refused

from titan_dit.data.files import BadFileError
from titan_dit.pictures import library
from titan_dit.pictures.picture_set import ListingOptions
from titan_dit.pictures.readers import open_input


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Twelve pictures in every form."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    root = tmp_path_factory.mktemp("inputs")
    lines = save_pictures(root / "jsonl")
    files = [(root / "jsonl" / line["file_name"]).read_bytes() for line in lines]
    for kind in ("csv", "table", "folder"):
        shutil.copytree(root / "jsonl", root / kind)
        (root / kind / "metadata.jsonl").unlink()
    rows = [f'{x["file_name"]},{x["label"]},"{x["text"]}"\n' for x in lines]
    (root / "csv" / "metadata.csv").write_text("file_name,label,text\n" + "".join(rows))
    table = pyarrow.Table.from_pylist(lines)
    parquet.write_table(table, root / "table" / "metadata.parquet")
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
        parquet.write_table(found, file, row_group_size=4)
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
    found, wanted = (open_input(root / name, ListingOptions()) for name in (kind, "jsonl"))
    assert len(found) == 12
    assert found.class_names == LABELS
    assert found.labels.tolist() == [label for label in range(3) for _ in range(4)]
    assert list(found.texts) == ([] if kind == "folder" else list(wanted.texts))
    assert wanted.texts[5] == "a dog, 1"
    order = [11, 0, 5, 6, 4]
    assert [found.read(i) for i in order] == [wanted.read(i) for i in order]


def test_labels_may_be_numbered_by_a_list_and_be_missing(root):
    given = ["owl", "cat", "dog"]
    assert open_input(root / "tars", ListingOptions(classes=given)).labels.tolist()[::4] == [
        1,
        2,
        0,
    ]
    found = open_input(root / "jsonl", ListingOptions(classes=[*LABELS, "yak"], num_classes=4))
    assert (found.num_classes, found.class_names[3]) == (4, "yak")
    said = refused(lambda: open_input(root / "parquet", ListingOptions(classes=LABELS[:2])))
    assert said.endswith(
        "has the label 2, outside 0 to 1. Correct it, or list all classes: --classes FILE."
    )


def metadata(root, tmp_path, *lines, num_classes=2):
    folder = tmp_path / "in"
    shutil.copytree(root / "folder", folder, dirs_exist_ok=True)
    (folder / "metadata.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return refused(lambda: open_input(folder, ListingOptions(num_classes=num_classes)))


def json_line(values):
    return json.dumps(values) + "\n"


def test_keys_of_equal_meaning_are_chosen_row_by_row(root, tmp_path):
    expected = open_input(root / "jsonl", ListingOptions())
    labels = [LABELS[number] for number in expected.labels.tolist()]
    lines = [
        {"file_name": name, ("class", "label")[row % 2]: label, ("caption", "text")[row % 2]: text}
        for row, (name, label, text) in enumerate(
            zip(expected.names, labels, expected.texts, strict=True)
        )
    ]
    shutil.copytree(root / "folder", tmp_path / "in")
    columns = ("file_name", "label", "class", "text", "caption")
    rows = [columns, *([line.get(name, "") for name in columns] for line in lines)]
    files = {
        "metadata.jsonl": "".join(json.dumps(line) + "\n" for line in lines),
        "metadata.csv": "".join(",".join(f'"{cell}"' for cell in row) + "\n" for row in rows),
    }
    for name, text in files.items():
        (tmp_path / "in" / name).write_text(text)
        found = open_input(tmp_path / "in", ListingOptions())
        assert found.labels.tolist() == expected.labels.tolist(), name
        assert list(found.texts) == list(expected.texts), name
        (tmp_path / "in" / name).unlink()
    # As `sample` writes them: a number, and the name beside it. One is missing.
    numbers = [{**line, "label": row, "class": f"n{row}"} for row, line in enumerate(lines)]
    del numbers[7]["label"]
    (tmp_path / "in" / "metadata.jsonl").write_text("".join(map(json_line, numbers)))
    said = refused(lambda: open_input(tmp_path / "in", ListingOptions()))
    assert "metadata.jsonl, row 8: class n7 without a label, which is a number in other" in said
    del numbers[7]["class"]
    (tmp_path / "in" / "metadata.jsonl").write_text("".join(map(json_line, numbers)))
    found = open_input(tmp_path / "in", ListingOptions(num_classes=12))
    assert found.labels.tolist() == [*range(7), -1, *range(8, 12)]


def test_wrong_metadata_is_one_line(root, tmp_path):
    name = "cat/0.png"
    assert "row 1: file_name is missing" in metadata(root, tmp_path, {"label": "cat"})
    assert "is outside" in metadata(root, tmp_path, {"file_name": "../x.png"})
    assert "cat/0.png is listed twice" in metadata(root, tmp_path, *[{"file_name": name}] * 2)
    line = {"file_name": name, "label": 2}
    assert "has the label 2, outside 0 to 1" in metadata(root, tmp_path, line)
    assert "has the label -1" in metadata(root, tmp_path, line | {"label": -1})
    large = [{**line, "label": 2**63}, {**line, "file_name": "owl/0.png"}]
    said = metadata(root, tmp_path, *large, num_classes=2**64)
    assert "cat/0.png has the label 9223372036854775808, outside 0 to 2147483647" in said
    three = [{"file_name": f"{name}/0.png", "label": name} for name in LABELS]
    said = metadata(root, tmp_path, *three)
    assert "--num-classes 2, but there are 3 names of classes" in said
    for wrong in ("a\0b.png", "\ud800.png"):
        said = metadata(root, tmp_path, {"file_name": wrong})
        assert f"file_name {wrong!a} is no name of a file" in said


def test_a_column_is_there_once(root):
    file = root / "metadata.csv"
    file.write_text("file_name,label, label\ncat/0.png,cat,dog\n")
    said = refused(lambda: open_input(root, ListingOptions()))
    file.unlink()
    assert "metadata.csv has several columns label. Keep one of them." in said


def listed(tmp_path, name, text, **asked):
    (tmp_path / name).write_text(text)
    found = open_input(tmp_path, ListingOptions(**asked))
    (tmp_path / name).unlink()
    return found


def test_labels_in_text_are_numbers_or_names(tmp_path):
    head = "file_name, label, text\n"
    found = listed(tmp_path, "metadata.csv", f"{head}0.png, dog, a\n1.png, cat, b\n")
    assert (found.class_names, found.labels.tolist()) == (("cat", "dog"), [1, 0])
    assert list(found.texts) == ["a", "b"]
    with pytest.raises(BadFileError, match=r"^no such file: write / between folders$"):
        listed(tmp_path, "metadata.csv", f"{head}dog\\0.png, dog, a\n").read(0)
    numbers = "file_name,label\n0.png,10\n1.png,2\n2.png,-1\n"
    said = refused(lambda: listed(tmp_path, "metadata.csv", numbers, num_classes=11))
    assert said.endswith(
        "2.png has the label -1, outside 0 to 10. Correct it, or raise --num-classes."
    )
    assert listed(tmp_path, "metadata.csv", numbers, gaps=True).labels.tolist() == [10, 2, -1]
    mixed = [{"file_name": f"{i}.png", "label": label} for i, label in enumerate((10, "l2", 2))]
    text = "".join(map(json_line, mixed))
    said = refused(lambda: listed(tmp_path, "metadata.jsonl", text))
    assert "0.png has the label 10, a number, and 1.png has l2, a name. Correct them, or" in said
    found = listed(tmp_path, "metadata.jsonl", text, classes=["10", "2", "l2"])
    assert found.labels.tolist() == [0, 2, 1]
    said = refused(lambda: listed(tmp_path, "metadata.csv", numbers, split="train"))
    assert said.startswith("[data encode] split=train: ")
    assert said.endswith("metadata.csv lists the pictures. Leave --split out.")


def test_captions_may_hold_any_line_separator(root, tmp_path):
    shutil.copytree(root / "folder", tmp_path, dirs_exist_ok=True)
    text = "a\u2028b\x85c\x0bd"
    line = json.dumps({"file_name": "cat/0.png", "text": text}, ensure_ascii=False)
    (tmp_path / "metadata.jsonl").write_text(line, encoding="utf-8")
    assert list(open_input(tmp_path, ListingOptions()).texts) == [text]
    (tmp_path / "metadata.jsonl").unlink()
    table = tmp_path / "metadata.csv"
    table.write_text(f"file_name,text\ncat/0.png,{text}\n", encoding="utf-8")
    found = open_input(tmp_path, ListingOptions())
    assert (list(found.names), list(found.texts)) == (["cat/0.png"], [text])
    table.write_text("file_name,text\ncat/0.png," + "x" * 200_000)
    assert list(open_input(tmp_path, ListingOptions()).texts) == ["x" * 200_000]


@pytest.mark.parametrize("kind", ["parquet", "tars"])
def test_splits_may_be_folders_with_files_of_equal_names(root, tmp_path, kind):
    first = sorted((root / kind).iterdir())[0]
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        shutil.copy(first, tmp_path / split / f"0{first.suffix}")
    said = refused(lambda: open_input(tmp_path, ListingOptions()))
    assert said.endswith("holds the splits test, train. Choose one: --split train.")
    asked = ListingOptions(classes=LABELS, num_classes=3, split="test")
    assert open_input(tmp_path, asked).names[0].startswith(f"test/0{first.suffix}:")
    for old, new in (("train", "1"), ("test", "2")):
        (tmp_path / old).rename(tmp_path / new)
    assert len(open_input(tmp_path, ListingOptions(classes=LABELS, num_classes=3))) == 12


def save_table(path, rows, names=()):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(exist_ok=True)
    info = {"info": {"features": {"label": {"names": names}}}}
    table = pyarrow.Table.from_pylist(rows)
    about = {b"huggingface": json.dumps(info).encode()} if names else {}
    parquet.write_table(table.replace_schema_metadata(about), path)


def test_labels_of_parquet_are_numbers_or_names_of_one_list(tmp_path):
    rows = [{"image": b"x", "label": label, "text": b"a"} for label in (b"10", b"2")]
    save_table(tmp_path / "0.parquet", rows)
    found = open_input(tmp_path, ListingOptions(num_classes=11))
    assert (found.labels.tolist(), found.class_names, list(found.texts)) == ([10, 2], (), ["a"] * 2)
    (tmp_path / "0.parquet").unlink()
    for config, names in (("large", ["cat", "dog"]), ("small", ["dog", "cat"])):
        rows = [{"image": b"x", "label": label} for label in range(2)]
        save_table(tmp_path / config / "0.parquet", rows, names)
    said = refused(lambda: open_input(tmp_path, ListingOptions()))
    assert "small/0.parquet names the classes dog, cat, but the files before it cat, dog" in said
    assert open_input(tmp_path / "small", ListingOptions()).class_names == ("dog", "cat")


def tar_of(file, **members):
    with tarfile.open(file, "w") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def test_the_order_of_a_tar_file_does_not_matter(tmp_path):
    parts = {
        "0.cls": b"7",
        "0.json": b'{"label": "cat", "text": "b"}',
        "0.png": b"x",
        "0.txt": b"a",
    }
    for order in (parts, reversed(parts)):
        tar_of(tmp_path / "0.tar", **{name: parts[name] for name in order})
        found = open_input(tmp_path, ListingOptions(num_classes=8))
        assert (found.labels.tolist(), list(found.texts)) == ([7], ["a"])


def test_pictures_that_a_tar_file_would_hide_are_named(tmp_path):
    tar_of(tmp_path / "0.tar", **{"a.png": b"x", "a.depth.png": b"y", "._b.png": b"z"})
    assert list(open_input(tmp_path, ListingOptions()).names) == ["0.tar:a"]
    tar_of(tmp_path / "0.tar", **{"a.png": b"x", "b 1.5.png": b"y"})
    assert "0.tar: b 1.5.png would not be read: in tar" in refused(
        lambda: open_input(tmp_path, ListingOptions())
    )


def test_a_link_to_a_picture_is_named(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(b"x")
    (tmp_path / "in" / "b.png").hardlink_to(tmp_path / "in" / "a.png")
    with tarfile.open(tmp_path / "0.tar", "w") as archive:
        for name in ("a.png", "b.png"):
            archive.add(tmp_path / "in" / name, name)
    (tmp_path / "in" / "a.png").unlink()
    (tmp_path / "in" / "b.png").unlink()
    said = refused(lambda: open_input(tmp_path, ListingOptions()))
    assert f"{tmp_path}/0.tar: b.png is a link. Make the tar file with --dereference" in said


def test_a_tar_file_beside_class_folders_is_not_taken_for_the_dataset(root, tmp_path):
    shutil.copytree(root / "folder", tmp_path, dirs_exist_ok=True)
    tar_of(tmp_path / "all.tar", **{"a.png": b"x"})
    said = refused(lambda: open_input(tmp_path, ListingOptions()))
    assert "holds all.tar, cat, dog, owl: two datasets in one folder. Give one" in said
    for name in LABELS:
        shutil.rmtree(tmp_path / name)
    save_table(tmp_path / "a.parquet", [{"image": b"x"}])
    assert "holds a.parquet, all.tar: two" in refused(
        lambda: open_input(tmp_path, ListingOptions())
    )
    (tmp_path / "a.parquet").rename(tmp_path / "all.parquet")  # As img2dataset writes it.
    assert list(open_input(tmp_path, ListingOptions()).names) == ["all.tar:a"]


def test_many_files_may_be_open(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for number in range(60):
        tar_of(tmp_path / f"{number:02d}.tar", **{"a.png": b"x"})
    try:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (len([*Path("/proc/self/fd").iterdir()]) + 30, hard)
        )
        assert len(open_input(tmp_path, ListingOptions())) == 60
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_damaged_row_group_of_parquet_is_dropped(root, tmp_path):
    data = bytearray((root / "parquet" / "train-00000-of-00002.parquet").read_bytes())
    data[4:60] = bytes(56)  # The first row group's pictures begin behind the magic number.
    (tmp_path / "0.parquet").write_bytes(data)
    found = open_input(tmp_path, ListingOptions(num_classes=3))
    with pytest.raises(BadFileError, match="in a damaged row group"):
        found.read(0)
    assert found.read(4)


def test_parquet_without_its_library_is_one_line(root, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(library.importlib, "import_module", missing)
    message = refused(lambda: open_input(root / "parquet", ListingOptions()))
    assert "needs the library pyarrow" in message
    assert "titan_dit[pictures]" in message
