"""Starts a new run at the weights of another one: [checkpoint] init.

Only weights are loaded. Step, data, objective and optimizer are new, and every average starts at
the weights. The rows of a table of classes are matched by the names of the classes.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from titan_dit.checkpoint import checkpoint, run_checkpoints
from titan_dit.checkpoint.record import read_record
from titan_dit.checkpoint.saved_weights import Weights, rms_of
from titan_dit.checkpoint.store import Location, location
from titan_dit.config import catalog
from titan_dit.config.config_file import build_sections, changes, renamed_keys, without_none
from titan_dit.config.operation import CheckpointConfig
from titan_dit.config.parameter_groups import check_matched, groups_of, listed, matches
from titan_dit.config.section import UserError, hints_of, show
from titan_dit.config.training import LoRAConfig
from titan_dit.models import lora, quantized
from titan_dit.models.layers import CLASS_TABLE, CONDITION
from titan_dit.models.quantized import WeightCodes
from titan_dit.optim.ema import EMA
from titan_dit.parallel.init import put
from titan_dit.ranks.process_group import Ranks
from titan_dit.recovery import resume, run_identity

UNITS = ("vae", "scale", "shift", "value_range")
"""Facts of a dataset that define the units of the model's inputs."""
TEXT = ("kind", "digest", "tokenizer", "layer", "template", "padding")
"""Facts that decide the meaning of caption embeddings."""
SHIFTS = ("shift", "shift_by_tokens")
"""Keys of [objective] that sampling uses; an import has its pipeline's values."""
FREE = ("[model] num_classes:", *run_identity.OF_TRAINING)
"""Keys of [model] that a new run may change without a warning."""
ANY_SIZE = ("[model] latent_size:",)
"""Keys that it may change, too, if the weights are the same for latents of all sizes."""


@dataclass(frozen=True)
class Misfit(Exception):
    """Weights that do not fit the model; `what`: the end of the message. Raised on all ranks."""

    what: str


def candidates(given: str) -> list[Location]:
    """The checkpoints that [checkpoint] init names, in order of preference.

    Raises UserError if there are none.
    """
    named = run_checkpoints.resolve(location(given))
    if named.checkpoint:
        read_record(named.checkpoint)  # Raises if it is not a checkpoint.
        return [named.checkpoint]
    if paths := resume.own_newest_first(named.checkpoints):
        return paths
    raise named.none_found("[checkpoint] init")


def load(
    settings: CheckpointConfig,
    identity: run_identity.Identity,
    model: Mapping[str, Tensor],
    ema: EMA,
) -> list[str]:
    """Load the weights of [checkpoint] init into `model` in place; return console lines.

    Collective. An objective's own modules keep their initial values, as do the parameters that
    [checkpoint] reinitialize names. Raises UserError on all ranks, with `model` unchanged, if
    weights do not fit.
    """
    chosen = settings.init
    assert chosen
    start = resume.first_undamaged(lambda: candidates(chosen), "init")
    path, record = start.path, start.record
    assert path
    saved = Weights(path, record, settings.init_weights)
    changed = "; ".join(differences(record, identity))
    try:
        rows = load_fitting(saved, settings.reinitialize, identity, model)
    except Misfit as error:
        why = f" The weights were trained with others: {changed}." if changed else ""
        raise UserError(f"[checkpoint] init={path}: {error.what}{why}") from None
    ema.restart()
    lines = [f"weights of {path} ({saved.what}), step {record['step']}: a new run starts there"]
    held = {name: saved.contents[key][1] for name, key in saved.keys.items()}
    lines += rows + resume.lines_of_rounding(model, held)
    if changed:
        lines.append(f"warning: [checkpoint] init: the weights were trained with others: {changed}")
    return [*start.messages(), *lines]


@torch.no_grad()
def load_fitting(
    saved: Weights,
    reinitialize: Sequence[str],
    identity: run_identity.Identity,
    model: Mapping[str, Tensor],
) -> list[str]:
    """Load the tensors that fit; return console lines about classes. Collective; raises Misfit."""
    base = LoRAConfig.of_table(identity.config["lora"]).base
    codes = quantized.weight_codes(base, next(iter(model.values())).device)
    everywhere = {
        n: shape for part in Ranks().gather(shapes_of(model, codes)) for n, shape in part.items()
    }
    names = sorted({*everywhere, *saved.names})
    check_matched("[checkpoint] reinitialize", reinitialize, names, "parameters")
    wanted = {n: s for n, s in everywhere.items() if not matches(n, reinitialize)}
    if CONDITION not in saved.names:
        wanted.pop(CONDITION, None)  # It starts at zero: the network predicts what it did.
    rows: list[int | None] | None = None
    new = everywhere.keys() - wanted.keys()
    lines = [fresh(new)] if new else []
    if CLASS_TABLE in wanted and CLASS_TABLE in saved.names:
        counts = saved.shape(CLASS_TABLE)[0] - 1, wanted[CLASS_TABLE][0] - 1
        before, now = names_in(saved.record["data"]), names_in(identity.data)
        rows = matched(counts, before, now)
        if rows is None and before != now:
            lines.append(f"classes: all {counts[1]} by number, because only one side has names")
        if rows is not None and rows != [*range(counts[0])]:
            new |= {CLASS_TABLE} if None in rows else set()
            lines.append(line_of_classes(rows, counts[0], now))
            width = wanted[CLASS_TABLE][1:]
            wanted[CLASS_TABLE] = torch.Size([counts[0] + 1, *width])
        else:
            rows = None
    check_fit(saved, wanted, reinitialize)
    check_trained(new, everywhere, identity)
    own = {name: model[name] for name in wanted if name in model}
    if rows is not None and CLASS_TABLE in own:
        target = own[CLASS_TABLE]
        table = torch.empty(wanted[CLASS_TABLE], dtype=target.dtype, device=target.device)
        own[CLASS_TABLE] = table
        errors = saved.read(own, codes)
        # The last row is the null class: new classes start with its values.
        order = [len(table) - 1 if row is None else row for row in rows] + [len(table) - 1]
        put(target, table[order])
    else:
        errors = saved.read(own, codes)
    if codes:
        every = Ranks().gather(errors)
        lines.append(
            f"base {base}: {len(set().union(*every))} weights, of which encoding changed "
            f"{rms_of(every):.2%} (root mean square)"
        )
    return lines


def matched(
    counts: tuple[int, int], before: Sequence[str], now: Sequence[str]
) -> list[int | None] | None:
    """For each class its saved row, None for a new class. `counts`: classes before and now.

    Returns None to match classes by number. Raises Misfit if neither names nor numbers match, or if
    two classes have one name.
    """
    if list(before) == list(now) and counts[0] == counts[1]:
        return None
    if len(before) == counts[0] and len(now) == counts[1]:
        found = Counter(before) & Counter(now), Counter(before) | Counter(now)
        if twice := [name for name in found[0] if found[1][name] > 1]:
            raise Misfit(
                f"several classes, of it or of [data], have the name {show(twice[0])}. Give each a "
                f'name of its own, or set reinitialize = ["{CLASS_TABLE}"].'
            )
        row = {name: number for number, name in enumerate(before)}
        return [row.get(name) for name in now]
    if counts[0] == counts[1]:
        return None
    raise Misfit(
        f"it has {counts[0]} classes, [data] {counts[1]}, and not both have names of classes to "
        f'match. Name them, or set reinitialize = ["{CLASS_TABLE}"].'
    )


def filled(section: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """A saved section with the current names of keys; keys that are newer have their defaults."""
    kind = catalog.variant(section, table["name"])
    known = {f.name: f.default for f in fields(kind) if f.default is not MISSING}
    return {**without_none(known), **renamed_keys(section, table, hints_of(kind))}


def line_of_classes(rows: Sequence[int | None], count: int, now: Sequence[str]) -> str:
    """The console line about the rows of the table of classes."""
    new = [name for name, row in zip(now, rows, strict=True) if row is None]
    known = f"classes: {len(rows) - len(new)} of {len(rows)} are among its {count}, by name"
    return f"{known}; new ones begin at its null row: {listed(new)}" if new else known


def fresh(names: set[str]) -> str:
    """The console line about parameters that keep their initial values."""
    return f"reinitialized: {listed(sorted(names))}"


def names_in(facts: Mapping[str, Any]) -> Sequence[str]:
    """Names of the classes of a dataset, by its facts as JSON, in Unicode's composed form.

    A Mac writes names of folders in the decomposed one.
    """
    return [unicodedata.normalize("NFC", str(name)) for name in facts.get("class_names") or ()]


def shapes_of(model: Mapping[str, Tensor], codes: WeightCodes | None) -> dict[str, torch.Size]:
    """Shapes of the network's parameters on this rank, without objective modules and adapters.

    `codes`: the format of quantised ones.
    """
    own = checkpoint.of_the_network(model)
    return {
        name: codes.shape_of(t.shape) if codes and not t.is_floating_point() else t.shape
        for name, t in own.items()
        if not lora.is_adapter(name)
    }


def check_fit(
    saved: Weights, wanted: Mapping[str, torch.Size], reinitialize: Sequence[str]
) -> None:
    """Raise Misfit unless names and shapes agree; names that match `reinitialize` may be extra."""
    has = saved.names
    fix = "Change [model], or name the parameters in reinitialize."
    if missing := sorted(wanted.keys() - has):
        raise Misfit(f"it has no {listed(missing)}. {fix}")
    if more := sorted(n for n in has - wanted.keys() if not matches(n, reinitialize)):
        raise Misfit(f"the model has no {listed(more)}. {fix}")
    for name, shape in wanted.items():
        if saved.shape(name) != shape:
            sizes = f"{list(saved.shape(name))}, but the model's is {list(shape)}"
            raise Misfit(f"{name} is {sizes}. {fix}")


def check_trained(
    new: Collection[str], names: Collection[str], identity: run_identity.Identity
) -> None:
    """Raise Misfit if a parameter that does not begin at the weights is frozen."""
    sections = build_sections(identity.config, catalog.variant, ("lora", "optimizer"))
    groups = sections["optimizer"].groups
    trained = lora.trained(names, sections["lora"], groups)
    if lost := sorted(set(new) - trained):
        by_groups = lost[0] in groups_of(lost, groups)
        what = (
            "[training] frozen or [optimizer] groups freeze it. Leave it out there"
            if by_groups
            else f'[lora] freezes it. Set [lora] trained = ["{lost[0]}"]'
        )
        raise Misfit(f"{listed(lost)} would get new values and never be trained: {what}.")


def text_in(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Facts of the text encoder of a checkpoint's data; None without one, or if not recorded."""
    text = data.get("text")
    if not text or not text["kind"]:
        return None
    return {key: text.get(key, "removed") for key in TEXT}


def differences(record: Mapping[str, Any], identity: run_identity.Identity) -> list[str]:
    """Changes of facts and keys that change the meaning of inputs, weights or prediction."""
    before, now = record["data"], identity.data
    own = {key: now[key] for key in UNITS if key in now}
    texts = text_in(before), text_in(now)
    if all(texts):
        before, own = {**before, "text": texts[0]}, {**own, "text": texts[1]}
    facts = run_identity.changed_facts(before, own)
    was, is_now = (
        {section: config[section] for section in ("model", "objective")}
        for config in (record["config"], identity.config)
    )
    for section, table in was.items():
        if table["name"] == is_now[section]["name"]:
            was[section] = filled(section, table)
    meaning = (*run_identity.WHAT_WEIGHTS_ARE, *SHIFTS)
    kept = ("[model] ", *(f"[objective] {key}:" for key in meaning))
    is_sized = hasattr(catalog.variant("model", is_now["model"]["name"]), "at_size")
    free = FREE + ANY_SIZE if is_sized else FREE
    changed = [x for x in changes(was, is_now) if x.startswith(kept)]
    return facts + [x for x in changed if not x.startswith(free)]
