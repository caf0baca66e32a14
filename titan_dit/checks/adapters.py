"""Checks of [lora]: its patterns match, and there are trained weights to adapt."""

from __future__ import annotations

import torch
from torch import nn

from titan_dit.config.job import JobConfig
from titan_dit.config.parameter_groups import check_matched, groups_of, listed, matches
from titan_dit.config.section import UserError, show
from titan_dit.config.training import LoRAConfig
from titan_dit.models import lora
from titan_dit.plan import RunPlan


def check_lora(config: JobConfig, plan: RunPlan) -> None:
    """Raise UserError if adapters cannot be trained, or if rank is 0 but another key is set."""
    own, checkpoint = config.lora, config.checkpoint
    if not own.rank:
        if own != LoRAConfig():
            raise UserError("[lora] rank=0 trains without adapters. Set rank, such as rank = 16.")
        return
    if plan.precision.float8 != "off":
        raise UserError(
            f"[lora] rank={own.rank} with [precision] float8={show(plan.precision.float8)}: "
            'adapters have no float8 form. Set float8 = "off".'
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
