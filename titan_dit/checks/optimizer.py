"""Checks that the optimizer can train the model's parameters in the layout."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from titan_dit.config.parameter_groups import check_groups, group_lines, place_of
from titan_dit.config.section import UserError, show
from titan_dit.models import lora
from titan_dit.objectives.base import Objective
from titan_dit.optim.optimizer import OptimizerConfig
from titan_dit.plan import RunPlan


def check_optimizer(plan: RunPlan, objective: Objective, config: OptimizerConfig) -> None:
    """Raise UserError if groups match nothing or twice, or nothing is left to train on a rank."""
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
    part, _, rest = name.partition(".")
    if part != "blocks":
        return 0 if part == "embed" else plan.num_stages - 1
    layer = int(rest.partition(".")[0])
    return next(i for i, layers in enumerate(plan.stage_layers) if layer in layers)


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
            f"layers, {some:,} trained parameters"
        )
    yield from group_lines({name: s.numel() for name, s in shapes.items()}, config.groups)
