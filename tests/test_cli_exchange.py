"""Folders of transformers: import, predict, train, export, by command line."""

import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import commands
import pytest
import torch
from commands import metrics, train
from refusals import refused
from safetensors.torch import load_file, save_file

from titan_dit.checkpoint.record import read_record
from titan_dit.checkpoint.run_checkpoints import find_checkpoint
from titan_dit.commands import convert, predict
from titan_dit.config import catalog, config_file
from titan_dit.config.section import UserError
from titan_dit.data.token_windows import TokenFacts
from titan_dit.interop import hugging_face, imported
from titan_dit.models.gpt_config import GPTConfig

FIXTURES = Path(__file__).resolve().parent / "fixtures" / "hugging_face"
NUMBERS = load_file(FIXTURES / "gpt2" / "numbers.safetensors")
WEIGHTS = load_file(FIXTURES / "gpt2" / "model.safetensors")
DATA = """
from dataclasses import dataclass

import torch

from titan_dit.data.base import DataConfig, Source
from titan_dit.data.token_windows import TokenFacts


@dataclass(frozen=True, kw_only=True)
class Random(DataConfig):
    name = "windows:Random"

    def open(self):
        return Windows()


class Windows(Source):
    facts = TokenFacts(count=8, sequence_length=12, vocabulary=61)
    fields = facts.fields

    def __getitem__(self, index):
        return {"tokens": torch.arange(index, index + 13)}
"""


@pytest.fixture(scope="module")
def cwd(tmp_path_factory):
    """A folder of transformers with a tokenizer: `gpt2`; imported by command: `ours`."""
    folder = tmp_path_factory.mktemp("exchange")
    shutil.copytree(FIXTURES / "gpt2", folder / "gpt2")
    (folder / "gpt2" / "tokenizer.json").write_text("{}")
    (folder / "gpt2" / "notes.txt").write_text("not a tokenizer's")
    command = [sys.executable, "-m", "titan_dit", "convert", "--input", "gpt2", "--out", "ours"]
    done = commands.run(command, folder)
    assert done.returncode == 0, done.stderr
    sizes = "hidden_size 16, num_layers 2, num_heads 2, vocab_size 61"
    assert f"GPT2LMHeadModel, {sizes}" in done.stdout
    assert "with its tokenizer: tokenizer.json" in done.stdout
    return folder


def converted(source, target):
    convert.main(convert.ConvertFlags(input=str(source), out=str(target)))
    return target


def predicted(cwd, checkpoint, **inputs):
    source, target = cwd / "in.safetensors", cwd / "out.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in inputs.items()}, source)
    predict.main(
        predict.PredictFlags(run=str(checkpoint), input=str(source), out=str(target), batch_size=2)
    )
    return load_file(target)["out"]


def close(found, expected):
    return (found - expected).abs().max() < 1e-5 * expected.abs().max()


def test_logits_are_those_of_transformers_for_few_tokens_too(cwd):
    for n in (12, 5):
        found = predicted(cwd, cwd / "ours", tokens=NUMBERS["tokens"][:, :n])
        assert found.dtype == torch.float32
        assert close(found, NUMBERS["logits"][:, :n])


@pytest.mark.parametrize("folder", ["bert_masked", "bert_pretraining", "megatron_bert"])
def test_logits_of_a_bert_are_those_of_transformers(folder, cwd):
    ours = converted(FIXTURES / folder, cwd / folder)
    numbers = load_file(FIXTURES / folder / "numbers.safetensors")
    names = ("tokens", "types", *(["lengths"] if "order" in numbers else []))
    found = predicted(cwd, ours, **{name: numbers[name] for name in names})
    assert close(found, numbers["logits"])
    back = converted(ours, cwd / f"{folder}_back")
    same_bits(back, FIXTURES / folder)


def same_bits(folder, other):
    found, expected = (load_file(path / "model.safetensors") for path in (folder, other))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_every_bit_comes_back_with_config_and_tokenizer(cwd):
    back = converted(cwd / "ours", cwd / "back")
    same_bits(back, cwd / "gpt2")
    assert {file.name for file in back.iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json",
    }  # fmt: skip
    config, before = (hugging_face.read_config(path) for path in (back, cwd / "gpt2"))
    assert {key: before[key] for key in config} == config
    with pytest.raises(UserError, match="exists"):
        converted(cwd / "ours", back)


def test_shards_are_read_and_written(cwd, monkeypatch):
    monkeypatch.setattr(hugging_face, "LARGEST_SHARD", 9000)
    folder = converted(cwd / "ours", cwd / "sharded")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert {
        f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)
    } == files
    assert len(files) > 2
    assert index["metadata"]["total_size"] == 4 * sum(t.numel() for t in WEIGHTS.values())
    monkeypatch.undo()
    same_bits(converted(converted(folder, cwd / "whole"), cwd / "whole_back"), cwd / "gpt2")
    (folder / "model-00002-of-00004.safetensors").unlink(missing_ok=True)
    (folder / min(files)).unlink()
    with pytest.raises(UserError, match="which is missing"):
        converted(folder, cwd / "new")


def test_flags_of_pictures_are_none_of_a_language_models_export(cwd):
    for flag in ({"vae": "."}, {"as_is": True}, {"format": "sit"}):
        name = next(iter(flag)).replace("_", "-")
        with pytest.raises(UserError, match=f"--{name} is not a flag of the export of a gpt model"):
            convert.main(convert.ConvertFlags(input=str(cwd / "ours"), out=str(cwd / "no"), **flag))
    assert not (cwd / "no").exists()


def folder_of(cwd, name, weights=None, file="model.safetensors", **config):
    """A folder with some of the fixture's settings changed."""
    folder = cwd / name
    folder.mkdir()
    whole = json.loads((FIXTURES / "gpt2" / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(whole))
    if file.endswith(".bin"):
        torch.save(weights, folder / file)
    else:
        save_file(WEIGHTS if weights is None else weights, folder / file)
    return folder


def test_files_as_published_long_ago_are_read(cwd):
    """Without the prefix, with masks, with a copy of the tied table, pickled, in half precision."""
    old = {name.removeprefix("transformer."): tensor for name, tensor in WEIGHTS.items()}
    old["lm_head.weight"] = old["wte.weight"]
    old |= {f"h.{i}.attn.bias": torch.ones(1, 1, 12, 12) for i in range(2)}
    folder = folder_of(cwd, "old", old, "pytorch_model.bin")
    same_bits(converted(converted(folder, cwd / "old_ours"), cwd / "old_back"), cwd / "gpt2")
    halves = {name: tensor.half() for name, tensor in WEIGHTS.items()}
    back = converted(converted(folder_of(cwd, "half", halves), cwd / "h"), cwd / "half_back")
    found = load_file(back / "model.safetensors")["transformer.wte.weight"]
    assert torch.equal(found, halves["transformer.wte.weight"].float())


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


WITHOUT = {k: v for k, v in WEIGHTS.items() if k != "transformer.ln_f.bias"}
TABLE, QKV = "transformer.wte.weight", "transformer.h.0.attn.c_attn.weight"
BAD = {
    "missing": ({"weights": WITHOUT}, "transformer.ln_f.bias is missing"),
    "unexpected": ({"weights": WEIGHTS | {"new": torch.ones(1)}}, "new is unexpected"),
    "transposed": ({"weights": WEIGHTS | {QKV: WEIGHTS[QKV].t().contiguous()}}, "not [16, 48]"),
    "NaN": ({"weights": WEIGHTS | {TABLE: WEIGHTS[TABLE] * torch.nan}}, "NaN or infinity"),
    "layers": ({"n_layer": 3}, "transformer.h.2.ln_1.weight is missing"),
    "heads": ({"n_head": 3}, "hidden_size=16 is not divisible by num_heads=3"),
    "untied": ({"weights": WEIGHTS | {"lm_head.weight": WEIGHTS[TABLE] + 1}}, "differs from"),
    "architecture": ({"architectures": ["LlamaForCausalLM"]}, "is not one of GPT2LMHeadModel"),
    "no architecture": ({"architectures": None}, "names no architecture"),
    "activation": ({"activation_function": "relu"}, "activation_function='relu'"),
    "no size": ({"n_embd": None}, "config.json has no n_embd"),
    "code": ({"weights": Evil(), "file": "pytorch_model.bin"}, "it imports posix.mkdir"),
    "no weights": ({"file": "other.safetensors"}, "it holds neither model.safetensors nor"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_imported_is_one_line_and_leaves_nothing(case, cwd, monkeypatch):
    monkeypatch.chdir(cwd)
    changes, words = BAD[case]
    folder = folder_of(cwd, f"bad_{case.replace(' ', '_')}", **changes)
    with pytest.raises(UserError) as caught:
        converted(folder, cwd / "new")
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"--input {folder}: ")
    assert "\n" not in str(caught.value)
    assert not list(cwd.glob("new*"))
    assert not (cwd / "executed").exists()
    assert pickle.dumps(Evil())


BAD_TOKENS = {
    "id": ({"tokens": torch.tensor([[61]])}, "tokens must be integers from 0 to 60"),
    "long": ({"tokens": torch.zeros(1, 13, dtype=torch.int64)}, "n up to 12"),
    "float": ({"tokens": torch.zeros(1, 2)}, "must be integers"),
    "other": ({"tokens": torch.zeros(1, 2).long(), "x": torch.ones(1)}, "takes no x, only tokens"),
    "none": ({"x": torch.ones(1)}, "tokens missing"),
}


@pytest.mark.parametrize("case", BAD_TOKENS)
def test_inputs_that_do_not_fit_are_refused(case, cwd):
    inputs, words = BAD_TOKENS[case]
    with pytest.raises(UserError) as caught:
        predicted(cwd, cwd / "ours", **inputs)
    assert words in str(caught.value)


def test_a_gpt_that_is_no_gpt2_predicts_and_is_not_exported(cwd):
    sizes = {
        "hidden_size": 16,
        "num_layers": 1,
        "num_heads": 4,
        "vocab_size": 61,
        "sequence_length": 12,
    }
    newer = {
        "position_embedding_type": "rotary",
        "norm": "rmsnorm",
        "mlp": "swiglu",
        "num_key_value_heads": 2,
    }
    config = GPTConfig(**sizes, **newer)
    weights = {name: p.detach() for name, p in config.build().named_parameters()}
    data = {"name": "tokens", "paths": (), "sequence_length": 12, "vocab_size": 61}
    model = {"name": "gpt", **sizes, **newer}
    tables = {"model": model, "objective": {"name": "next_token"}, "data": data}
    facts = TokenFacts(count=0, sequence_length=12, vocabulary=61)
    whole = {"model": weights, "ema": {imported.EMA_DECAY: weights}}
    imported.save(cwd / "llama", whole, imported.record_of(tables, facts))
    tokens = NUMBERS["tokens"]
    found = [predicted(cwd, cwd / "llama", tokens=tokens[:, :n]) for n in (12, 5)]
    assert close(found[1], found[0][:, :5])
    with pytest.raises(UserError, match='_type="rotary": GPT2LMHeadModel has only'):
        converted(cwd / "llama", cwd / "llama_back")
    assert not (cwd / "llama_back").exists()


def test_the_tokenizer_of_a_run_is_exported_alone_unless_its_name_is_that_of_transformers(tmp_path):
    for name in ("tokenizer.json", "vocab.json", "of_bert.json"):
        (tmp_path / name).write_text('{"model": {"vocab": {"a": 0}}}')
    (tmp_path / "id_rsa").write_text("a file that a record names, but no tokenizer")
    exported = {
        name: convert.tokenizer_of(tmp_path, {"tokenizer": str(tmp_path / name)})
        for name in ("tokenizer.json", "of_bert.json", "gone.json", "id_rsa")
    }
    beside = {name: tmp_path / name for name in ("tokenizer.json", "vocab.json")}
    assert exported["tokenizer.json"] == beside
    assert exported["of_bert.json"] == {"tokenizer.json": tmp_path / "of_bert.json"}
    assert exported["gone.json"] == exported["id_rsa"] == {}


def test_ids_of_special_tokens_are_those_of_the_tokenizer(tmp_path, cwd):
    folder = tmp_path / "bert"
    shutil.copytree(FIXTURES / "bert_masked", folder)
    ids = {"[UNK]": 1, "[PAD]": 5, "[SEP]": 7, "[MASK]": 9}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": ids}}))
    ours = converted(folder, tmp_path / "ours")
    sections = config_file.build_sections(read_record(ours)["config"], catalog.variant)
    assert sections["objective"].mask_id == 9
    assert sections["data"].tokenizer == str(ours / "tokenizer" / "tokenizer.json")
    back = hugging_face.read_config(converted(ours, tmp_path / "back"))
    assert back["pad_token_id"] == 5
    files, special = hugging_face.tokenizer_files(folder), convert.special_ids
    assert special(files, {}, 61) == {"end_of_document": 7, "pad": 5}
    assert special(files, {"end_of_document": 3, "pad": 0}, 61) == {"end_of_document": 3, "pad": 5}
    assert special({}, {"end_of_document": 61, "pad": 0}, 61) == {"end_of_document": None, "pad": 0}


def test_imported_weights_ask_for_the_dataset_to_be_scored_on(cwd):
    record = config_file.of_record(read_record(cwd / "ours"))
    data = config_file.build_sections(record, catalog.variant, ("data",))["data"]
    assert "--data.paths PATH" in refused(data.survey)


def test_what_must_be_imported_first_says_so(cwd):
    with pytest.raises(UserError, match=r"convert --input .*gpt2 --out"):
        find_checkpoint(cwd / "gpt2", None)


def test_a_run_starts_from_imported_weights_and_is_exported(cwd):
    (cwd / "windows.py").write_text(DATA)
    sizes = {
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 61,
    }
    flags = (
        *("--model.name", "gpt", "--objective.name", "next_token", "--data.name", "windows:Random"),
        *(word for key, value in sizes.items() for word in (f"--model.{key}", value)),
        *("--model.sequence_length", 12, "--training.steps", 2, "--training.global_batch_size", 4),
        *("--optimizer.lr", 1e-5, "--lr_scheduler.warmup_steps", 0, "--sampling.every", 0),
        *("--metrics.every", 1, "--metrics.tensorboard", "false", "--validation.every", 0),
        *("--model.dropout", 0.1, "--model.init_std", 0.01),  # Of the training, not of the weights.
        *("--checkpoint.resume", "ours", "--job.name", "tuned"),
    )
    done = train(*flags, cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in metrics(cwd / "outputs" / "tuned")] == [1, 2]
    options = convert.ConvertFlags(
        input=str(cwd / "outputs" / "tuned"), out=str(cwd / "tuned"), weights="model"
    )
    convert.main(options)
    tuned = load_file(cwd / "tuned" / "model.safetensors")
    assert tuned.keys() == WEIGHTS.keys()
    moved = max((tuned[name] - WEIGHTS[name]).abs().max() for name in WEIGHTS)
    assert 0 < moved < 1e-3
