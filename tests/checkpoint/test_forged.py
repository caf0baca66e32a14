"""Checkpoints that someone has forged, with right digests: nothing runs, one line says why."""

import io
import json
import os
import pickle
import random
import struct
import sys
import zipfile

import pytest
import records
import torch
from torch.distributed.checkpoint import filesystem, metadata

from titan_dit.checkpoint import checkpoint, record, torch_files
from titan_dit.checkpoint.record import read_record
from titan_dit.config.section import UserError
from titan_dit.recovery.resume import readable

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DATA, TABLE, PICKLE = "__0_0.distcp", torch_files.CONTENTS, torch_files.METADATA
DEEP = json.loads("[" * 400 + "]" * 400)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "step-00000007"
    checkpoint.write(path, {"model": {"w": torch.arange(8.0).view(4, 2)}}, records.of_run(7))
    return path


def seal(folder, change=lambda manifest: None, **files):
    """Change a checkpoint's manifest, and write files, with digests that fit."""
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["digest"]
    for name, data in files.items():
        (folder / name).write_bytes(data)
        manifest["files"][name] = checkpoint.describe(folder / name)
    change(manifest)
    manifest["digest"] = record.digest_of(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_what_a_record_says_about_the_empty_caption_is_checked(saved, monkeypatch):
    """It may name the file without one, another one, or one that is too large."""
    null = b"\0" * record.LONG

    def name(manifest):
        manifest["data"]["text"] = {"null": record.EMPTY_CAPTION}

    seal(saved, name)
    with pytest.raises(UserError, match=r"empty_caption\.f32 is missing or has another size"):
        read_record(saved)
    seal(saved, name, **{record.EMPTY_CAPTION: null})
    assert len(read_record(saved)["data"]["text"]["null"]) > record.LONG
    (saved / record.EMPTY_CAPTION).write_bytes(null[:-1] + b"\1")
    with pytest.raises(UserError, match=r"the digest of empty_caption\.f32 differs"):
        read_record(saved)
    monkeypatch.setattr(record, "MOST", 1 << 10)
    with pytest.raises(UserError, match=r"empty_caption\.f32 has more than 0 MiB"):
        read_record(saved)
    for text in ([], "x", {"null": 3}, {"null": None}):
        seal(saved, lambda manifest, text=text: manifest["data"].update(text=text))
        assert read_record(saved)["data"]["text"] == text


def as_older(folder, data=None):
    """Make the checkpoint one of an older version, which has no tensors.json."""
    data = (folder / PICKLE).read_bytes() if data is None else data
    seal(folder, lambda manifest: manifest["files"].pop(TABLE), **{PICKLE: data})


def text(word):
    return b"\x8c" + bytes([len(word)]) + word.encode()


def imported(module, name):
    return text(module) + text(name) + b"\x93"


DCP = "torch.distributed.checkpoint.metadata"
SET = b"}" + text("os.system") + imported("torch", "float32") + b"sb0"
"""BUILD: vars(what is on the stack)["os.system"] = torch.float32, then drop it."""
CALL = imported("torch", "os.system") + text("touch PWNED") + b"\x85R0N."
TWICE = b")" + b"".join(b"q%ch%c\x86" % (level, level) for level in range(20))
"""A tuple that holds a tuple twice, and so on: a million values, of which each is hashed."""
PROGRAMMES = {
    "module in a module": (imported(DCP, "torch") + SET + CALL, f"imports {DCP}.torch"),
    "dots": (CALL, r"imports torch.os.system"),
    "BUILD on a class": (imported(DCP, "Metadata") + SET + CALL, "changes what is no instance"),
    "BUILD on a dtype": (imported("torch", "float32") + SET + CALL, "changes what is no instance"),
    "call of a dtype": (imported("torch", "float32") + b")RN.", "calls what is no class"),
    "call of a text": (text("eval") + b")RN.", "calls what is no class"),
    "no dtype": (imported("torch", "load") + b"N.", "imports torch.load"),
    "INST": (b"(ios\nsystem\n.", "opcodes that DCP never writes"),
    "OBJ": (b"(" + imported(DCP, "Metadata") + b"o.", "opcodes"),
    "EXT1": (b"\x82\x01.", "opcodes"),
    "persistent id": (b"N" + b"Q.", "opcodes"),
    "memo of 64 GB": (b"Nr\xff\xff\xff\xff.", "no Metadata"),
    "text of 4 GB": (b"X\xff\xff\xff\xffab.", "cut off"),
    "frame of 2^62 bytes": (b"\x95" + struct.pack("<Q", 2**62) + b"N.", "no Metadata"),
    "tuple as a key": (b"}" + TWICE + b"Ns.", "keys are neither text"),
    "tuples as keys": (b"}(" + text("a") + b"N" + TWICE + b"Nu.", "keys are neither text"),
    "itself": (b"]q\x00h\x00a.", "no Metadata"),
    "empty": (b"", "cut off"),
}


@pytest.mark.parametrize("older", [True, False])
@pytest.mark.parametrize("programme", PROGRAMMES)
def test_metadata_run_nothing(saved, programme, older, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, words = PROGRAMMES[programme]
    data = b"\x80\x04" + code
    if older:
        as_older(saved, data)
        with pytest.raises(UserError, match=words):
            checkpoint.contents(saved)
    else:  # No command reads it, but torch's tools would.
        seal(saved, **{PICKLE: data})
        assert list(checkpoint.contents(saved)) == ["model.w"]
    with pytest.raises(UserError, match=words):
        checkpoint.load(saved, {"model": {"w": torch.zeros(4, 2)}})
    assert not (tmp_path / "PWNED").exists()


NAMES = sorted(torch_files.PLAIN_CLASSES) + [("torch", name) for name in torch_files.DTYPES]
NAMES += [(DCP, "torch"), (DCP, "os"), ("torch", "os.system"), ("os", "system"), ("torch", "load")]
WORDS = ("__setstate__", "__class__", "__dict__", "dtype", "os.system", "state", "float32")
WATCHED = (torch, metadata, filesystem, torch.serialization, pickle, os)


def drawn(draw):
    """A random programme over the allowed names."""
    simple = [b"N", b"}", b"]", b")", b"(", b"0", b"2", b"1", b"\x85", b"\x86", b"\x87", b"t", b"l"]
    acting = [b"R", b"\x81", b"\x92", b"b", b"s", b"u", b"a", b"e", b"o", b"\x94", b"d", b"\x90"]
    code = [imported(*draw.choice(NAMES))]
    for _ in range(draw.randrange(2, 24)):
        kind = draw.random()
        if kind < 0.25:
            code.append(imported(*draw.choice(NAMES)))
        elif kind < 0.4:
            code.append(text(draw.choice(WORDS)))
        elif kind < 0.5:
            code.append(draw.choice((b"h", b"q", b"K")) + bytes([draw.randrange(4)]))
        else:
            code.append(draw.choice(simple + acting * 2))
    return b"\x80\x04" + b"".join(code) + b"."


def everything():
    """Every name of the watched modules, and every attribute of the allowed classes."""
    found = [vars(module) for module in WATCHED]
    found += [
        vars(thing)
        for name, _ in ((n, m) for m, n in torch_files.PLAIN_CLASSES)
        for module in WATCHED
        if isinstance(thing := getattr(module, name, None), type)
    ]
    return [{key: id(value) for key, value in table.items()} for table in found]


def test_no_programme_over_the_allowed_names_changes_anything():
    draw, before, kept = random.Random(0), everything(), set(sys.modules)
    ends = {"value": 0, "error": 0}
    for _ in range(5000):
        try:
            found = torch_files.Plain(io.BytesIO(drawn(draw))).load()
            ends["value"] += 1
            assert type(found).__module__ in ("builtins", torch_files.__name__)
        except AssertionError:
            raise
        except Exception:
            ends["error"] += 1
    assert min(ends.values()) > 100, ends
    assert everything() == before
    assert set(sys.modules) == kept


WRONG = {
    "step is missing": lambda m: m.pop("step"),
    'step="12" must be a whole number': lambda m: m.update(step="12"),
    "step=-5 must be at least 0": lambda m: m.update(step=-5),
    "step=true must be a whole number": lambda m: m.update(step=True),
    "cursor = 1000.* out of range": lambda m: m.update(cursor=10**400),
    "not JSON .nested|cursor=.* must be a whole": lambda m: m.update(cursor=DEEP),
    "config = None must be a table": lambda m: m.update(config=None),
    "config model is missing": lambda m: m["config"].pop("model"),
    "config ema decays is missing": lambda m: m["config"].update(ema={}),
    "config model hidden_size = .* out of range": lambda m: m["config"]["model"].update(
        hidden_size=10**400
    ),
    "config model hidden_size is nested|not JSON .nested": lambda m: m["config"]["model"].update(
        hidden_size=DEEP
    ),
    "data count is missing": lambda m: m.update(data={}),
    r"ledger untrained\[0\] holds 2 values, not 4": lambda m: m.update(
        ledger={"untrained": [[1, 2]]}
    ),
    "guard streak must be a list|guard streak = 3": lambda m: m.update(guard={"streak": 3}),
    "written_at = .* is not a time": lambda m: m.update(written_at="yesterday"),
}
FILES = {
    r"files = \[\] must be a table": lambda m: m.update(files=[]),
    "files is missing": lambda m: m.pop("files"),
    r"its files do not name \.metadata": lambda m: m.update(files={}),
    "files .* sha256 = .* is not a SHA-256": lambda m: m["files"][DATA].update(sha256="0"),
    "files __0_0.distcp bytes=-1 must be at least": lambda m: m["files"][DATA].update(bytes=-1),
    r'files: the name "\.\./x" is not the name of a file': lambda m: m["files"].update({"../x": 1}),
    'files: the name "/etc/passwd"': lambda m: m["files"].update({"/etc/passwd": 1}),
    'files: the name "a.u001b': lambda m: m["files"].update({"a\x1b[31m": 1}),
}


@pytest.mark.parametrize("words", [*WRONG, *FILES])
def test_a_wrong_manifest_is_damaged_and_the_line_says_where(saved, words):
    seal(saved, {**WRONG, **FILES}[words])
    with pytest.raises(record.Damaged, match=f"manifest.json is damaged: ({words})") as caught:
        read_record(saved)
    assert len(str(caught.value)) < 600
    found, what = readable(saved)
    assert not found
    assert what.startswith("manifest.json: ")
    if words in FILES:
        with pytest.raises(UserError, match="is damaged"):
            checkpoint.load(saved, {"model": {"w": torch.zeros(4, 2)}})


def test_a_key_that_stands_twice_is_damaged(saved):
    file = saved / "manifest.json"
    file.write_text(file.read_text().replace('"step": 7,', '"step": 7, "step": 8,'))
    with pytest.raises(record.Damaged, match="the key 'step' stands twice"):
        read_record(saved)


def chunk(*row):
    return lambda t: t["tensors"]["model.w"].update(chunks=[list(row)])


TABLES = {
    r"refers to \"\.\./x\", which the manifest does not": lambda t: t.update(files=["../x"]),
    "lists a file twice": lambda t: t.update(files=[DATA, DATA]),
    "has the dtype": lambda t: t["tensors"]["model.w"].update(dtype="os.system"),
    "65 dims, more than 64": lambda t: t["tensors"]["model.w"].update(shape=[1] * 65),
    "more than 2\\^63 bytes": lambda t: t["tensors"]["model.w"].update(shape=[2**40, 2**40]),
    "a chunk outside of its shape": chunk(0, 0, 1500, 2, 0, 4, 2),
    "a chunk outside of its file": chunk(0, 0, 10**9, 0, 0, 4, 2),
    "outside of its file|outside of its shape": chunk(-1, 0, 1500, 0, 0, 4, 2),
    "a chunk of 32 bytes in 31": chunk(0, 0, 31, 0, 0, 4, 2),
    "chunk that is not of numbers": chunk(0, 0, 1500, 0, 0, 4, 2.0),
    "not of numbers": chunk(0, True, 1500, 0, 0, 4, 2),
    "do not make up its shape": chunk(0, 0, 1500, 0, 0, 2, 2),
    "take more bytes": lambda t: t["tensors"].update(dict.fromkeys("ab", t["tensors"]["model.w"])),
    "its format is": lambda t: t.update(format="titan_dit.tensors/2"),
    "shape is missing": lambda t: t["tensors"]["model.w"].pop("shape"),
    "no list of chunks": lambda t: t["tensors"]["model.w"].update(chunks=None),
}


@pytest.mark.parametrize("words", TABLES)
def test_a_forged_table_of_tensors_is_refused(saved, words):
    table = json.loads((saved / TABLE).read_text())
    TABLES[words](table)
    seal(saved, **{TABLE: json.dumps(table).encode()})
    with pytest.raises(UserError, match=words):
        checkpoint.contents(saved)


def packed(data, method=zipfile.ZIP_STORED, **members):
    """Bytes of a file that torch.save wrote, repacked, with other members."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(out, "w", method) as target:
        for info in source.infolist():
            name = info.filename.rpartition("/")[2]
            target.writestr(info.filename, members.get(name, source.read(info)))
    return out.getvalue()


class Evil:
    def __reduce__(self):
        return os.mkdir, ("PWNED",)


def saved_by_torch(value):
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            packed(saved_by_torch(torch.zeros(8)), **{"data.pkl": pickle.dumps(Evil(), 2)}),
            "mkdir",
        ),
        (saved_by_torch({"w": 1}), "cannot be read"),
        (saved_by_torch(torch.zeros(3)), "cannot be read"),
        (packed(saved_by_torch(torch.zeros(1 << 20)), zipfile.ZIP_DEFLATED), "is compressed"),
        (b"PK" * 999, "cannot be read"),
    ],
    ids=["code", "no tensor", "another shape", "compressed", "no zip"],
)
def test_a_forged_tensor_is_refused(saved, data, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = json.loads((saved / TABLE).read_text())
    size = max(len(data), 32)
    chunk(0, 0, size, 0, 0, 4, 2)(table)
    seal(saved, **{DATA: data.ljust(size), TABLE: json.dumps(table).encode()})
    with pytest.raises(UserError, match=words):
        checkpoint.read_into({"model": {"w": torch.zeros(4, 2)}}, saved)
    assert not (tmp_path / "PWNED").exists()


def stated(module, name, **state):
    """An instance of a class, with a state."""
    values = b"".join(text(key) + value + b"s" for key, value in state.items())
    return imported(module, name) + b")\x81}" + values + b"b"


def older_metadata(size=TWICE, file=TWICE, tensor=TWICE):
    """A pickle of one tensor and one chunk, of which these are values that a message might show."""
    size = imported("torch", "Size") + size + b"\x85R"
    properties = imported(DCP, "TensorProperties") + b")\x81" + imported("torch", "float32")
    entry = stated(
        *(DCP, "TensorStorageMetadata"), properties=properties + b"\x85b", size=size, chunks=b"]"
    )
    index = stated(DCP, "MetadataIndex", fqn=tensor, offset=imported("torch", "Size") + b")\x85R")
    place = stated(
        *("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        **{"relative_path": file, "offset": b"K\0", "length": b"K\4"},
    )
    tensors, places = b"}" + text("w") + entry + b"s", b"}" + index + place + b"s"
    return b"\x80\x04" + stated(DCP, "Metadata", state_dict_metadata=tensors, storage_data=places)


def test_numbers_and_names_of_older_metadata_are_no_tuples():
    """Their hash or their text would take as long as a key's."""
    assert torch_files.load_plain_pickle(older_metadata() + b".").name == "Metadata"
    with pytest.raises(pickle.UnpicklingError, match="a Size that is not of numbers"):
        torch_files.read_plain_pickle(older_metadata() + b".")
    for names in ({"file": text("a")}, {"tensor": text("w")}):
        with pytest.raises(pickle.UnpicklingError, match="a chunk without a tensor or a file"):
            torch_files.read_plain_pickle(older_metadata(size=b")", **names) + b".")


def test_an_older_checkpoint_is_loaded_by_its_metadata(saved):
    before = checkpoint.contents(saved)
    as_older(saved)
    (saved / TABLE).unlink()
    assert checkpoint.contents(saved) == before
    target = {"model": {"w": torch.zeros(4, 2)}}
    checkpoint.load(saved, target)
    assert torch.equal(target["model"]["w"], torch.arange(8.0).view(4, 2))


def test_a_pipe_in_place_of_a_file_is_damaged(saved):
    (saved / DATA).unlink()
    os.mkfifo(saved / DATA)
    assert checkpoint.damaged_files(saved, read_record(saved), checkpoint.Ranks()) == [DATA]


def test_a_table_that_is_larger_than_its_tensors_is_not_read(saved):
    seal(saved, **{TABLE: b"[" + b"[]," * 1_500_000 + b"[]]"})
    with pytest.raises(UserError, match=r"tensors\.json is .*too large for the tensors"):
        checkpoint.contents(saved)


def test_a_manifest_of_any_size_is_not_read(saved):
    with (saved / "manifest.json").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(record.Damaged, match="it has more than 32 MiB"):
        read_record(saved)
