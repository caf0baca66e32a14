"""Embeddings of captions beside shards: each sample gets its own caption's, stopped or not."""

import json
import pickle
import shutil
import sys
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from commands import run
from encoded_sets import CPU, encoded, save_pictures
from folders_of_files import files_in
from refusals import refused
from tiny_text import save_encoder
from tiny_vae import save_vae

from titan_dit.commands.flags import DataEncodeFlags
from titan_dit.config.section import UserError
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.data.latents import LatentShards
from titan_dit.data.loader import load_samples
from titan_dit.data.manifest import read_json
from titan_dit.pictures import text_encoder, text_job
from titan_dit.pictures.text_job import make_text_job

TEXTS = [f"a {label}, {i}" for label in ("cat", "dog", "owl") for i in range(4)]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Pictures, encoded without text, and an encoder that knows their words."""
    root = tmp_path_factory.mktemp("text")
    vae = save_vae(root / "vae")
    save_encoder(root / "t5", captions=[*TEXTS, "of red and blue"])
    save_encoder(root / "qwen", "Qwen3Model", captions=TEXTS)
    save_pictures(root / "in")
    lines = [json.loads(line) for line in (root / "in" / "metadata.jsonl").read_text().splitlines()]
    # Captions of several lengths, and one that two pictures share.
    lines[3]["text"] += " of red and blue"
    lines[7]["text"] = lines[6]["text"]
    (root / "in" / "metadata.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    encoded(root / "in", root / "set", vae, flip=True)
    return root


@pytest.fixture
def copied(root, tmp_path):
    shutil.copytree(root / "set", tmp_path / "set")
    return tmp_path / "set"


def load(root, name="t5", **how):
    return text_encoder.load(str(root / name), CPU, **how)


def job_of(output, encoder, **how):
    return make_text_job(
        output, encoder, **{"tokens": None, "dtype": "float32", "batch_size": 4} | how
    )


def add_text(output, encoder, most=None, **how):
    """Encode the captions in this process, at most `most` files; None if nothing was left."""
    job = job_of(output, encoder, **how)
    with ExitStack() as stack:
        todo = text_job.begin(job, stack)
        if todo is None:
            return None
        text_job.encode_texts(job, todo[:most], lambda _: None)
        if most is None:
            text_job.finish(job)
    return todo


def captions_of(output):
    """The caption of each picture."""
    lines = (output / "captions.jsonl").read_text().splitlines()
    return [json.loads(line)["text"] for line in lines]


def small_files(monkeypatch):
    """Several files of some captions each."""
    monkeypatch.setattr(text_job, "SHARD_BYTES", 1000)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_row_has_the_embedding_of_its_own_caption(root, copied, monkeypatch, dtype):
    small_files(monkeypatch)
    encoder = load(root)
    add_text(copied, encoder, dtype=dtype)
    source, texts = LatentShards(copied, verify=True), captions_of(copied)
    assert (len(source), len(texts)) == (24, 12)
    assert len(read_json(copied)["text"]["files"]) > 2
    # Of every file, in any order, a row twice.
    rows = [23, 0, 7, 6, 14, 15, 12, 0, *range(24)]
    found = source.read(rows)
    wanted = encoder.encode(texts)
    stored = getattr(torch, dtype)
    assert (found["text"].dtype, found["text"].shape) == (stored, (32, 9, 32))
    close = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    for i, row in enumerate(rows):
        text, length = found["text"][i], int(found["text_length"][i])
        assert length == len(wanted[row // 2])
        # Its mirror image has the same caption.
        torch.testing.assert_close(text[:length].float(), wanted[row // 2], rtol=close, atol=close)
        assert not text[length:].any()
    assert found["text_length"].dtype == torch.int64
    assert {k: (v.dtype, tuple(v.shape)) for k, v in source[5].items()} == {
        k: (field.dtype, field.shape) for k, field in source.fields.items()
    }


def test_each_caption_is_stored_once_without_padding_after_the_empty_one(root, copied):
    encoder = load(root)
    add_text(copied, encoder)
    text = read_json(copied)["text"]
    captions = captions_of(copied)
    assert (text["captions"], len(set(captions))) == (12, 11)
    (file,) = text["files"]
    from safetensors.torch import load_file

    stored = load_file(copied / file["file"])
    lengths = [len(ids) for ids in encoder.tokenize(["", *dict.fromkeys(captions)])[0]]
    assert stored["ends"].tolist() == torch.tensor(lengths).cumsum(0).tolist()
    assert stored["embeddings"].shape == (sum(lengths), 32)
    assert len(stored["ids"]) == sum(lengths)
    assert text["tokens"] == max(lengths)
    facts = LatentShards(copied).facts.text
    torch.testing.assert_close(facts.null_embedding, encoder.encode([""])[0])
    assert (facts.kind, facts.layer, facts.template) == ("T5EncoderModel", 2, "{}")
    encoder.check_fits(facts, "--text-encoder")


def test_old_facts_keep_their_bytes_and_new_ones_return_from_json(root, copied):
    before = LatentShards(copied).facts
    assert before.text is None
    assert "text" not in before.as_json()
    assert LatentFacts.from_json(before.as_json()) == before
    add_text(copied, load(root))
    after = LatentShards(copied).facts
    assert LatentFacts.from_json(json.loads(json.dumps(after.as_json()))) == after
    assert after.digest == before.digest
    assert after.text_digest
    assert set(LatentShards(copied).fields) == {"latent", "label", "text", "text_length"}


def test_stopped_and_resumed_the_files_are_the_same(root, copied, tmp_path, monkeypatch):
    small_files(monkeypatch)
    shutil.copytree(copied, tmp_path / "other" / "set")
    encoder = load(root)
    add_text(copied, encoder)
    stopped = tmp_path / "other" / "set"
    first = add_text(stopped, encoder, most=2)
    assert "text" not in read_json(stopped), "whole or not at all"
    assert LatentShards(stopped).facts.text is None
    assert add_text(stopped, encoder) == first[2:]
    assert files_in(stopped) == files_in(copied)
    assert not [path for path in copied.iterdir() if path.name == "text.json"]
    assert add_text(stopped, encoder) is None


def test_files_of_another_text_are_written_anew(root, copied, tmp_path, monkeypatch):
    small_files(monkeypatch)
    shutil.copytree(copied, tmp_path / "other" / "set")
    add_text(tmp_path / "other" / "set", load(root))
    add_text(copied, load(root, layers=(1,)), most=2)
    add_text(copied, load(root))
    assert files_in(copied) == files_in(tmp_path / "other" / "set")


def test_a_source_with_text_pickles_and_its_samples_load(root, copied):
    add_text(copied, load(root), dtype="bfloat16")
    source = pickle.loads(pickle.dumps(LatentShards(copied)))
    batch = load_samples(source, [(7, 3), (8, 20)], lambda _: None, CPU, 2.0)
    wanted = source.read([3, 20])
    assert all(torch.equal(batch.fields[name], wanted[name]) for name in wanted)


def test_of_a_list_of_captions_the_sample_number_draws_one(root, copied):
    file = copied / "captions.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[2]["text"] = ["a cat", "a dog of red", "owl"]
    data = "".join(json.dumps(line) + "\n" for line in lines)
    file.write_text(data)
    manifest = read_json(copied)
    manifest["captions"]["sha256"] = text_job.hashlib.sha256(data.encode()).hexdigest()
    (copied / "manifest.json").write_text(json.dumps(manifest))
    encoder = load(root)
    add_text(copied, encoder)
    source = LatentShards(copied)
    wanted = encoder.encode(lines[2]["text"])
    numbers = list(range(300))
    drawn = source.read_numbered([4] * 300, numbers)["text_length"].tolist()
    counts = [drawn.count(len(one)) for one in wanted]
    assert sum(counts) == 300
    assert min(counts) > 60
    again = source.read_numbered([4, 5], [numbers[9], numbers[200]])["text_length"].tolist()
    assert again == [drawn[9], drawn[200]]
    assert len(source.read_numbered([8] * 4, numbers[:4])["text_length"].unique()) == 1
    # Texts and fields alone are those of the rows that `read` gives.
    rows = [5, 4, 23, 0, 4]
    alone, whole = source.read_fields(["text", "text_length"], rows), source.read(rows)
    for row, text in enumerate(source.captions(rows)):
        assert torch.equal(alone["text"][row], whole["text"][row])
        (one,) = encoder.encode([text])
        torch.testing.assert_close(alone["text"][row, : len(one)], one, rtol=1e-5, atol=1e-5)
    assert source.read_fields(["label"], [3, 1])["label"].tolist() == source.labels[[3, 1]].tolist()
    assert source.facts.text_source == encoder.source
    file.write_text(data[: len(data) // 2].rpartition("\n")[0])
    with pytest.raises(UserError, match=r"captions\.jsonl: holds other captions than .*Restore it"):
        source.captions([23])


def test_a_value_outside_the_range_is_refused_by_its_caption(root, copied):
    encoder = load(root)
    with torch.no_grad():
        encoder.module.encoder.final_layer_norm.weight.fill_(1e5)
    said = refused(lambda: add_text(copied, encoder, dtype="float16"))
    assert 'the embedding of the caption "' in said
    assert "outside of float16. Choose --text-dtype bfloat16 or float32." in said
    assert "text" not in read_json(copied)
    assert not (copied / "text-00000.safetensors").exists()
    with torch.no_grad():
        encoder.module.encoder.final_layer_norm.weight.fill_(float("nan"))
    assert "that are not finite" in refused(lambda: add_text(copied, encoder, dtype="float32"))


def test_another_encoder_layer_template_or_dtype_than_the_stored_is_refused(root, copied):
    add_text(copied, load(root))
    for encoder in (load(root, "qwen"), load(root, layers=(0,)), load(root, template="a {}")):
        said = refused(lambda e=encoder: add_text(copied, e))
        assert "but the embeddings of captions were made by T5EncoderModel" in said
    assert "--text-dtype float16" in refused(lambda: add_text(copied, load(root), dtype="float16"))


def test_damaged_files_are_refused_by_name(root, copied):
    add_text(copied, load(root))
    index, file = copied / "text-index.safetensors", copied / "text-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    LatentShards(copied)
    said = refused(lambda: LatentShards(copied, verify=True))
    assert f"{file}: its SHA-256 differs from the manifest's" in said
    file.write_bytes(data[:-8])
    assert "bytes, but the manifest says" in refused(lambda: LatentShards(copied))
    index.unlink()
    file.write_bytes(data)
    said = refused(lambda: LatentShards(copied))
    assert f"{index}: the embeddings of captions are missing" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"width": 31}, "do not hold 12 captions of width 31"),
        ({"dtype": "float16"}, "but the manifest says float16"),
        ({"captions": 3}, "captions=3, but its files hold 12"),
        ({"tokens": 2}, "but the manifest says at most 2 each"),
        ({"tokens": 10**14}, "tokens=100000000000000 must be at most 10000"),
        ({"files": 3}, "files must be a list"),
        ({"layer": None}, "layer"),
        ({"index": {"file": "../x", "bytes": 1, "sha256": ""}}, "is not the name of a file"),
    ],
)
def test_a_manifest_that_does_not_fit_its_text_is_refused(root, copied, change, said):
    add_text(copied, load(root))
    manifest = read_json(copied)
    manifest["text"] |= change
    (copied / "manifest.json").write_text(json.dumps(manifest))
    if change == {"tokens": 2}:
        assert said in refused(lambda: LatentShards(copied).read([6]))
    else:
        assert said in refused(lambda: LatentShards(copied))


def test_an_index_that_names_no_caption_is_refused(root, copied):
    add_text(copied, load(root))
    source = LatentShards(copied)
    source._text._numbers = source._text._numbers + 12
    assert "names a caption outside of the 12" in refused(lambda: source.read([0]))


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("pictures", [1, 1, 2]),
        ("pictures", [10**12, 2, 3]),
        ("captions", [1, -2, 2, 6]),
        ("captions", [1, 2**62, 2**62 + 2, 6]),
    ],
)
def test_ends_out_of_order_are_refused(root, copied, name, ends):
    add_text(copied, load(root))
    text = LatentShards(copied)._text
    if name == "pictures":
        text._ends = np.array(ends)
        said = refused(lambda: text.read(np.arange(3), range(3)))
        assert "text-index.safetensors: its ends do not give every picture a caption" in said
    else:
        text._files = [text._files[0]._replace(ends=np.array(ends))]
        text.file_ends = np.array([len(ends)])
        for caption in (1, 2):
            said = refused(lambda c=caption: text.of_captions(np.array([c])))
            assert "but the manifest says at most" in said
            assert "text-00000.safetensors: caption" in said


def flags(root, output, **how):
    how = {"image_size": 8, "batch_size": 4, "shard_size": 3, "text_encoder": root / "t5"} | how
    words = {"input": root / "in", "out": output, "vae": root / "vae"} | how
    return [
        word
        for name, value in words.items()
        if value is not None
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]


def encode(root, output, **how):
    command = [sys.executable, "-m", "titan_dit", "data", "encode", *flags(root, output, **how)]
    return run(command, root, NGPU=2)


def test_data_encode_stores_pictures_and_captions(root, tmp_path):
    found = encode(
        root, tmp_path / "set", text_layer=-2, text_template="a {} of red", text_tokens=6
    )
    assert found.returncode == 0, found.stderr
    said = found.stdout + found.stderr
    assert "captions and the empty one: 70 tokens, whose embeddings take 4.5kB (4,480 b" in said
    facts = LatentShards(tmp_path / "set", verify=True).facts.text
    assert (facts.layer, facts.template, facts.tokens) == (1, "a {} of red", 6)
    again = encode(
        root, tmp_path / "set", text_layer=-2, text_template="a {} of red", text_tokens=6
    )
    assert f"the captions of {tmp_path / 'set'} are already encoded" in again.stdout
    # A shard that is lost is written again; the text stays.
    shard, *_ = [p for p in (tmp_path / "set").glob("*.safetensors") if p.name[:4] != "text"]
    shard.write_bytes(b"")
    manifest = read_json(tmp_path / "set")
    found = encode(root, tmp_path / "set", text_encoder=None)
    assert found.returncode == 0, found.stderr
    assert read_json(tmp_path / "set") == manifest
    for how in ({}, {"text_encoder": None}):
        other = encode(root, tmp_path / "set", **how)
        # Without the flags of the text the pictures alone are compared.
        assert other.returncode == (2 if not how else 0), other.stderr
        said = "but the embeddings of captions were made by" if not how else "is already encoded"
        assert said in other.stdout + other.stderr


def test_bad_flags_are_refused_before_a_picture_is_encoded(root, tmp_path):
    wrong = DataEncodeFlags(input="x", out="y", vae="z", image_size=8, text_layer="1")
    said = refused(wrong.check_text)
    assert said == "[data encode] --text-layer without --text-encoder. Give both, or none."
    found = encode(root, tmp_path / "set", text_layer="7")
    assert found.returncode == 2
    assert "--text-layer 7: " in found.stderr
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize(
    ("texts", "may_lack", "said"),
    [
        ([], False, "the pictures have no captions"),
        (["", " "], True, "the pictures have no captions"),
        (["a", " "], False, "1 of 2 pictures have no caption, such as 2.png. Add it, or choose"),
        (["a", ""], True, None),
        (["a", "b"], False, None),
        (["a", ("b", "c")], False, None),
        (["a", ("", " ")], False, "1 of 2 pictures have no caption, such as 2.png."),
    ],
)
def test_missing_captions_are_refused_unless_they_may_be_empty(texts, may_lack, said):
    def check():
        text_job.check_captions(texts, ["1.png", "2.png"], may_lack)

    if said is None:
        check()
    else:
        assert said in refused(check)


def test_a_folder_whose_shards_would_have_the_same_names_is_refused(tmp_path):
    said = refused(lambda: text_job.check_name(tmp_path / "text"))
    assert said.endswith("text-00000.safetensors. Choose another --out.")
