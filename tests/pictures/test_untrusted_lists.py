"""Lists of pictures by strangers: bounded, and what is read is what was written."""

import io
import json
import tarfile
import unicodedata

import pytest
from encoded_sets import picture
from refusals import refused

from titan_dit.config.section import UserError
from titan_dit.data.files import BadFileError
from titan_dit.data.tokenizing.chunks import read_chunks
from titan_dit.pictures import parquet
from titan_dit.pictures.picture_set import ListingOptions
from titan_dit.pictures.readers import open_input

ASKED = ListingOptions(max_text_bytes=100, max_rows=1000)
DEEP = "[" * 100_000 + "]" * 100_000


def said_of(folder, asked=ASKED):
    return refused(lambda: open_input(folder, asked))


def tar_of(file, *members):
    with tarfile.open(file, "w") as archive:
        for name, data in members:
            member = name
            if isinstance(name, str):
                member = tarfile.TarInfo(name)
                member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


ROWS = {
    '"text": ["a cat", ["two cats"]]': "row 2: the caption is a list",
    '"label": ["a cat"]': "row 2: the label is a list",
    '"text": {"en": "cat"}': "row 2: the caption is a dict",
    '"text": "\\ud83d"': "row 2: the caption '\\ud83d' has half a surrogate pair",
    '"label": true': "row 2: the label is a bool",
    '"label": Infinity': "row 2: the label is inf",
    f'"label": "{"9" * 40}"': "row 2: the label is a number of 40 digits",
    '"label": 1, "label": 2': "line 2: the key 'label' stands twice",
    f'"label": {"9" * 5000}': "line 2: not JSON (a number of too many digits)",
    f'"text": {DEEP}': "line 2: not JSON (nested too deeply)",
    f'"text": "{"x" * 300_000}"': "line 2: longer than 250,000 bytes. Correct it, or raise --max-",
}


def test_a_row_that_says_no_label_or_caption_is_refused_by_its_number(tmp_path):
    for row, words in ROWS.items():
        text = '{"file_name": "0.png"}\n{"file_name": "1.png", ' + row + "}\n"
        (tmp_path / "metadata.jsonl").write_text(text)
        said = said_of(tmp_path, ListingOptions(max_text_bytes=250_000))
        assert f"metadata.jsonl, {words}" in said, row[:40]


def test_a_caption_is_text_or_a_number(tmp_path):
    rows = [{"text": 0}, {"text": None, "caption": "b"}, {"text": float("nan"), "label": 2.0}]
    lines = [json.dumps({"file_name": f"{i}.png", **row}) for i, row in enumerate(rows)]
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    found = open_input(tmp_path, ListingOptions(num_classes=3))
    assert list(found.texts) == ["0", "b", ""]
    assert found.labels.tolist() == [-1, -1, 2]


def test_one_word_in_two_forms_of_unicode_is_no_second_class(tmp_path):
    forms = [unicodedata.normalize(form, "abc\xe9") for form in ("NFC", "NFD")]
    lines = [json.dumps({"file_name": f"{i}.png", "label": x}) for i, x in enumerate(forms)]
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    assert "are one word in two forms of Unicode" in said_of(tmp_path)


@pytest.mark.parametrize(("there", "named"), [("NFD", "NFC"), ("NFC", "NFD")])
def test_a_file_is_found_by_the_other_form_of_its_name(tmp_path, there, named):
    name = "abc\xe9.png"
    picture(0).save(tmp_path / unicodedata.normalize(there, name))
    row = {"file_name": unicodedata.normalize(named, name)}
    (tmp_path / "metadata.jsonl").write_text(json.dumps(row))
    found = open_input(tmp_path, ListingOptions())
    assert found.read(0)
    assert found.stamp(0)[0] > 0


TARS = {
    "0.txt": (b"abc\xe9", "is not UTF-8 (byte 4)"),
    "0.cls": (b"9" * 40, "the label is a number of 40 digits"),
    "0.json": (DEEP.encode(), "is not JSON (nested too deeply)"),
    "1.json": (b'{"text": ["a", {"b": 1}]}', "the caption is a dict"),
    "2.txt": (b"x" * 250_000, "is longer than 220,000 bytes. Correct it, or raise --max-text-by"),
}


def test_a_text_beside_a_picture_is_refused_by_its_name(tmp_path):
    for name, (data, words) in TARS.items():
        tar_of(tmp_path / "0.tar", ("0.png", b"x"), (name, data))
        said = said_of(tmp_path, ListingOptions(max_text_bytes=220_000))
        assert f"0.tar: {name}" in said, name
        assert words in said, name


def test_texts_in_tars_may_begin_with_a_byte_order_mark(tmp_path):
    bom = b"\xef\xbb\xbf"
    tar_of(
        tmp_path / "0.tar",
        *[("0.png", b"x"), ("0.txt", bom + b"a"), ("0.cls", bom + b"3")],
        *[("1.png", b"x"), ("1.json", bom + b'{"label": null, "class": 4}')],
    )
    found = open_input(tmp_path, ListingOptions(num_classes=5))
    assert (list(found.texts), found.labels.tolist()) == (["a", ""], [3, 4])


def sparse(name, size=30 * 10**9):
    """A member of GNU's sparse format 1.0, of one hole."""
    member = tarfile.TarInfo("x")
    member.size = 512
    member.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": name,
        "GNU.sparse.realsize": str(size),
    }
    return member, b"1\n0\n0\n".ljust(512, b"\0")


@pytest.mark.parametrize("name", ["0.txt", "0.cls", "0.json", "0.png"])
def test_a_sparse_member_of_a_tar_file_is_refused(tmp_path, name):
    tar_of(tmp_path / "0.tar", sparse(name))
    assert f"0.tar: {name} is a sparse member" in said_of(tmp_path)


def test_a_damaged_tar_file_is_one_line(tmp_path):
    loop = tarfile.TarInfo("0.txt")
    loop.type, loop.linkname = tarfile.SYMTYPE, "0.txt"
    tar_of(tmp_path / "0.tar", (loop, b""))
    assert "0.tar: 0.txt is a link to nothing, or to itself" in said_of(tmp_path)
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 2**33
    (tmp_path / "0.tar").write_bytes(header.tobuf(tarfile.GNU_FORMAT) + bytes(10240))
    assert "0.tar is not a readable tar file (a header of 8,589,934,592" in said_of(tmp_path)
    member, _ = sparse("0.txt")
    tar_of(tmp_path / "0.tar", (member, b"no number\n".ljust(512, b"\0")))
    assert "0.tar is not a readable tar file" in said_of(tmp_path)


def header_of(name, size, kind=tarfile.REGTYPE, **places):
    """The header of a member, of any size; `places`: bytes by _offset."""
    member = tarfile.TarInfo(name)
    member.type = kind
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = tarfile.itn(size, 12, tarfile.GNU_FORMAT)
    for place, byte in places.items():
        header[int(place[1:])] = byte
    header[148:156] = b"        "
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def test_a_member_of_negative_size_ends_the_reading(tmp_path):
    """Of -512 bytes it would come after itself, for ever; after this one the reading ends."""
    first = header_of("0.txt", 5) + b"a cat".ljust(512, b"\0")
    (tmp_path / "0.tar").write_bytes(first + header_of("1.bin", -1536) + bytes(1024))
    assert "(a member of -1,536 bytes)" in said_of(tmp_path)
    with pytest.raises(UserError, match="a member of -1,536 bytes"):
        list(read_chunks([tmp_path / "0.tar"], "a test"))
    extended = tarfile.TarInfo("0.txt")
    extended.pax_headers = {"size": "-1024"}
    tar_of(tmp_path / "0.tar", (extended, b""))
    assert "(a member of -1,024 bytes)" in said_of(tmp_path)


def test_a_list_of_holes_that_is_cut_off_is_one_line(tmp_path):
    header = header_of("0.txt", 512, tarfile.GNUTYPE_SPARSE, _482=1)
    (tmp_path / "0.tar").write_bytes(header)
    with pytest.raises(UserError, match="a list of holes that is cut off"):
        list(read_chunks([tmp_path / "0.tar"], "a test"))


def test_a_file_of_a_picture_is_read_up_to_a_limit(tmp_path):
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "0.png"}')
    with (tmp_path / "0.png").open("wb") as file:
        file.truncate(30 * 10**9)  # It is sparse, and takes no room.
    said = r"^30,000,000,000 bytes, more than 268,435,456\. .* raise --max-file-bytes$"
    with pytest.raises(BadFileError, match=said):
        open_input(tmp_path, ListingOptions()).read(0)


@pytest.fixture
def table(tmp_path):
    """A function that writes a parquet file of columns."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    def write(name="0.parquet", **columns):
        # Without the schema of pyarrow, by which it would read a dictionary as one.
        parquet.write_table(pyarrow.table(columns), tmp_path / name, store_schema=False)
        return tmp_path

    return write


def repeated(value, count):
    """A column of one value, which the file holds once."""
    import pyarrow

    indices = pyarrow.array([0] * count, pyarrow.int32())
    return pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array([value]))


def test_rows_of_parquet_are_bounded(table):
    said = said_of(table(image=repeated(b"x", 1001)))
    assert "0.parquet lists 1,001 rows in" in said
    assert said.endswith("more than 1,000. Correct it, or raise --max-rows.")


def test_rows_of_parquet_are_those_that_its_footer_names(table):
    folder = table(image=repeated(b"x", 3000), label=repeated("a", 3000))
    file = folder / "0.parquet"
    data = file.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    # Thrift's signed numbers, seven bits a byte: the first one is of the whole file.
    file.write_bytes(data[:footer] + data[footer:].replace(b"\xf0\x2e", b"\x8a\x00", 1))
    assert "it names 5 rows and holds 3,000" in said_of(folder)


def test_texts_of_parquet_are_bounded(table):
    folder = table(image=repeated(b"x", 2), text=repeated("y" * 101, 2))
    assert "a text has 101 bytes, more than 100. Correct it, or raise --max-text" in said_of(folder)
    table(image=repeated(b"x", 1000), text=repeated("y" * 100_000, 1000))
    said = said_of(folder, ListingOptions(max_text_bytes=100_000))
    assert "its texts unpack to more than 200 times its size" in said


def test_a_row_group_is_bounded_by_its_file_and_a_variable_raises_that(table, monkeypatch):
    monkeypatch.setattr(parquet, "SMALL_GROUP", 1000)
    folder = table(image=[b"x" * 100_000])
    said = said_of(folder)
    assert "row group 0 holds 100,0" in said
    assert said.endswith("row_group_size=1000. If it is no forgery, set TITAN_DIT_LIMITS=2.")
    monkeypatch.setenv("TITAN_DIT_LIMITS", "2")
    assert len(open_input(folder, ListingOptions())) == 1


def test_a_picture_that_rows_of_parquet_repeat_is_held_once(table):
    """As an array of its own for each row it would be two gigabytes."""
    import pyarrow

    data = repeated(b"x" * 2_000_000, 1000)
    for column in (data, pyarrow.StructArray.from_arrays([data], ["bytes"])):
        before = pyarrow.default_memory_pool().bytes_allocated()
        found = open_input(table(image=column), ASKED)
        assert found.read(999) == b"x" * 2_000_000
        assert pyarrow.default_memory_pool().bytes_allocated() - before < 10**8


def twice(folder, name):
    """A folder with a parquet file of two columns of one name."""
    import pyarrow
    from pyarrow import parquet

    found = pyarrow.table({"image": [b"x"], "label": ["a"]})
    found = found.append_column(name, found.column(name))
    parquet.write_table(found, folder / "0.parquet")
    return folder


def test_columns_of_parquet_are_text_or_numbers(table, tmp_path):
    said = said_of(table(image=[b"x"], text=[["a", "b"]]))
    assert "column text is list<" in said
    assert "0.parquet has several columns label. Keep" in said_of(twice(tmp_path, "label"))
    assert "0.parquet has several columns image. Keep" in said_of(twice(tmp_path, "image"))
    assert "column label is bool, not" in said_of(table(image=[b"x"], label=[True]))
    assert "a text is not UTF-8" in said_of(table(image=[b"x"], text=[b"\xff"]))
    said = said_of(table("metadata.parquet", file_name=["a.png"], text=[{"en": "a"}]))
    assert "metadata.parquet: column text is struct<en" in said


def test_a_split_is_a_word_of_the_name(tmp_path):
    for name in ("train-0.tar", "valley-0.tar", "trainee.tar"):
        tar_of(tmp_path / name, ("0.png", b"x"))
    assert len(open_input(tmp_path, ListingOptions())) == 3
    assert len(open_input(tmp_path, ListingOptions(split="train"))) == 1
    for name in ("val-0.tar", "validation_1.tar", "val.tar"):
        (tmp_path / "valley-0.tar").rename(tmp_path / name)
        assert "holds the splits train, val. Choose one" in said_of(tmp_path)
        assert len(open_input(tmp_path, ListingOptions(split="val"))) == 1
        (tmp_path / name).rename(tmp_path / "valley-0.tar")


def test_a_caption_may_be_a_list_in_metadata_and_in_tars(tmp_path):
    values = [["a cat", "two cats"], ["a dog", ""], [], "an owl", [7, "eight"]]
    (tmp_path / "rows").mkdir()
    rows = [{"file_name": f"{n}.png", "text": text} for n, text in enumerate(values)]
    for row in rows:
        (tmp_path / "rows" / row["file_name"]).write_bytes(b"x")
    (tmp_path / "rows" / "metadata.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "tars").mkdir()
    beside = [(f"{n}.json", json.dumps({"text": text}).encode()) for n, text in enumerate(values)]
    pictures = [(f"{n}.png", b"x") for n in range(len(values))]
    tar_of(tmp_path / "tars" / "0.tar", *pictures, *beside)
    for folder in ("rows", "tars"):
        found = open_input(tmp_path / folder, ListingOptions(no_caption="empty"))
        assert list(found.texts) == [("a cat", "two cats"), "a dog", "", "an owl", ("7", "eight")]
