"""`python -m titan_dit convert`: convert weights of other projects to a checkpoint, or back.

Folders of diffusers, of transformers and of peft; files of the original DiT and of SiT.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_dit.checkpoint.record import read_record
from titan_dit.checkpoint.run_checkpoints import find_checkpoint
from titan_dit.checkpoint.saved_weights import Error, Weights, rms_of
from titan_dit.checkpoint.store import URL, Location, location
from titan_dit.commands.flags import ConvertFlags
from titan_dit.commands.sample_inputs import boundary_of
from titan_dit.config import catalog, config_file, dotted_names, schema, user_text
from titan_dit.config.parameter_groups import matches
from titan_dit.config.section import UserError, conform, hints_of, show
from titan_dit.config.training import LoRAConfig
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.data.sentence_pairs import PairFacts
from titan_dit.data.tokenizer_file import TokenizerFile, read_tokenizer
from titan_dit.diffusion.objective import Diffusion
from titan_dit.init_from import names_in
from titan_dit.interop import (
    diffusers_network,
    hugging_face,
    imported,
    lora_files,
    original_dit,
    tensor_file,
    tensor_layouts,
)
from titan_dit.interop.diffusers_network import Counterpart, TextToImage
from titan_dit.interop.imported import new_output
from titan_dit.interop.original_dit import Original
from titan_dit.interop.tensor_file import OnDemand, dtypes, numel, writing
from titan_dit.models import lora
from titan_dit.models.base import ModelConfig
from titan_dit.models.dit_config import DiTConfig
from titan_dit.observe import console
from titan_dit.pictures import autoencoder
from titan_dit.pictures.pixels import NO_VAE
from titan_dit.system.files import write_json
from titan_dit.trained_model import SavedNetwork, open_weights


def counterpart(run: SavedNetwork, where: str) -> Counterpart:
    """The network in diffusers. Raises UserError for one that diffusers does not have."""
    config = run.model_config
    kind = diffusers_network.class_for_model(config)
    if kind is None:
        known = ", ".join(map(show, diffusers_network.NETWORKS))
        raise UserError(
            f"{where} is a {config.name} model, but adapters have the names of diffusers, known "
            f"for {known}. Give a run of one of them."
        )
    return kind.of_run(config, run.diffusion("convert").config)


LORA_FORMATS = ("peft", "lora", "kohya", "comfyui")
"""--format of a run's adapters alone."""
FILE_FORMATS = ("kohya", "comfyui")
"""Those that are a file, never a folder."""


def write_adapter(target: Path, run: SavedNetwork, options: ConvertFlags) -> None:
    """Export the adapters of a run alone. Raises UserError for a run without adapters."""
    source, form, is_file = options.input, options.format, target.suffix == ".safetensors"
    check_target(target, form)
    found = counterpart(run, f"--input {source}")
    found.check_expressible(options.as_is)
    saved, given = run.saved, run.record["config"].get("lora", {})
    if not saved.adapters:
        raise UserError(
            f"--input {source} was not trained with [lora]: it has no adapters. Leave out --format "
            f"{form}."
        )
    if trained := given["trained"]:
        raise UserError(
            f"[lora] trained={show(tuple(trained))}: these parameters belong to no adapter. Export "
            f"the whole network, without --format {form}."
        )
    base = run.record["config"]["checkpoint"]
    check_base(source, run, base)
    pairs = {
        name: (saved.whole(saved.adapters[name][0]), saved.whole(saved.adapters[name][1]))
        for name in found.layouts()
        if name in saved.adapters
    }
    adapters = lora_files.to_theirs(found, pairs)
    config = lora_files.config_json(adapters, given["rank"], saved.scale, base.get("init", ""))
    name, about = lora_files.PIPELINE_WEIGHTS, {"format": "pt"}
    if form == "peft":
        name = lora_files.WEIGHTS
        theirs, reader = lora_files.named(adapters, lora_files.PREFIX), "peft"
    elif form == "lora":
        about = lora_files.metadata(config)
        theirs = lora_files.named(adapters, lora_files.PIPELINE_PREFIX)
        reader = f"{found.pipeline}.load_lora_weights"
    else:
        adapters = lora_files.to_originals(found, adapters)
        write = lora_files.kohya if form == "kohya" else lora_files.comfyui
        theirs = write(adapters, saved.scale)
        reader = "kohya's tools and ComfyUI" if form == "kohya" else "ComfyUI"
    with writing(target, theirs.values()), new_output(target) as place:
        if is_file:
            tensor_file.write_tensor_file(place, theirs, iter(theirs.items()), about)
        else:
            place.mkdir()
            tensor_file.write_safetensors(place, name, theirs, theirs.items(), metadata=about)
        if form == "peft":
            write_json(place / lora_files.CONFIG, config)
    console.say(f"wrote   {target}: adapters of {len(adapters)} layers for {reader}")
    console.say(f"        from {run.path}, step {run.step} ({run.weights})")
    if base.get("init"):
        kind = base.get("init_weights", "ema")
        console.say(f"        They belong to the weights of {base['init']} ({kind}).")


def check_target(target: Path, form: str | None) -> None:
    """Raise UserError unless --out is a file or a folder, whichever the adapter format needs."""
    is_file = target.suffix == ".safetensors"
    if form in FILE_FORMATS and not is_file:
        raise UserError(
            f"--out {target}: --format {form} writes a file. Name one, such as adapter.safetensors."
        )
    if target.suffix and not (is_file and form != "peft"):
        a_file = " or FILE.safetensors" if form == "lora" else ""
        raise UserError(
            f"--out {target}: --format {form} writes a folder{a_file}. Name one, such as adapter."
        )


def check_base(source: str, run: SavedNetwork, given: Mapping[str, Any]) -> None:
    """Raise UserError for adapters of a run whose other weights are not those of its `init`.

    `given`: its [checkpoint] table.
    """
    whole = "Export the whole network, without --format."
    if changed := given.get("reinitialize"):
        raise UserError(
            f"--input {source} began with [checkpoint] reinitialize={show(tuple(changed))}: its "
            f"adapters fit no other weights. {whole}"
        )
    if not given.get("init"):
        return
    try:
        base = read_record(find_checkpoint(location(given["init"]), None, "--input"))
    except UserError:
        console.say(f"not checked: the classes of {given['init']}, where the run began; not found")
        return
    before, now = (names_in(record["data"]) for record in (base, run.record))
    if before and now and before != now:
        raise UserError(
            f"--input {source} has other classes than {given['init']}, where it began: its "
            f"adapters do not fit that table of classes. {whole}"
        )


def import_adapter(source: Path, target: Path, options: ConvertFlags) -> None:
    """Import an adapter file as a checkpoint: the weights of --base and the adapters.

    With --merge the adapters are merged into the weights. Raises UserError.
    """
    base = options.base
    if not base:
        raise UserError(f"--input {source} is an adapter. Name the run of its weights with --base.")
    path = find_checkpoint(location(base), options.step, "--base")
    run = open_weights(path, options.weights or "ema", options.decay, options.trust)
    network = counterpart(run, f"--base {base}")
    origin = {"init": base, "init_weights": options.weights or "ema", "reinitialize": []}
    start = run.record["config"]["checkpoint"] | origin | {"resume": "auto"}
    try:
        file = lora_files.opened(source)
        if options.merge:
            tensors, layers = lora_files.merged(file, network, run.tensors)
            table = tables_of(LoRAConfig())
            what = f"adapters of {layers} layers added to the weights"
        else:
            tensors, given = adapters_beside(lora_files.made(file, network), run)
            table, names = tables_of(given), patterns_of(given.targets, run.tensors.outline)
            what = (
                f"adapters of rank {given.rank}, alpha {given.alpha}, of {len(given.targets)} "
                f"layers (targets = {show(names)})"
            )
    except UserError as error:
        raise UserError(f"--input {source}: {error}") from None
    record = imported.record_made_of(run.record, lora=table, checkpoint=start)
    imported.save(target, {"model": tensors}, record)
    text = run.diffusion("convert").data.text
    use = f"Draw from it: sample --run {target}"
    if text and not text.kind:  # The base is an import.
        use = f"Train from it with --checkpoint.init {target}"
        if not options.merge:
            use = f"Train them on with --checkpoint.resume {target}, or as --checkpoint.init merged"
    console.say(f"wrote   {target}: {run.path} ({run.weights}) with {what}. {use}")
    for line in warnings(run):
        console.say(f"warning: --base {base} {line}")


def tables_of(given: LoRAConfig) -> dict[str, Any]:
    """[lora] of an import's record."""
    return asdict(given) | {"targets": list(given.targets), "trained": []}


def patterns_of(layers: Sequence[str], weights: Iterable[str]) -> tuple[str, ...]:
    """[lora] targets that are these layers and no others of a network with such `weights`."""
    names = [name.removesuffix(".weight") for name in weights if name.endswith(".weight")]
    found: dict[str, None] = {}
    for layer in layers:
        pattern = re.sub(r"^blocks\.\d+\.", "blocks.*.", layer)
        others = [name for name in names if matches(name, [pattern]) and name not in layers]
        found[layer if others else pattern] = None
    return tuple(found)


def adapters_beside(
    adapters: lora_files.Adapters, run: SavedNetwork
) -> tuple[OnDemand, LoRAConfig]:
    """The weights of a run with adapters beside them, and their [lora]."""
    ends, weights = f".{lora.A}", run.tensors
    layers = tuple(n.removesuffix(ends) for n in adapters.tensors if n.endswith(ends))

    def get(name: str) -> Tensor:
        return adapters.tensors[name] if name in adapters.tensors else weights[name]

    both = OnDemand({**weights.outline, **adapters.tensors}, get)
    return both, LoRAConfig(rank=adapters.rank, alpha=adapters.alpha, targets=layers)


def warnings(run: SavedNetwork) -> Iterator[str]:
    """Why adapters of diffusers may not belong to a base."""
    if run.saved.adapters:
        began = run.record["config"]["checkpoint"].get("init")
        hint = f" For those of the run itself, name where it began: --base {began}" if began else ""
        yield f"has adapters, to which these were added.{hint}"
    if getattr(run.model_config, "timestep_frequencies", "") == "dit":
        yield (
            'has [model] timestep_frequencies="dit". diffusers has others: adapters that were '
            "trained there are less exact here"
        )


FILES = (diffusers_network.WEIGHTS, "diffusion_pytorch_model.bin")
NO_TEXT = "none"
"""--text-encoder of an import that draws no prompts."""


def is_of_diffusers(path: Path) -> bool:
    """True if a path is the folder of a pipeline, or of a network, of diffusers."""
    if (path / diffusers_network.INDEX).is_file():
        return True
    try:
        config = hugging_face.read_json(path / diffusers_network.CONFIG)
    except UserError:
        return False
    return "_class_name" in config


def read_diffusers(source: Path, target: Path, options: ConvertFlags) -> None:
    """Import a folder as a checkpoint.

    Raises UserError for another pipeline or network than those known.
    """
    try:
        pipeline = source / diffusers_network.INDEX
        index = hugging_face.read_json(pipeline) if pipeline.is_file() else {}
        known = diffusers_network.known_classes()
        if index and diffusers_network.TRANSFORMER not in index:
            name = index.get("_class_name")
            raise UserError(f"{pipeline.name} is of {name}, which has none of {known}.")
        folder = source / part_of(index, options.expert) if index else source
        values = hugging_face.read_json(folder / diffusers_network.CONFIG)
        kind = diffusers_network.class_for(values)
        if kind is None:
            name = diffusers_network.show_json(values.get("_class_name"))
            raise UserError(f"{diffusers_network.CONFIG} is of {name}, not one of {known}.")
        found = kind.of_folder(values, index)
        ours = found.to_ours(hugging_face.read_weights(folder, FILES))
        scheduler = source / "scheduler" / diffusers_network.SCHEDULER
        objective = found.objective_of(hugging_face.read_json(scheduler) if index else None)
        objective |= noise_levels_of(index, options.expert)
        has_vae = bool(index) and (source / diffusers_network.VAE).is_dir()
        vae = autoencoder.load(str(source), torch.device("cpu"), "vae") if has_vae else None
        facts = with_text(found.facts(vae, options.scale), found, source, options.text_encoder)
        record = imported.record_of({**found.tables(), "objective": objective}, facts)
    except UserError as error:
        raise UserError(f"--input {source}: {error}") from None
    classes = "" if facts.text else f", {facts.about}"
    console.say(f"read    {source}: {found.kind}, {numel(ours):,} parameters{classes}")
    console.say(f"        objective: {', '.join(f'{k} {v}' for k, v in objective.items())}")
    if facts.text and facts.text.kind:
        console.say(f"        prompts: {facts.text} in {facts.text_source}")
    for line in diffusers_network.warnings_of(values, index, source):
        console.say(f"warning: --input {source}: {line}")
    tensors = {"model": ours, "ema": {imported.EMA_DECAY: ours}}
    imported.save(target, tensors, record)
    draw = f"Draw from it: sample --run {target} --prompt TEXT. " if facts.text_source else ""
    console.say(f"wrote   {target}. {draw}Train from it with --checkpoint.resume {target}")


def part_of(index: Mapping[str, Any], expert: str | None) -> str:
    """The part of a pipeline that --expert names. Raises UserError if there is one network alone.

    `index`: its model_index.json.
    """
    if expert and not has_low(index):
        raise UserError(
            f"--expert {expert}: the pipeline has one network, for all noise levels. Leave it out."
        )
    low, high = diffusers_network.LOW_TRANSFORMER, diffusers_network.TRANSFORMER
    return low if expert == "low" else high


def has_low(index: Mapping[str, Any]) -> bool:
    """True if a pipeline has a second network, for low noise levels."""
    part = index.get(diffusers_network.LOW_TRANSFORMER)
    return isinstance(part, list) and any(part)


def noise_levels_of(index: Mapping[str, Any], expert: str | None) -> dict[str, Any]:
    """[objective] t_min or t_max of one of a pipeline's two networks; {} if it has one.

    Raises UserError for a boundary outside of (0, 1).
    """
    if not has_low(index):
        return {}
    boundary = conform(
        index.get("boundary_ratio"), float, f"{diffusers_network.INDEX}: boundary_ratio"
    )
    if not 0 < boundary < 1:
        raise UserError(
            f"{diffusers_network.INDEX}: boundary_ratio={boundary:g} must be above 0 and below 1."
        )
    return {"t_max" if expert == "low" else "t_min": boundary}


def with_text(facts: LatentFacts, found: Counterpart, source: Path, chosen: str) -> LatentFacts:
    """Facts, with the text encoder's: of --text-encoder, or of the pipeline.

    Unchanged if there is none, with --text-encoder none, and where the class is not known. Raises
    UserError if the encoder does not fit.
    """
    prompts = found.prompts if isinstance(found, TextToImage) else None
    if prompts is None:
        if chosen:
            raise UserError(
                f"--text-encoder {chosen}: the prompts of a {found.kind} are not drawn from an "
                "import. Leave it out."
            )
        return facts
    assert isinstance(found, TextToImage)
    has_own = (source / diffusers_network.INDEX).is_file() and (source / "text_encoder").is_dir()
    if chosen == NO_TEXT or not (chosen or has_own):
        return facts
    where = "--text-encoder" if chosen else "text_encoder"
    try:
        text, folder = found.text_of(prompts, chosen or str(source), where)
    except UserError as error:
        raise UserError(f"{error} Without prompts: --text-encoder {NO_TEXT}.") from None
    return replace(facts, text=text, text_source=folder)


def write_diffusers(target: Path, run: SavedNetwork, options: ConvertFlags) -> None:
    """Export a network as a folder; with --vae or the run's autoencoder as a whole pipeline.

    Raises UserError for --low without an autoencoder.
    """
    diffusion = run.diffusion("convert")
    kind = diffusers_network.class_for_model(run.model_config)
    assert kind is not None
    found = kind.of_run(run.model_config, diffusion.config)
    found.check_expressible(options.as_is)
    recorded = diffusion.data.vae_source
    vae = options.vae or (recorded if Path(recorded or "-").expanduser().is_dir() else NO_VAE)
    outline = found.outline()
    config, theirs = found.config_json(), found.to_theirs(run.tensors)
    weights = diffusers_network.WEIGHTS
    if vae == NO_VAE:
        if options.low:
            raise UserError(
                f"--low {options.low}: two networks make a pipeline, which needs an autoencoder. "
                "Give --vae, or export each network by itself."
            )
        with writing(target, outline.values()), new_output(target) as place:
            hugging_face.write_folder(place, config, outline, theirs, weights)
        console.say(
            f"wrote   {target}, a transformer for diffusers. With --vae: a whole {found.pipeline}"
        )
    else:
        folder = folder_of_vae(vae, diffusion.data, found)
        scheduler = found.scheduler_json(diffusion.config)
        chosen = options.text_encoder
        encoder = diffusers_network.text_parts(chosen, "--text-encoder") if chosen else {}
        written = {diffusers_network.TRANSFORMER: theirs}
        if options.low:
            low, found.boundary = second_network(found, diffusion, scheduler, options)
            folder_of_vae(vae, low.diffusion("convert").data, found)
            written[diffusers_network.LOW_TRANSFORMER] = found.to_theirs(low.tensors)
        sizes = [*outline.values()] * len(written)
        with writing(target, sizes), new_output(target) as place:
            for part, tensors in written.items():
                hugging_face.write_folder(place / part, config, outline, tensors, weights)
            diffusers_network.write_parts(place, found, scheduler, folder, encoder, diffusion.data)
        console.say(f"wrote   {target}, a {found.pipeline} with {scheduler['_class_name']}")
    console.say(f"        from {run.path}, step {run.step} ({run.weights})")


def second_network(
    found: Counterpart, high: Diffusion, scheduler: Mapping[str, Any], options: ConvertFlags
) -> tuple[SavedNetwork, float]:
    """The run of --low, and the noise level where it meets --input.

    Raises UserError for a network of another class or size, and for other times.
    """
    low = options.low
    assert low is not None
    if not found.has_experts:
        raise UserError(f"--low {low}: {found.pipeline} has one network. Leave it out.")
    path = find_checkpoint(location(low), None, "--low")
    run = open_weights(path, options.weights or "ema", options.decay, options.trust)
    other, diffusion = counterpart(run, f"--low {low}"), run.diffusion("convert")
    other.check_expressible(options.as_is)
    if other.config_json() != found.config_json():
        raise UserError(
            f"--low {low}: a network of other sizes than --input. Give the second one of the same "
            "[model]."
        )
    if (theirs := other.scheduler_json(diffusion.config)) != scheduler:
        raise UserError(
            f"--low {low} has a shift of {theirs['flow_shift']:g}, --input of "
            f"{scheduler['flow_shift']:g}: a pipeline has one. Give runs with the same [objective] "
            "shift."
        )
    return run, boundary_of(high, diffusion, options.boundary)


def folder_of_vae(vae: str, facts: LatentFacts, found: Counterpart) -> Path:
    """The folder with the files of --vae. Refuses one that did not make the run's latents."""
    place = Path(vae).expanduser()
    if not place.is_dir():
        raise UserError(
            f"--vae {vae}: no such folder. Give one, whose files are copied, or --vae {NO_VAE}."
        )
    loaded = autoencoder.load(str(place), torch.device("cpu"))
    loaded.check_fits(facts, "--vae")
    found.check_units(loaded, facts, f"--vae {vae}")
    return place if (place / autoencoder.CONFIG).is_file() else place / autoencoder.INSIDE


LANGUAGE_MODEL_FILE = "tokenizer.json"
TOKENIZER = "tokenizer"
"""Folder of the tokenizer's files in an imported checkpoint."""


def read_language_model(source: Path, target: Path) -> None:
    """Import a folder of transformers as a checkpoint.

    Raises UserError if it does not fit our models.
    """
    try:
        config = hugging_face.read_config(source)
        family = hugging_face.family_of(config["architectures"][0])
        tables = family.tables(config)
        built = config_file.build_sections(tables, catalog.variant)
        model, objective = built["model"], built["objective"]
        tensors = hugging_face.read_weights(source)
        ours = hugging_face.to_ours(family, model, objective, tensors)
    except UserError as error:
        raise UserError(f"--input {source}: {error}") from None
    files = hugging_face.tokenizer_files(source)
    named = (
        str(target.resolve() / TOKENIZER / LANGUAGE_MODEL_FILE)
        if LANGUAGE_MODEL_FILE in files
        else ""
    )
    facts, _ = objective.example(model)
    given = {ours: config.get(theirs) for theirs, ours in family.special.items()}
    own = {f.name for f in fields(facts)}
    ids = {k: v for k, v in given.items() if k in own and type(v) is int and v < model.vocab_size}
    facts = replace(facts, tokenizer=named, **ids)
    # A checkpoint needs the section; the dataset of imported weights is unknown.
    sizes = {key: getattr(model, key) for key in ("sequence_length", "vocab_size")}
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


def write_language_model(source: Location, target: Path, run: SavedNetwork) -> None:
    """Export a checkpoint of a language model as a folder of transformers.

    Raises UserError if transformers has no such network, or --out has a suffix.
    """
    record = run.record
    objective = config_file.build_sections(
        config_file.of_record(record), catalog.variant, ("objective",)
    )["objective"]
    try:
        family = hugging_face.family_for(run.model_config)
        config = family.config(run.model_config, objective)
    except UserError as error:
        raise UserError(f"--input {source}: {error}") from None
    if target.suffix in (".pt", ".pth", ".safetensors", ".bin"):
        raise UserError(
            f"--out {target}: model {run.model_config.name} is written as a folder. Name one "
            "without a suffix."
        )
    ours = run.tensors
    layouts = hugging_face.layouts_of(family, run.model_config, ours.outline)
    outline = dict(tensor_layouts.to_theirs(layouts, ours.outline))
    files = tokenizer_of(run.path, record["data"])
    known = special_ids(files, record["data"], config["vocab_size"])
    config |= {theirs: known[ours] for theirs, ours in family.special.items()}
    config["dtype"] = "float32"
    with writing(target, outline.values()), new_output(target) as place:
        hugging_face.write_folder(place, config, outline, tensor_layouts.to_theirs(layouts, ours))
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
        return read_tokenizer(files[LANGUAGE_MODEL_FILE])
    except (KeyError, UserError):
        return None


def tokenizer_of(path: Location, facts: Mapping[str, Any]) -> dict[str, Path]:
    """The tokenizer's files: of imported weights beside them, of a run where its data name them."""
    if isinstance(path, Path) and (files := hugging_face.tokenizer_files(path / TOKENIZER)):
        return files
    named = Path(facts.get("tokenizer") or "")
    if named.name == LANGUAGE_MODEL_FILE and named.is_file():
        return hugging_face.tokenizer_files(named.parent)
    # The files beside one of another name may be another tokenizer's. A record may name any file.
    return {LANGUAGE_MODEL_FILE: named} if tokenizer_in({LANGUAGE_MODEL_FILE: named}) else {}


def say_tokenizer(files: Mapping[str, Path]) -> None:
    """Tell which files were copied."""
    if files:
        console.say(f"        with its tokenizer: {', '.join(files)}")


def described(model: ModelConfig, ours: Mapping[str, Tensor]) -> str:
    """Describe a network in one line."""
    keys = ("hidden_size", "num_layers", "num_heads", "vocab_size", "sequence_length")
    sizes = ", ".join(f"{key} {getattr(model, key)}" for key in keys)
    return f"{sizes}; {numel(ours):,} parameters"


OBJECTIVE = "titan_dit.objective"
"""Metadata key of a .safetensors file for the training objective."""
ORIGINAL = {"noise_schedule": "linear", "prediction": "eps"}
"""The keys of [objective] that the original DiT's weights were trained with."""
EXPECTED = "ddpm linear eps in 1000 steps"
"""`meaning` of the original's [objective]."""


def read_original(source: Path, target: Path, options: ConvertFlags) -> None:
    """Import a file as a checkpoint. Raises UserError for wrong tensors."""
    try:
        weights = tensor_file.read_weight_file(source)
    except UserError as error:
        raise UserError(f"--input {error}") from None
    try:
        original = original_dit.infer(weights.ema, options.heads or known_heads(weights))
        objective = objective_of_original(weights, original, options)
        ema = original.to_ours(weights.ema)
        # Most files hold one state dict: check it once.
        model = ema if weights.model is weights.ema else original.to_ours(weights.model)
        facts = LatentFacts(
            shape=original.config.sample_shape,
            count=0,
            num_classes=original.config.num_classes,
            scale=options.scale or original_dit.SCALE,
        )
        record = imported.dit_record(original.config, objective, facts)
    except UserError as error:
        raise UserError(f"--input {source}: {error}") from None
    tensors: dict[str, Any] = {"model": model, "ema": {imported.EMA_DECAY: ema}}
    console.say(f"read    {source}: {describe(original, ema)}")
    console.say(f"        objective: {', '.join(f'{k} {v}' for k, v in objective.items())}")
    if wide := dtypes(weights.ema) - {"float32"}:
        console.say(f"        {', '.join(sorted(wide))} converted to float32")
    add_moments(tensors, weights, original)
    imported.save(target, tensors, record)
    console.say(f"wrote   {target}. Train from it with --checkpoint.resume {target}")


def add_moments(
    tensors: dict[str, Any], weights: tensor_file.WeightFile, original: Original
) -> None:
    """Add AdamW's moments if the file has matching ones."""
    if weights.adam is None:
        return
    try:
        tensors["optimizer"] = original.adam_to_ours(weights.adam)
    except UserError as error:
        reason = " ".join(str(error).split())
        console.say(f"        AdamW state dropped, training starts with a new one: {reason}")
        return
    steps = next(iter(tensors["optimizer"].values()))["step"].item()
    console.say(f"        with AdamW's moments after {steps:,.0f} steps")


def known_heads(weights: tensor_file.WeightFile) -> int | None:
    """Return the number of heads in a file's metadata, written by `metadata_of`."""
    heads = weights.metadata.get("num_heads", "")
    return int(heads) if heads.isdecimal() and int(heads) > 0 else None


def objective_of_original(
    weights: tensor_file.WeightFile, original: Original, options: ConvertFlags
) -> dict[str, Any]:
    """Return the [objective] table: from the flags, else from the file, else the original's.

    Raises UserError for flags that do not fit the file.
    """
    stored = stored_objective(weights, options.trust)
    if options.format == "dit" and (
        original_dit.are_sit_arguments(weights.arguments)
        or (stored and original_dit.fits_sit(stored))
    ):
        raise UserError("--format dit, but it is a file of SiT: give --format sit, or none.")
    if options.format == "sit" or (
        not stored and original_dit.are_sit_arguments(weights.arguments)
    ):
        original_dit.check_sit_arguments(weights.arguments)
        stored = stored or dict(original_dit.SIT_OBJECTIVE)
        original_dit.check_sit_objective(stored)
    if not stored and options.format is None and original_dit.has_sit_name(options.input):
        console.say(
            "warning: by its name the file is SiT's, but it does not say so itself and is read as "
            "the original DiT's. If it is SiT's, repeat with --format sit"
        )
    table: dict[str, Any] = {"name": "ddpm", **ORIGINAL, **stored}
    is_ddpm = table["name"] == "ddpm"
    for name in ORIGINAL:
        if (value := getattr(options, name)) is None:
            continue
        if not is_ddpm:
            flag = name.replace("_", "-")
            raise UserError(
                f"--{flag} {value}: weights of {table['name']} have no {flag}. Leave it out."
            )
        table[name] = value
    table["learn_sigma"] = original.learn_sigma
    return table if is_ddpm else {k: v for k, v in table.items() if k not in ORIGINAL}


def stored_objective(weights: tensor_file.WeightFile, trust: bool) -> dict[str, Any]:
    """The [objective] table in a file's metadata; empty if there is none.

    Raises UserError if it is damaged.
    """
    try:
        stored: dict[str, Any] = user_text.parse_json(weights.metadata.get(OBJECTIVE, "{}"))
        if stored:
            schema.check(stored, schema.Each(schema.ANY), "[objective]")
            dotted_names.check_trusted({"objective": stored}, "it", trust, ("objective",))
            kind = catalog.variant("objective", conform(stored.get("name"), str, "name"))
            stored = config_file.renamed_keys("objective", stored, hints_of(kind))
    except (user_text.BadTextError, UserError) as error:
        raise UserError(f"its metadata {OBJECTIVE} is damaged. Export it again. {error}") from None
    return stored


def write_original(target: Path, run: SavedNetwork, config: DiTConfig, form: str | None) -> None:
    """Export a DiT as a file of the original or of SiT, whose names are the same."""
    objective = run.diffusion("convert").config
    table = {"name": objective.name, **asdict(objective)}
    if form == "sit":
        original_dit.check_sit_objective(table)
    original = Original(config, objective.output_channels(config.in_channels))
    theirs, outline = original.to_original(run.tensors), original.outline()
    # A .pt file is made from a .safetensors file beside it, which is memory-mapped.
    passes = 1 if target.suffix == ".safetensors" else 2
    with writing(target, list(outline.values()) * passes), new_output(target) as place:
        file = place.with_name("tensors.safetensors")
        metadata = metadata_of(original, table)
        tensor_file.write_safetensors(place.parent, file.name, outline, theirs, metadata=metadata)
        if target.suffix == ".safetensors":
            file.rename(place)
        else:
            original_dit.write_pickled(place, file, outline)
    console.say(f"read    {run.path}, step {run.step} ({run.weights})")
    is_sit = original_dit.fits_sit(table) and form != "dit"
    name = "SiT" if is_sit else "the original DiT"
    console.say(f"wrote   {target}, a file of {name}: {describe(original, run.tensors)}")
    if not is_sit and (words := meaning(table)) != EXPECTED:
        console.say(f"note    trained for {words}: the original's sample.py expects {EXPECTED}")


def meaning(objective: Mapping[str, Any]) -> str:
    """Label of an [objective]: its name and what else the format cannot hold."""
    words = [objective[key] for key in ("name", *ORIGINAL) if objective.get(key)]
    steps = objective.get("steps")
    return " ".join(words) + (f" in {steps} steps" if steps else "")


def metadata_of(original: Original, objective: Mapping[str, Any]) -> dict[str, str]:
    """The metadata of a .safetensors file."""
    config = original.config
    hidden, layers, heads, patch = config.shape
    return {
        "format": "pt",
        "input_size": str(config.latent_size),
        "patch_size": str(patch),
        "in_channels": str(config.in_channels),
        "hidden_size": str(hidden),
        "depth": str(layers),
        "num_heads": str(heads),
        "num_classes": str(config.num_classes),
        "learn_sigma": str(original.learn_sigma),
        OBJECTIVE: json.dumps(dict(objective)),
    }


def describe(original: Original, tensors: OnDemand) -> str:
    """Describe a network in one line."""
    config = original.config
    name = original_dit.name_of(config)
    keys = "hidden_size {}, num_layers {}, num_heads {}, patch_size {}"
    size = name or keys.format(*config.shape)
    sigma = "learned sigma" if original.learn_sigma else "no learned sigma"
    return (
        f"{size}, {numel(tensors):,} parameters, {config.in_channels}x{config.latent_size}x"
        f"{config.latent_size}, {config.num_classes} classes, {sigma}"
    )


READING = ("heads", "scale", "prediction", "noise_schedule", "format")
WRITING = (
    *("weights", "decay", "step", "vae", "text_encoder", "as_is", "format"),
    *("low", "boundary"),
)
OF_RUNS = ("weights", "decay", "step")
"""Flags of every export."""


class Kind(NamedTuple):
    """A kind of --input."""

    name: str
    use: str
    """The conversion of this kind, for messages: an import or an export."""
    flags: tuple[str, ...] = ()


RUN = Kind("folder", "an export", WRITING)
FILE = Kind("file", "an import", READING)
ADAPTERS = Kind("set of adapters", "its import", ("base", "merge", *OF_RUNS))
DIFFUSERS = Kind("folder of diffusers", "its import", ("scale", "text_encoder", "expert"))
TRANSFORMERS = Kind("folder of transformers", "its import")
FLAGS = dict.fromkeys(flag for kind in (FILE, RUN, ADAPTERS, DIFFUSERS) for flag in kind.flags)


def main(options: ConvertFlags) -> None:
    """Import if --input is a file, or a folder of another library; export a run or a checkpoint."""
    source, target = location(options.input), Path(options.out)
    if isinstance(location(options.out), URL) or not target.name:
        raise UserError(f"--out {options.out}: give the path of a new file or folder on a disk.")
    kind = kind_of(source)
    writes = kind is RUN
    check_flags(options, kind.flags, f"{kind.use} (--input {source} is a {kind.name})")
    if target.exists() and (writes or not target.is_dir() or any(target.iterdir())):
        raise UserError(f"--out {target} exists. Choose another name, or delete it.")
    if not writes and target.suffix in tensor_file.WEIGHT_SUFFIXES:
        raise UserError(f"--out {target}: a checkpoint is a folder. Name one, such as dit_xl2.")
    if not writes and options.format in LORA_FORMATS:
        raise UserError(
            f"--format {options.format}: --input {source} is a {kind.name}. Give a run with "
            "adapters."
        )
    if isinstance(source, URL) or writes:
        export(source, target, options)
    elif kind is ADAPTERS:
        import_adapter(source, target, options)
    elif kind is DIFFUSERS:
        read_diffusers(source, target, options)
    elif kind is TRANSFORMERS:
        read_language_model(source, target)
    else:
        read_original(source, target, options)


def kind_of(source: Location) -> Kind:
    """The kind of an --input."""
    if isinstance(source, URL):
        return RUN
    if lora_files.is_directory(source) or lora_files.pipeline_file(source):
        return ADAPTERS
    if is_of_diffusers(source):
        return DIFFUSERS
    if hugging_face.is_transformers_folder(source):
        return TRANSFORMERS
    return RUN if source.is_dir() else FILE


def check_flags(options: ConvertFlags, flags: tuple[str, ...], use: str) -> None:
    """Raise UserError for the flags of another use."""
    for name in FLAGS:
        if getattr(options, name) not in (None, False, "") and name not in flags:
            raise UserError(f"--{name.replace('_', '-')} is not a flag of {use}. Leave it out.")


def export(source: Location, target: Path, options: ConvertFlags) -> None:
    """Export a checkpoint: a DiT as a file or for diffusers, a language model as a folder."""
    path = find_checkpoint(source, options.step, "--input")
    run = open_weights(path, options.weights or "ema", options.decay, options.trust)
    write_run(source, target, run, options)
    say_base(run)


def say_base(run: SavedNetwork) -> None:
    """Print the error of quantising the frozen weights, against the weights where the run began."""
    saved, given = run.saved, run.record["config"]["checkpoint"]
    if not saved.quantized:
        return
    line = f"        base {saved.lora.base}: {len(saved.quantized)} weights, decoded once"
    if not given.get("init"):
        console.say(line)
        return
    try:
        path = find_checkpoint(location(given["init"]), None, "[checkpoint] init")
        record = read_record(path)
        base = Weights(path, record, given.get("init_weights", "ema"))
        errors = {name: changed(saved.whole(name), base, name) for name in saved.quantized}
    except UserError as error:
        console.say(f"{line}; not compared with the weights of init: {error}")
        return
    # The newest checkpoint: the other run may have gone on since this one began.
    other = f"{path}, step {record['step']}"
    console.say(f"{line}; they differ from those of {other}, by {rms_of([errors]):.2%}")


def changed(held: Tensor, base: Weights, name: str) -> Error:
    """(sum of (held - base)^2, sum of base^2) over a weight's elements.

    Raises UserError if `base` has no such weight of this shape.
    """
    if name not in base.names or base.shape(name) != held.shape:
        raise UserError(f"{base.path} has no {name} of this shape. Name another run.")
    whole = torch.empty_like(held)
    base.read({name: whole})
    return (held - whole).double().square().sum().item(), whole.double().square().sum().item()


def write_run(source: Location, target: Path, run: SavedNetwork, options: ConvertFlags) -> None:
    """Write a run's network, or its adapters, in the form of --out and --format.

    Raises UserError for an --out of another form.
    """
    config = run.model_config
    if options.format in LORA_FORMATS:
        use = f"an export of adapters (--format {options.format})"
        check_flags(options, (*OF_RUNS, "as_is", "format"), use)
        write_adapter(target, run, options)
    elif diffusers_network.class_for_model(config) is None:
        use = f"the export of a {config.name} model (--input {source})"
        check_flags(options, OF_RUNS, use)
        write_language_model(source, target, run)
    elif target.suffix in tensor_file.WEIGHT_SUFFIXES and isinstance(config, DiTConfig):
        check_flags(options, (*OF_RUNS, "format"), f"an export to a file (--out {target})")
        write_original(target, run, config, options.format)
    elif target.suffix:
        file = "a .pt or .safetensors file, or " if isinstance(config, DiTConfig) else ""
        raise UserError(f"--out {target}: name {file}for diffusers a folder without a suffix.")
    else:
        use = f"an export to diffusers (--out {target} has no suffix)"
        captioned = "text_encoder", "low", "boundary"
        more = ("as_is",) if isinstance(config, DiTConfig) else captioned
        check_flags(options, (*OF_RUNS, "vae", *more), use)
        write_diffusers(target, run, options)
