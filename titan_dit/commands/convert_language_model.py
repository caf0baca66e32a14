"""The part of `convert` for language models: folders of transformers to a checkpoint, and back."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from titan_dit.checkpoint.store import Location
from titan_dit.config import catalog, config_file
from titan_dit.config.section import UserError, hints_of
from titan_dit.data.pair_facts import PairFacts
from titan_dit.data.tokenizer_file import TokenizerFile, read_tokenizer
from titan_dit.interop import hf_directory, hugging_face, imported, tensor_layouts
from titan_dit.interop.new_output import new_output
from titan_dit.interop.on_demand import dtypes, numel
from titan_dit.interop.write_progress import writing
from titan_dit.models.base import ModelConfig
from titan_dit.observe import console
from titan_dit.trained_model import SavedWeights

FILE = "tokenizer.json"
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
    files = hf_directory.tokenizer_files(source)
    named = str(target.resolve() / TOKENIZER / FILE) if FILE in files else ""
    facts, _ = objective.example(model)
    given = {ours: config.get(theirs) for theirs, ours in family.special.items()}
    own = {f.name for f in fields(facts)}
    ids = {k: v for k, v in given.items() if k in own and type(v) is int and v < model.vocabulary}
    facts = replace(facts, tokenizer=named, **ids)
    # A checkpoint needs the section; the dataset of imported weights is unknown.
    sizes = {key: getattr(model, key) for key in ("sequence_length", "vocabulary")}
    name = "sentence_pairs" if isinstance(facts, PairFacts) else "tokens"
    data = {"name": name, "paths": (), "tokenizer": named, **sizes}
    tokenizer = tokenizer_in(files)
    if tokenizer and "[MASK]" in tokenizer.ids and "mask_id" in hints_of(type(objective)):
        tables["objective"]["mask_id"] = tokenizer.ids["[MASK]"]
    record = imported.record_of({**tables, "data": data}, facts)
    console.say(f"read    {source}: {config['architectures'][0]}, {described(model, ours)}")
    if wide := dtypes(tensors) - {"float32"}:
        console.say(f"        {', '.join(sorted(wide))} converted to float32")
    whole = {"model": ours, "ema": {imported.EMA_DECAY: ours}}
    beside = {f"{TOKENIZER}/{name}": file for name, file in files.items()}
    imported.save(target, whole, record, beside)
    say_tokenizer(files)
    console.say(f"wrote   {target}. Train from it with --checkpoint.resume {target}")


def write_directory(source: Location, target: Path, run: SavedWeights) -> None:
    """Export a checkpoint of a language model as a folder of transformers."""
    record = run.record
    objective = config_file.build_sections(
        config_file.of_record(record), catalog.variant, ("objective",)
    )["objective"]
    try:
        family = hugging_face.family_for(run.model_config)
        config = family.config(run.model_config, objective)
    except UserError as error:
        raise UserError(f"--from {source}: {error}") from None
    if target.suffix in (".pt", ".pth", ".safetensors", ".bin"):
        raise UserError(f"--to {target}: model {run.model_config.name} is written as a folder.")
    ours = run.tensors
    layouts = hugging_face.layouts_of(family, run.model_config, ours.outline)
    outline = dict(tensor_layouts.to_theirs(layouts, ours.outline))
    files = tokenizer_of(run.path, record["data"])
    known = special_ids(files, record["data"], config["vocab_size"])
    config |= {theirs: known[ours] for theirs, ours in family.special.items()}
    config["dtype"] = "float32"
    with writing(target, outline.values()), new_output(target) as place:
        hf_directory.write(place, config, outline, tensor_layouts.to_theirs(layouts, ours))
        for name, file in files.items():
            shutil.copyfile(file, place / name)
    console.say(f"read    {run.path}, step {run.step} ({run.weights})")
    what = described(run.model_config, ours)
    console.say(f"wrote   {target}: {config['architectures'][0]}, {what}")
    say_tokenizer(files)


def special_ids(
    files: Mapping[str, Path], facts: Mapping[str, Any], vocabulary: int
) -> dict[str, int | None]:
    """Ids of the token that ends a document and of padding; None if unknown.

    The data's own, else the tokenizer's; no id beyond the vocabulary.
    """
    known = {name: facts.get(name) for name in ("end_of_document", "pad")}
    if tokenizer := tokenizer_in(files):
        if known["end_of_document"] is None:
            known["end_of_document"] = tokenizer.end_of_document
        known["pad"] = tokenizer.ids.get("[PAD]", known["pad"])
    return {
        name: number if number is not None and number < vocabulary else None
        for name, number in known.items()
    }


def tokenizer_in(files: Mapping[str, Path]) -> TokenizerFile | None:
    """The tokenizer.json among the files, if it is there and can be read."""
    try:
        return read_tokenizer(files[FILE])
    except (KeyError, UserError):
        return None


def tokenizer_of(path: Location, facts: Mapping[str, Any]) -> dict[str, Path]:
    """The tokenizer's files: of imported weights beside them, of a run where its data name them."""
    if isinstance(path, Path) and (files := hf_directory.tokenizer_files(path / TOKENIZER)):
        return files
    named = Path(facts.get("tokenizer") or "")
    if named.name == FILE and named.is_file():
        return hf_directory.tokenizer_files(named.parent)
    # The files beside one of another name may be another tokenizer's. A record may name any file.
    return {FILE: named} if tokenizer_in({FILE: named}) else {}


def say_tokenizer(files: Mapping[str, Path]) -> None:
    """Tell which files were copied."""
    if files:
        console.say(f"        with its tokenizer: {', '.join(files)}")


def described(model: ModelConfig, ours: Mapping[str, Tensor]) -> str:
    """Describe a network in one line."""
    keys = ("hidden", "layers", "heads", "vocabulary", "sequence_length")
    sizes = ", ".join(f"{key} {getattr(model, key)}" for key in keys)
    return f"{sizes}; {numel(ours):,} parameters"
