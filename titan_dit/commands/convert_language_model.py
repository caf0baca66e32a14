"""The part of `convert` for language models: folders of transformers to a checkpoint, and back."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from titan_dit.checkpoint import checkpoint
from titan_dit.checkpoint.store import Location
from titan_dit.config import catalog, config_file
from titan_dit.config.section import UserError
from titan_dit.data.token_facts import TokenFacts
from titan_dit.interop import hf_directory, hugging_face, imported
from titan_dit.models.base import ModelConfig
from titan_dit.observe import console
from titan_dit.trained_model import TrainedModel

TOKENIZER = "tokenizer"
"""Folder of the tokenizer's files in an imported checkpoint."""


def read_directory(source: Path, target: Path) -> None:
    """Import a folder of transformers as a checkpoint."""
    try:
        config = hf_directory.read_config(source)
        family = hugging_face.family_of(config["architectures"][0])
        tables = family.tables(config)
        built = config_file.build_sections(tables, catalog.variant)
        model, objective = built["model"], built["objective"]
        tensors = hf_directory.read_weights(source)
        ours = hugging_face.to_ours(family, model, objective, tensors)
    except UserError as error:
        raise UserError(f"--from {source}: {error}") from None
    facts, _ = objective.example(model)
    if isinstance(facts, TokenFacts) and isinstance(end := config.get("eos_token_id"), int):
        facts = replace(facts, end_of_document=end)
    # A checkpoint needs the section; the data of imported weights are unknown.
    sizes = {key: getattr(model, key) for key in ("sequence_length", "vocabulary")}
    data = {"name": "tokens", "paths": ("unknown",), **sizes}
    record = imported.record_of({**tables, "data": data}, facts)
    files = hf_directory.tokenizer_files(source)
    if "tokenizer.json" in files:
        record["data"]["tokenizer"] = str(target.resolve() / TOKENIZER / "tokenizer.json")
    console.say(f"read    {source}: {config['architectures'][0]}, {described(model, ours)}")
    if wide := {str(t.dtype)[6:] for t in tensors.values() if t.is_floating_point()} - {"float32"}:
        console.say(f"        {', '.join(sorted(wide))} converted to float32")
    imported.save(target, {"model": ours, "ema": {imported.EMA_DECAY: ours}}, record)
    for name, file in files.items():
        (target / TOKENIZER).mkdir(exist_ok=True)
        shutil.copyfile(file, target / TOKENIZER / name)
    say_tokenizer(files)
    console.say(f"wrote   {target}. Train from it with --checkpoint.resume {target}")


def write_directory(source: Location, target: Path, run: TrainedModel) -> None:
    """Export a checkpoint of a language model as a folder of transformers."""
    if target.suffix in (".pt", ".pth", ".safetensors", ".bin"):
        raise UserError(f"--to {target}: model {run.model_config.name} is written as a folder.")
    record = checkpoint.read_record(run.path)
    objective = config_file.build_sections(
        config_file.of_record(record), catalog.variant, ("objective",)
    )["objective"]
    try:
        family = hugging_face.family_for(run.model_config)
        config = family.config(run.model_config, objective)
    except UserError as error:
        raise UserError(f"--from {source}: {error}") from None
    end = record["data"].get("end_of_document")
    ours = {name: p.detach() for name, p in run.network.named_parameters()}
    theirs = hugging_face.to_theirs(family, run.model_config, ours)
    files = tokenizer_of(run.path, record["data"])
    config |= {"bos_token_id": end, "eos_token_id": end, "dtype": "float32"}
    hf_directory.write(target, config, theirs, files)
    console.say(f"read    {run.path}, step {run.step} ({run.weights})")
    what = described(run.model_config, ours)
    console.say(f"wrote   {target}: {config['architectures'][0]}, {what}")
    say_tokenizer(files)


def tokenizer_of(path: Location, facts: Mapping[str, Any]) -> dict[str, Path]:
    """The tokenizer's files: of imported weights beside them, of a run where its data name them."""
    if isinstance(path, Path) and (files := hf_directory.tokenizer_files(path / TOKENIZER)):
        return files
    named = Path(facts.get("tokenizer") or "")
    if named.name == "tokenizer.json" and named.is_file():
        return hf_directory.tokenizer_files(named.parent)
    # The files beside one of another name may be another tokenizer's.
    return {"tokenizer.json": named} if named.is_file() else {}


def say_tokenizer(files: Mapping[str, Path]) -> None:
    """Tell which files were copied."""
    if files:
        console.say(f"        with its tokenizer: {', '.join(files)}")


def described(model: ModelConfig, ours: Mapping[str, Tensor]) -> str:
    """Describe a network in one line."""
    keys = ("hidden", "layers", "heads", "vocabulary", "sequence_length")
    count = sum(tensor.numel() for tensor in ours.values())
    return ", ".join(f"{key} {getattr(model, key)}" for key in keys) + f"; {count:,} parameters"
