"""Checks that objective, model, data, optimizer, adapters and folders fit together.

Objective, model spec and data by a run on two samples of zeros.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from titan_dit.config import dotted_names
from titan_dit.config.job import JobConfig
from titan_dit.config.parameter_groups import (
    check_groups,
    check_matched,
    group_lines,
    groups_of,
    listed,
    matches,
    place_of,
)
from titan_dit.config.section import UserError, paths_of, show
from titan_dit.config.training import LoRAConfig
from titan_dit.data.base import Batch, Field, Source
from titan_dit.data.loader import load_samples
from titan_dit.execution import check_names
from titan_dit.models import lora, quantized
from titan_dit.models.base import ModelSpec, TensorSpec
from titan_dit.objectives.base import Objective, Prepared
from titan_dit.optim.sections import MuonConfig, OptimizerConfig
from titan_dit.plan import RunPlan
from titan_dit.rng import SampleRNG
from titan_dit.system import run_files

T = TypeVar("T")

MEMBERS = {
    "takes": "the fields of a sample that it reads",
    "prepare": "fields to inputs and targets",
    "loss": "predictions and targets to a loss per token",
}
"""Required members of an objective."""
ROWS = 2


def validate_parts(
    plan: RunPlan,
    objective: Objective,
    fields: Mapping[str, Field],
    data: str,
    source: Source | None = None,
    row: int = 0,
    *,
    previews: bool = False,
) -> None:
    """Raise a UserError if the parts do not fit; with a source, one row is read.

    `data`: the name of [data]. `row`: the row that is read, which has these `fields`. `previews`:
    True if the objective must implement `preview`.
    """
    check_members(objective, previews)
    check_fields(fields, objective, data)
    if source is not None:
        check_row(source, objective, data, row, fields)
    check_modules(plan, objective)
    fields = objective.collected(fields)
    rng = SampleRNG(plan.seed, torch.arange(ROWS))
    zeros = {name: rows_of(field) for name, field in fields.items()}
    batch = Batch(zeros, rng.sample_numbers, torch.ones(ROWS), float(ROWS))
    prepared: Prepared = attempt("prepare", lambda: objective.prepare(batch, rng))
    check_prepared(prepared, plan.spec)
    check_loss(objective, prepared, plan.spec)
    check_described(attempt("describe", lambda: objective.describe({}, rng)))


def check_members(objective: Objective, previews: bool) -> None:
    """Raise UserError for an objective without the required members or base class."""
    members = MEMBERS | ({"preview": "samples for [sampling]"} if previews else {})
    dotted_names.require(type(objective), members, "[objective] name", type(objective).__name__)
    if not isinstance(objective, Objective):
        raise UserError(
            f"[objective] builds a {type(objective).__name__}, which is no "
            "titan_dit.objectives.base.Objective. Inherit from that class."
        )
    for name in ("preview", "check_preview") if previews else ():
        wanted = inspect.signature(getattr(Objective, name)).parameters
        try:
            inspect.signature(getattr(type(objective), name)).bind(*wanted)
        except TypeError:
            raise UserError(
                f"[objective] name: {type(objective).__name__}.{name} must take "
                f"({', '.join(wanted)}), see titan_dit.objectives.base.Objective.{name}."
            ) from None


def check_fields(fields: Mapping[str, Field], objective: Objective, data: str) -> None:
    """Raise UserError for data without a field that the objective takes.

    `data`: the name of [data].
    """
    missing = [name for name in objective.takes if name not in fields]
    if missing:
        raise UserError(
            f"[data] name={show(data)} has the fields {', '.join(fields)}, but [objective] "
            f"takes {', '.join(objective.takes)}: {', '.join(missing)} is missing. Choose matching "
            "data or another objective."
        )


def check_source(source: Source, data: str) -> None:
    """Raise UserError for data that does not open a `Source` with fields and facts."""
    wrong = [name for name in ("fields", "facts") if not hasattr(source, name)]
    if not isinstance(source, Source) or wrong:
        lacks = f" without {', '.join(wrong)}" if wrong else ""
        raise UserError(
            f"[data] name={show(data)} opens a {type(source).__name__}{lacks}. Return a "
            "titan_dit.data.base.Source that sets fields and facts."
        )


def check_row(
    source: Source, objective: Objective, data: str, row: int, fields: Mapping[str, Field]
) -> None:
    """Raise UserError for a source with a row that does not match its declared fields."""
    cpu = torch.device("cpu")
    stored = load_samples(source, [(0, row)], objective.inspect, cpu, 1.0).fields
    for name, field in fields.items():
        found = stored.get(name)
        declared = f"{name} {field}"
        if found is None:
            raise UserError(
                f"[data] name={show(data)} declares {declared}, but reads no {name}. Return it, or "
                "remove it from fields."
            )
        shape = tuple(found.shape[1:])
        matches = len(shape) == len(field.shape) and all(
            wanted in (None, size) for size, wanted in zip(shape, field.shape, strict=True)
        )
        if not matches or found.dtype != field.dtype:
            raise UserError(
                f"[data] name={show(data)} declares {declared}, but reads "
                f"{Field(found.dtype, shape)}. Correct its fields."
            )


def check_modules(plan: RunPlan, objective: Objective) -> None:
    """Raise UserError for modules of the objective that this run cannot train.

    With a split backward, in run-time order, or with values already set.
    """
    modules = objective.modules()
    if modules is None:
        return
    if plan.splits_backward:
        key, other = plan.what_splits
        raise UserError(
            f"[pipeline] {key} splits the backward pass, which skips the objective's own "
            f"parameters. Set {other}."
        )
    if plan.decides_at_run_time and plan.sizes.data > 1:
        raise UserError(
            f'[pipeline] order="run_time" with {plan.sizes.data} data-parallel ranks: they decide '
            "differently, but gather the objective's own parameters together in every microbatch. "
            'Set order = "planned".'
        )
    built = [name for name, p in modules.named_parameters() if p.device.type != "meta"]
    if built:
        raise UserError(
            f"[objective] modules: {', '.join(built)} has values already, which would be lost. "
            'Build the modules within `with torch.device("meta"):` and give initializers.'
        )


def check_prepared(prepared: Prepared, model_spec: ModelSpec) -> None:
    """Raise UserError for model inputs of other names, shapes or dtypes than the spec declares."""
    check_names(prepared, model_spec)
    for kind, batched in (("inputs", True), ("context", True), ("static", False)):
        specs: Mapping[str, TensorSpec] = getattr(model_spec, kind)
        for name, tensor in getattr(prepared, kind).items():
            spec, shape = specs[name], tuple(tensor.shape[int(batched) :])
            dtype = spec.dtype or torch.float32
            matches = tensor.dtype == dtype if spec.dtype else tensor.is_floating_point()
            if shape != spec.shape or not matches:
                raise UserError(
                    f"[objective] prepares {kind} {name} as {Field(tensor.dtype, shape)} of each "
                    f"sample, but [model] takes {Field(dtype, spec.shape)}. Set matching "
                    "sizes in [data] and [model]."
                )


def check_loss(objective: Objective, prepared: Prepared, model_spec: ModelSpec) -> None:
    """Raise UserError for a loss that is not one value per token in fp32 or fp64."""
    # Modules are still on the meta device; only shapes are checked.
    device = "cpu" if objective.modules() is None else "meta"
    predictions = {
        name: torch.zeros(ROWS, *spec.shape, dtype=spec.dtype, device=device)
        for name, spec in model_spec.trained_outputs.items()
    }
    targets = {name: target.to(device) for name, target in prepared.targets.items()}
    loss: Tensor = attempt("loss", lambda: objective.loss(predictions, targets))
    wanted = (ROWS, model_spec.num_tokens)
    if tuple(loss.shape) != wanted or loss.dtype not in (torch.float32, torch.float64):
        raise UserError(
            f"[objective] loss gives {Field(loss.dtype, tuple(loss.shape))} for {ROWS} samples; it "
            f"must give one fp32 value per token, {Field(torch.float32, wanted)}."
        )


def check_described(described: Mapping[str, Tensor]) -> None:
    """Raise UserError for entries of the fault log that are not one number per sample."""
    wrong = [name for name, values in described.items() if tuple(values.shape) != (ROWS,)]
    if wrong:
        raise UserError(
            f"[objective] describe gives {', '.join(wrong)} of another shape than [b]. Return "
            "one number per sample."
        )


def attempt(what: str, action: Callable[[], T]) -> T:
    """Call a user's method; turn an exception into a one-line UserError."""
    try:
        return action()
    except UserError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        hint = ""
        if what == "describe":
            hint = " The fault log reads no data, so describe is called without fields."
        raise UserError(
            f"[objective] {what} raised {type(error).__name__} on {ROWS} samples of zeros "
            f"with the shapes of [data]: {text}.{hint}"
        ) from error


def rows_of(field: Field) -> Tensor:
    """Zeros [ROWS, ...] of a field; a size that varies by sample is 1."""
    return torch.zeros(ROWS, *(size or 1 for size in field.shape), dtype=field.dtype)


def check_lora(config: JobConfig, plan: RunPlan) -> None:
    """Raise UserError if adapters cannot be trained, or if rank is 0 but another key is set."""
    own, checkpoint = config.lora, config.checkpoint
    if not own.rank:
        if own.base != "full":
            raise UserError(
                f"[lora] base={show(own.base)} holds frozen weights, but rank=0 trains all of "
                'them. Set rank, such as rank = 16, or base = "full".'
            )
        if own != LoRAConfig():
            raise UserError("[lora] rank=0 trains without adapters. Set rank, such as rank = 16.")
        return
    if plan.precision.float8 != "off":
        raise UserError(
            f"[lora] rank={own.rank} with [precision] float8={show(plan.precision.float8)}: "
            'adapters have no float8 form. Set float8 = "off"; [lora] base = "float8" holds the '
            "frozen weights in float8."
        )
    if not plan.resuming and not checkpoint.init and checkpoint.resume in ("auto", "never"):
        raise UserError(
            f"[lora] rank={own.rank} adapts trained weights, but the run has none. Set "
            "[checkpoint] init = a run or its checkpoint."
        )
    if not own.targets:
        raise UserError("[lora] targets=[] adapts nothing. Name layers, or set rank = 0.")
    with torch.device("meta"):
        model = plan.spec.build()
    for name in lora.adapted_layers(model, own.targets):
        if original := model.tied.get(f"{name}.weight"):
            raise UserError(
                f"[lora] targets: {name} shares its weight with {original}, and cannot be adapted. "
                "Name other layers."
            )
    quantized.check(model, own)
    check_dropout(plan)
    linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    check_matched("[lora] targets", own.targets, linear, f"{len(linear)} linear layers")
    names = [name for name, _ in model.named_parameters() if name not in model.tied]
    check_matched("[lora] trained", own.trained, names, f"{len(names)} parameters")
    groups = groups_of(names, config.optimizer.groups)
    frozen = [n for n in groups if groups[n].frozen and matches(n, own.trained)]
    if frozen:
        raise UserError(
            f"[lora] trained: {listed(frozen)} would be frozen by [training] frozen or [optimizer] "
            "groups. Name it in one of them only."
        )


def check_dropout(plan: RunPlan) -> None:
    """Raise UserError if the adapters' dropout would differ from one process's."""
    if plan.lora.dropout and plan.sizes.cp > 1 and "reference_rotary" in plan.spec.static:
        raise UserError(
            f"[lora] dropout={plan.lora.dropout} with [model] reference_tokens=true and [parallel] "
            f"cp={plan.sizes.cp}: cp cuts a picture and its reference apart, the numbers of the "
            "dropout in one piece. Set dropout = 0 or cp = 1."
        )


def check_offloaded(plan: RunPlan, config: OptimizerConfig) -> None:
    """Raise UserError if parameters on the host would have to be sent between devices."""
    if not plan.offload.parameters:
        return
    if isinstance(config, MuonConfig):
        raise UserError(
            '[offload] parameters=true does not work with [optimizer] name="muon", which gathers '
            'matrices from device to device. Set parameters = false or name = "adamw".'
        )
    with torch.device("meta"):
        tied = plan.spec.build().tied
    if tied and plan.sizes.pp > 1:
        raise UserError(
            f"[offload] parameters=true does not work with [parallel] pp={plan.sizes.pp} and tied "
            "embeddings, which stages send from device to device. Set parameters = false or pp = 1."
        )


def check_optimizer(plan: RunPlan, objective: Objective, config: OptimizerConfig) -> None:
    """Raise UserError if groups match nothing or twice, or nothing is left to train on a rank."""
    check_offloaded(plan, config)
    shapes = shapes_of(plan, objective)
    check_groups(list(shapes), config.groups)
    trained = trained_of(shapes, plan, config)
    if not trained:
        where = place_of(*config.groups)
        raise UserError(f"{where}: every parameter is frozen. Leave some to train.")
    stages = {stage_of(plan, name) for name in trained}
    for rank in range(plan.sizes.pp):
        if stages.isdisjoint(plan.stages_of(rank)):
            where = "[lora] targets" if plan.lora.rank else place_of(*config.groups)
            raise UserError(
                f"{where}: pipeline rank {rank} would have frozen parameters only. "
                "Choose another [pipeline] split, or a smaller [parallel] pp."
            )
    shards = plan.sizes.shards // plan.sizes.pp
    if config.whole_tensors and shards > 1:
        raise UserError(
            f"[optimizer] name={show(config.name)} updates whole tensors, but {plan.sizes} splits "
            f"each over {shards} ranks. Set [parallel] dp_shard = 1, cp = 1 and tp = 1 (and "
            "dp_replicate), or choose another optimizer."
        )
    config.check(trained, plan.spec)


def stage_of(plan: RunPlan, name: str) -> int:
    """The pipeline stage that holds a parameter."""
    part, key, *_ = name.split(".")
    # A module of the objective in the model is named by its layer, others by words.
    if part == "blocks" or (part == "objective" and key.isdecimal()):
        return next(i for i, layers in enumerate(plan.stage_layers) if int(key) in layers)
    return 0 if part == "embed" else plan.num_stages - 1


def shapes_of(plan: RunPlan, objective: Objective) -> dict[str, torch.Size]:
    """The shapes of all parameters, by the names of a checkpoint."""
    with torch.device("meta"):
        model = plan.spec.build()
    found = {name: p.shape for name, p in model.named_parameters()}
    found |= lora.shapes(model, plan.lora)
    modules = objective.modules()
    if modules is not None:
        found |= {f"objective.{name}": p.shape for name, p in modules.named_parameters()}
    return found


def trained_of(
    shapes: dict[str, torch.Size], plan: RunPlan, config: OptimizerConfig
) -> dict[str, torch.Size]:
    """The entries of `shapes` whose parameters are trained."""
    names = plan.trained(shapes, config.groups)
    return {name: shape for name, shape in shapes.items() if name in names}


def num_trained(plan: RunPlan, objective: Objective, config: OptimizerConfig) -> int:
    """Elements of the whole model's trained parameters."""
    trained = trained_of(shapes_of(plan, objective), plan, config)
    return sum(shape.numel() for shape in trained.values())


def optimizer_lines(plan: RunPlan, objective: Objective, config: OptimizerConfig) -> Iterator[str]:
    """Console lines about the optimizer, the adapters and the parameter groups."""
    shapes = shapes_of(plan, objective)
    trained = trained_of(shapes, plan, config)
    yield from config.lines(trained)
    if plan.lora.rank:
        adapters = [name for name in shapes if lora.is_adapter(name)]
        some = sum(shape.numel() for shape in trained.values())
        yield (
            f"lora    rank {plan.lora.rank}, scale {plan.lora.scale:g}: {len(adapters) // 2} "
            f"layers, {some:,} trained parameters{base_shown(plan)}"
        )
    yield from group_lines({name: s.numel() for name, s in shapes.items()}, config.groups)


def base_shown(plan: RunPlan) -> str:
    """The size of a quantised base, for the console line of adapters; "" for base = "full"."""
    with torch.device("meta"):
        held = quantized.held_bytes(plan.spec.build(), plan.lora)
    if not held:
        return ""
    return f"; base {plan.lora.base}: {len(held)} weights in {sum(held.values()) / 2**20:,.1f} MiB"


def check_folders(config: JobConfig) -> None:
    """Raise UserError if a run's files would become part of the data that it reads."""
    for key, folder in folders_written(config):
        made = Path(os.path.realpath(folder))
        for name, source in folders_read(config):
            data = Path(os.path.realpath(source))
            if data == made or data in made.parents:
                how = "is" if data == made else "lies in"
            elif made in data.parents and data.relative_to(made).parts[0] in run_files.FOLDERS:
                how = "holds, among its own files,"
            else:
                continue
            raise UserError(
                f"{key}={folder} {how} the data {name}={source}, so the run's files would become "
                "part of it. Choose another --job.dir."
            )


def folders_written(config: JobConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, folder) for every folder that a run writes to."""
    yield "[job] dir", str(config.job.folder)
    if config.checkpoint.dir and "://" not in config.checkpoint.dir:
        yield "[checkpoint] dir", config.checkpoint.dir


def folders_read(config: JobConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, folder) of the data that a run reads."""
    for section in (config.data, config.validation, config.fid):
        for name, path, _ in paths_of(section):
            if os.path.isdir(path):  # noqa: PTH112 - of a prefix or a URL it is False.
                yield f"[{section.section}] {name}", path
