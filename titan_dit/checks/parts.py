"""Checks that objective, model spec and data fit together, by a run on two samples of zeros."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from titan_dit.config import dotted_names
from titan_dit.config.section import UserError, show
from titan_dit.data.base import Batch, Field, Source
from titan_dit.data.loader import load_samples
from titan_dit.execution.base import check_names
from titan_dit.models.base import ModelSpec, TensorSpec
from titan_dit.objectives.base import Objective, Prepared
from titan_dit.plan import RunPlan
from titan_dit.rng import SampleRNG

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
    *,
    previews: bool = False,
) -> None:
    """Raise a UserError if the parts do not fit; with a source, its first row is read.

    `data`: the name of [data]. `previews`: True if the objective must implement `preview`.
    """
    check_members(objective, previews)
    check_fields(fields, objective, data)
    if source is not None:
        check_row(source, objective, data)
    check_modules(plan, objective)
    rng = SampleRNG(plan.seed, torch.arange(ROWS))
    zeros = {name: rows_of(field) for name, field in fields.items()}
    batch = Batch(zeros, rng.sample_numbers, torch.ones(ROWS), float(ROWS))
    prepared: Prepared = attempt("prepare", lambda: objective.prepare(batch, rng))
    check_prepared(prepared, plan.spec)
    check_loss(objective, prepared, plan.spec)
    check_described(attempt("describe", lambda: objective.describe({}, rng)))


def check_members(objective: Objective, previews: bool) -> None:
    """Refuse an objective without the required members or base class."""
    members = MEMBERS | ({"preview": "samples for [sampling]"} if previews else {})
    dotted_names.require(type(objective), members, "[objective] name", type(objective).__name__)
    if not isinstance(objective, Objective):
        raise UserError(
            f"[objective] builds a {type(objective).__name__}, which is no "
            "titan_dit.objectives.base.Objective. Inherit from that class."
        )


def check_fields(fields: Mapping[str, Field], objective: Objective, data: str) -> None:
    """Refuse data without a field that the objective takes; `data` is the name of [data]."""
    missing = [name for name in objective.takes if name not in fields]
    if missing:
        raise UserError(
            f"[data] name={show(data)} has the fields {', '.join(fields)}, but [objective] "
            f"takes {', '.join(objective.takes)}: {', '.join(missing)} is missing. Choose matching "
            "data or another objective."
        )


def check_source(source: Source, data: str) -> None:
    """Refuse data that does not open a `Source` with fields and facts."""
    wrong = [name for name in ("fields", "facts") if not hasattr(source, name)]
    if not isinstance(source, Source) or wrong:
        lacks = f" without {', '.join(wrong)}" if wrong else ""
        raise UserError(
            f"[data] name={show(data)} opens a {type(source).__name__}{lacks}. Return a "
            "titan_dit.data.base.Source that sets fields and facts."
        )


def check_row(source: Source, objective: Objective, data: str) -> None:
    """Refuse a source whose first row does not match its declared fields."""
    row = load_samples(source, [(0, 0)], objective.inspect, torch.device("cpu"), 1.0).fields
    for name, field in source.fields.items():
        found = row.get(name)
        declared = f"{name} {field}"
        if found is None:
            raise UserError(f"[data] name={show(data)} declares {declared}, but reads no {name}.")
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
    """Refuse objective modules with a split backward, run-time order or values already set."""
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
    """Refuse model inputs of other names, shapes or dtypes than the spec declares."""
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
    """Refuse a loss that is not one value per token in fp32 or fp64."""
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
    """Refuse entries for the fault log that are not one number per sample."""
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
