"""What a run's mathematics and data are, and whether a checkpoint has the same."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from titan_dit.checkpoint import checkpoint
from titan_dit.checkpoint.store import Location
from titan_dit.config import catalog, stages
from titan_dit.config.config_file import (
    CHOSEN_BY_NAME,
    FORMAT,
    Tables,
    build,
    build_sections,
    changes,
    of_record,
    to_tables,
)
from titan_dit.config.section import UserError, show
from titan_dit.config.training import LoRAConfig, TrainingConfig
from titan_dit.ranks.process_group import Ranks


def ways_out(path: Location, model: Mapping[str, Tensor], *, own: bool) -> str:
    """Ending of the error: what the user can do. `own`: the checkpoint is this run's. Collective.

    `model`: this rank's parameters by name; allow_changes does not change their shapes.
    """
    another = "start a new run with --job.name" if own else "train without --checkpoint.resume"
    if not fits(path, model):
        return f"Its weights do not fit this model: undo the change, or {another}."
    allow = "allow it with --checkpoint.allow_changes true"
    return f"Undo the change, {another}, or {allow}."


def fits(path: Location, model: Mapping[str, Tensor]) -> bool:
    """Return True if a checkpoint has the parameters of all ranks, in their shapes. Collective."""
    saved = {name: size for name, (size, _) in checkpoint.contents(path).items()}
    # An objective's own modules are in no weight file.
    ours = {name: t.shape for name, t in checkpoint.of_the_network(model).items()}
    return all(Ranks().gather(all(saved.get(f"model.{name}") == ours[name] for name in ours)))


def changed_facts(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The facts of a dataset that differ, such as its shape or its autoencoder."""
    # A checkpoint holds them as JSON, which has no tuples.
    found = {key: json.loads(json.dumps(value)) for key, value in now.items() if key not in DIGESTS}
    return [
        f"[data] {key}: {brief(before[key])} -> {brief(value)}"
        for key, value in found.items()
        if key in before and before[key] != value
    ]


def brief(value: Any) -> str:
    """A fact for a message; of a table without its long texts, such as an embedding."""
    if isinstance(value, Mapping):
        value = {k: v for k, v in value.items() if not isinstance(v, str) or len(v) <= LONG_TEXT}
    return show(value)


WHAT_WEIGHTS_ARE = (
    *("name", "prediction", "noise_schedule", "schedule", "steps", "learn_sigma"),
    *("direction", "time_scale"),
)
"""Keys of [objective] that define the network's prediction."""
DIGESTS = ("digest", "text_digest")
"""Facts of a dataset that are digests of its contents."""
LONG_TEXT = 200
"""Characters of a text that a message does not show."""
OF_TRAINING = ("[model] dropout:", "[model] init_std:")
"""Keys of [model] that imported weights do not depend on."""


@dataclass(frozen=True)
class Identity:
    """Everything that a run's mathematics depend on; checkpoints of one run agree on it."""

    config: Tables
    """The resolved config; that of a stage, if the run has several."""
    data: Mapping[str, Any]
    """`DataFacts.as_json`, with the digest of the contents."""
    num_held_out: int
    """Rows of the dataset that are left out of training, for validation."""
    run: Tables = field(default_factory=dict)
    """The config of the whole run, as in its config.toml, if it has several stages; else {}."""

    def as_record(self) -> dict[str, Any]:
        """The identity as keys of a checkpoint's record."""
        return {"config": self.config, "config_format": FORMAT, "data": dict(self.data)}

    @property
    def whole(self) -> Tables:
        """The config of the whole run."""
        return self.run or self.config

    def at(self, step: int, before: Tables) -> Tables:
        """The config of the stage of `step`; `before`: of a checkpoint of it.

        Keys of [model] that an ended stage took from its data are those of `before`: that data
        need not be there any more.
        """
        if not self.run:
            return self.config
        run = build(self.run, catalog.variant)
        number = stages.number_of(run.training, step)
        found = to_tables(stages.config_of(run, number))
        if found["training"]["steps"] == self.config["training"]["steps"]:
            return self.config
        return found | {"model": before.get("model", {}) | found["model"]}


def check_same_mathematics(
    path: Location, record: Mapping[str, Any], identity: Identity, advice: Callable[[], str]
) -> None:
    """Raise UserError if model, objective, dataset, seed, batch or optimizer have changed.

    Imported weights belong to no run: only [model] without `OF_TRAINING`, `WHAT_WEIGHTS_ARE`, and
    rank and scale of adapters must agree. `advice`: the end of the error, by `ways_out`.
    """
    step = 0 if record.get("imported", False) else record.get("step", 0)
    config = identity.at(step, of_record(record))
    tables, renamed = known_parts(of_record(record), config)
    # Built again: keys that did not exist then get their defaults, as they do now.
    before = build(tables, catalog.variant)
    before = replace(before, ema=before.ema.settled())
    stage = TrainingConfig(**config["training"])
    changed = [*renamed, *changed_stages(before.training, stage, step)]
    changed += changes(to_tables(before), config)
    has_part = before.data.has_validation_part
    held_out = before.validation.held_out_of(has_part=has_part), identity.num_held_out
    if record.get("imported", False):
        kept = ("[model] ", *(f"[objective] {key}:" for key in WHAT_WEIGHTS_ARE))
        changed = [x for x in changed if x.startswith(kept) and not x.startswith(OF_TRAINING)]
        was, now = before.lora, LoRAConfig.of_table(identity.config["lora"])
        if was.rank and now.rank:
            fix = f"Set rank = {was.rank}, alpha = {was.alpha or was.rank}."
            if was.rank != now.rank:
                changed.append(f"[lora] rank: {was.rank} -> {now.rank}. {fix}")
            elif not math.isclose(was.scale, now.scale):
                changed.append(f"[lora] alpha / rank: {was.scale:g} -> {now.scale:g}. {fix}")
    elif config is identity.config:  # Else the data of the checkpoint's stage is no longer read.
        trained, now_data = record["data"], identity.data
        # A run that began before captions were added to its data has no digest of them.
        if any(trained[k] != now_data.get(k) for k in DIGESTS if k in trained):
            changed.append("[data]: the contents differ from those the checkpoint was trained on")
            changed += changed_facts(trained, now_data)
        if held_out[0] != held_out[1]:
            changed.append(
                f"[validation] samples (held-out rows of [data]): {held_out[0]} -> {held_out[1]}"
            )
    if changed:
        raise UserError(
            f"[checkpoint] {path} does not match this run:\n  "
            + "\n  ".join(changed)
            + f"\n  {advice()}"
        )


def changed_stages(before: TrainingConfig, now: TrainingConfig, step: int) -> Iterator[str]:
    """Changes of the stages that ended before `step`, or of where its own stage begins or ends.

    Later stages may change, and a run may go on in stages that began without them.
    """
    number = stages.number_of(before, step)
    for i, was in enumerate(before.stages[:number]):
        found = now.stages[i] if i < len(now.stages) else {}
        if not found or found["steps"] != was["steps"]:
            steps = found.get("steps", "none")
            yield f"[[stages]] {i + 1} steps: {was['steps']} -> {steps}, but it has ended"
        pairs = ({k: v for k, v in each.items() if k != "steps"} for each in (was, found))
        yield from (f"[[stages]] {i + 1} {line}" for line in changes(*pairs))
    if stages.number_of(now, step) != number:
        ends = list(now.stage_ends)
        yield f"[[stages]] {number + 1} has taken step {step}, but the stages end after {ends}"


def known_parts(tables: Tables, config: Tables) -> tuple[Tables, list[str]]:
    """A checkpoint's config, with user classes that this run does not name replaced; the changes.

    Such classes are not imported: only this run's own config decides what is. `config`: this run's.
    """
    others = {
        section: show(tables[section]["name"])
        for section in CHOSEN_BY_NAME
        if ":" in str(tables.get(section, {}).get("name", ""))
        and tables[section]["name"] != config[section]["name"]
    }
    kept = {section: config[section] if section in others else t for section, t in tables.items()}
    return kept, [
        f"[{section}] name: {name} -> {show(config[section]['name'])}"
        for section, name in others.items()
    ]


def check_held_out(path: Location, record: Mapping[str, Any], identity: Identity) -> None:
    """Raise UserError if another data order would train on rows that were held out."""
    only = ("job", "validation")
    before = build_sections(of_record(record), catalog.variant, only)
    held_out = "validation" in before and before["validation"].num_held_out
    was, now = before["job"].data_order, identity.config["job"]["data_order"]
    if held_out and identity.num_held_out and was != now and not record.get("imported", False):
        raise UserError(
            f"[job] data_order={show(now)} would hold out other rows than {path}, and train on "
            f"those held out there ([validation] samples={held_out}). Set data_order = "
            f"{show(was)}, or start a new run with --job.name."
        )


def lines_of_new_keys(record: Mapping[str, Any], identity: Identity) -> Iterator[str]:
    """Yield console lines about keys that the saved config lacks and that change last bits."""
    before, now = record["config"].get("compile", {}), identity.config["compile"]
    if before.get("enabled") and "objective" not in before and now["enabled"] and now["objective"]:
        yield (
            "[compile] objective=true is new in this run, and changes losses in their last bits. "
            "To go on as before: --compile.objective false"
        )
