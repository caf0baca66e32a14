"""`convert` of adapters of LoRA: a folder of peft from a run, and back on top of a base."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from titan_dit.checkpoint.record import read_record
from titan_dit.checkpoint.run_path import find_checkpoint
from titan_dit.checkpoint.store import location
from titan_dit.commands.flags.convert import Options
from titan_dit.config.section import UserError, show
from titan_dit.config.training import LoRAConfig
from titan_dit.interop import diffusers_dit, imported, peft, tensor_writer, weight_file
from titan_dit.interop.diffusers_dit import DiffusersDiT
from titan_dit.interop.new_output import new_output
from titan_dit.interop.on_demand import OnDemand
from titan_dit.interop.write_progress import writing
from titan_dit.models import lora
from titan_dit.models.dit import DiTConfig
from titan_dit.observe import console
from titan_dit.recovery.initial_weights import names_in
from titan_dit.trained_model import SavedWeights, open_weights


def counterpart(run: SavedWeights, where: str) -> DiffusersDiT:
    """The network in diffusers; UserError unless it is a DiT."""
    config = run.model_config
    if type(config) is not DiTConfig:
        raise UserError(f"{where} is a {config.name} model: peft's names are known for a DiT only.")
    path = run.diffusion("convert").path
    return DiffusersDiT(config, path.output_channels(config.channels))


def write_run(source: str, target: Path, run: SavedWeights, as_is: bool) -> None:
    """Export the adapters of a run alone."""
    if target.suffix in weight_file.SUFFIXES:
        raise UserError(f"--to {target}: peft's format is a folder. Name one, such as adapter.")
    found = counterpart(run, f"--from {source}")
    assert isinstance(run.model_config, DiTConfig)
    diffusers_dit.check_expressible(run.model_config, as_is)
    saved, given = run.saved, run.record["config"].get("lora", {})
    if not saved.adapters:
        raise UserError(f"--from {source} was not trained with [lora]: it has no adapters.")
    if trained := given["trained"]:
        raise UserError(
            f"[lora] trained={show(tuple(trained))}: these parameters belong to no adapter. Export "
            "the whole network, without --format peft."
        )
    base = run.record["config"]["checkpoint"]
    check_base(source, run, base)
    pairs = {
        name: (saved.whole(saved.adapters[name][0]), saved.whole(saved.adapters[name][1]))
        for name in found.layouts()
        if name in saved.adapters
    }
    theirs = dict(peft.to_theirs(found, pairs))
    rank = given["rank"]
    config = peft.config_json(theirs, rank, saved.scale * rank, base.get("init", ""))
    with writing(target, theirs.values()), new_output(target) as place:
        place.mkdir()
        (place / peft.CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        tensor_writer.write(place, peft.WEIGHTS, theirs, theirs.items())
    console.say(f"wrote   {target}: adapters of {len(config['target_modules'])} layers for peft")
    console.say(f"        from {run.path}, step {run.step} ({run.weights})")
    if base.get("init"):
        kind = base.get("init_weights", "ema")
        console.say(f"        They belong to the weights of {base['init']} ({kind}).")


def check_base(source: str, run: SavedWeights, given: Mapping[str, Any]) -> None:
    """Refuse adapters of a run whose other weights are not those of `given`, its [checkpoint]."""
    whole = "Export the whole network, without --format peft."
    if changed := given.get("reinitialize"):
        raise UserError(
            f"--from {source} began with [checkpoint] reinitialize={show(tuple(changed))}: its "
            f"adapters fit no other weights. {whole}"
        )
    if not given.get("init"):
        return
    try:
        base = read_record(find_checkpoint(location(given["init"]), None, "--from"))
    except UserError:
        console.say(f"not checked: the classes of {given['init']}, where the run began; not found")
        return
    before, now = (names_in(record["data"]) for record in (base, run.record))
    if before and now and before != now:
        raise UserError(
            f"--from {source} has other classes than {given['init']}, where it began: its adapters "
            f"do not fit that table of classes. {whole}"
        )


def read_directory(source: Path, target: Path, options: Options) -> None:
    """Write a checkpoint of a base's weights with the adapters of a folder."""
    base = options.base
    if not base:
        raise UserError(f"--from {source} is an adapter. Name the run of its weights with --base.")
    path = find_checkpoint(location(base), options.step, "--base")
    run = open_weights(path, options.weights or "ema", options.decay, options.trust)
    network = counterpart(run, f"--base {base}")
    ends = f".{lora.A}"
    try:
        adapters = peft.read(source, network)
        layers = tuple(n.removesuffix(ends) for n in adapters.tensors if n.endswith(ends))
        given = LoRAConfig(rank=adapters.rank, alpha=adapters.alpha, targets=layers)
    except UserError as error:
        raise UserError(f"--from {source}: {error}") from None
    table = asdict(given) | {"targets": list(given.targets), "trained": []}
    origin = {"init": base, "init_weights": options.weights or "ema", "reinitialize": []}
    start = run.record["config"]["checkpoint"] | origin | {"resume": "auto"}
    record = imported.record_made_of(run.record, lora=table, checkpoint=start)
    imported.save(target, {"model": with_adapters(run, adapters.tensors)}, record)
    console.say(
        f"wrote   {target}: {run.path} ({run.weights}) with adapters of rank {adapters.rank}, "
        f"alpha {adapters.alpha}, of {len(layers)} layers. Draw from it: sample --run {target}"
    )
    for line in warnings(base, run):
        console.say(f"warning: --base {base} {line}")


def warnings(base: str, run: SavedWeights) -> Iterator[str]:
    """Why adapters of diffusers' DiT may not belong to a base."""
    if run.saved.adapters:
        began = run.record["config"]["checkpoint"].get("init")
        hint = f" For those of the run itself, name where it began: --base {began}" if began else ""
        yield f"has adapters, to which these were added.{hint}"
    assert isinstance(run.model_config, DiTConfig)
    if run.model_config.timestep_frequencies == "dit":
        yield (
            'has [model] timestep_frequencies="dit". diffusers has others: adapters that were '
            "trained there are less exact here"
        )


def with_adapters(run: SavedWeights, adapters: Mapping[str, Tensor]) -> OnDemand:
    """The weights of a run and adapters."""
    weights = run.tensors

    def get(name: str) -> Tensor:
        return adapters[name] if name in adapters else weights[name]

    return OnDemand({**weights.outline, **adapters}, get)
