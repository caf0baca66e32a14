"""Tables of names; a new model, objective, dataset, optimizer, sampler or schedule adds a row.

A user's own class needs no row: its name is "package.module:Class" (dotted_names.py). Entries are
imported lazily: a config imports only what it uses.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from titan_dit.config import dotted_names
from titan_dit.config.section import Section, UserError, show

if TYPE_CHECKING:  # Reading a config must not import torch.
    from collections.abc import Callable

    from titan_dit.models.base import ModelConfig
    from titan_dit.parallel.tensor import TensorPlan

SECTIONS = {
    "model": {
        "bert": "titan_dit.models.bert_config:BERTConfig",
        "dit": "titan_dit.models.dit_config:DiTConfig",
        "flux2": "titan_dit.models.flux2_config:Flux2Config",
        "gpt": "titan_dit.models.gpt_config:GPTConfig",
        "joint_dit": "titan_dit.models.joint_dit_config:JointDiTConfig",
        "wan": "titan_dit.models.wan_config:WanConfig",
        "z_image": "titan_dit.models.z_image_config:ZImageConfig",
    },
    "objective": {
        "ddpm": "titan_dit.diffusion.sections:DDPMConfig",
        "masked_token": "titan_dit.objectives.sections:MaskedTokenConfig",
        "next_token": "titan_dit.objectives.sections:NextTokenConfig",
        "rectified_flow": "titan_dit.diffusion.sections:RectifiedFlowConfig",
    },
    "data": {
        "digits": "titan_dit.data.sections:Digits",
        "latents": "titan_dit.data.sections:Latents",
        "plays": "titan_dit.data.sections:Plays",
        "sentence_pairs": "titan_dit.data.sections:SentencePairs",
        "synthetic": "titan_dit.data.sections:Synthetic",
        "tokens": "titan_dit.data.sections:Tokens",
    },
    "optimizer": {
        "adamw": "titan_dit.optim.sections:AdamWConfig",
        "adamw8bit": "titan_dit.optim.sections:AdamW8bitConfig",
        "adamw4bit": "titan_dit.optim.sections:AdamW4bitConfig",
        "adamw_fp8": "titan_dit.optim.sections:AdamWFp8Config",
        "muon": "titan_dit.optim.sections:MuonConfig",
    },
}
"""Section -> name -> its dataclass."""

SCHEDULES = {
    "gpipe": "titan_dit.pipeline.schedules.looped:GPIPE",
    "1f1b": "titan_dit.pipeline.schedules.looped:ONE_F_ONE_B",
    "interleaved_1f1b": "titan_dit.pipeline.schedules.looped:INTERLEAVED_1F1B",
    "looped_bfs": "titan_dit.pipeline.schedules.looped:LOOPED_BFS",
    "interleaved_zero_bubble": "titan_dit.pipeline.schedules.looped:INTERLEAVED_ZERO_BUBBLE",
    "zbv_zero_bubble": "titan_dit.pipeline.schedules.v_shaped:ZBV_ZERO_BUBBLE",
    "dualpipev": "titan_dit.pipeline.schedules.v_shaped:DUALPIPEV",
}
"""Pipeline schedules by [pipeline] schedule."""

SAMPLERS = {
    "ddpm": {
        "ddim": "titan_dit.diffusion.samplers.discrete:ddim",
        "ddpm": "titan_dit.diffusion.samplers.discrete:ddpm",
        "dpmpp_2m": "titan_dit.diffusion.samplers.multistep:discrete",
    },
    "rectified_flow": {
        "heun": "titan_dit.diffusion.samplers.ode:heun",
        "euler": "titan_dit.diffusion.samplers.ode:euler",
        "dpmpp_2m": "titan_dit.diffusion.samplers.multistep:flow",
    },
}
"""Objective -> name -> sampler; "auto" takes the first."""

LR_DECAYS = {
    name: f"titan_dit.optim.lr_schedule:{name}"
    for name in ("constant", "linear", "cosine", "wsd", "inverse_square_root")
}
"""Decays of the learning rate after warm-up, by [lr_scheduler] decay."""

TENSOR_PLANS = {
    "bert": "titan_dit.parallel.tensor_plans.bert:plan",
    "dit": "titan_dit.parallel.tensor_plans.dit:plan",
    "flux2": "titan_dit.parallel.tensor_plans.flux2:plan",
    "gpt": "titan_dit.parallel.tensor_plans.gpt:plan",
    "joint_dit": "titan_dit.parallel.tensor_plans.joint_dit:plan",
    "wan": "titan_dit.parallel.tensor_plans.wan:plan",
    "z_image": "titan_dit.parallel.tensor_plans.z_image:plan",
}
"""Tensor plans by [model] name."""

PLAN = "[parallel] tensor_plan"

MEMBERS = {
    "model": {"spec": "the ModelSpec, see titan_dit.models.base.ModelConfig"},
    "objective": {
        "model_spec": "the ModelSpec to train, see titan_dit.objectives.base.ObjectiveConfig",
        "build": "the Objective for a model and a dataset",
    },
    "data": {"open": "the Source, see titan_dit.data.base.DataConfig"},
    "optimizer": {"build": "the Optimizer, see titan_dit.optim.optimizer.OptimizerConfig"},
}
"""Required members of a user's class, by section."""

DEFAULT_NAMES = {"optimizer": "adamw"}
"""Section -> its default `name`."""


def variant(section: str, name: str) -> type[Section]:
    """The section class for `name`, a catalog name or "module:Class".

    Raises UserError if it is unknown or no config section.
    """
    where = f"[{section}] name"
    found: Any = dotted_names.look_up(SECTIONS[section], where, name)
    if ":" in name:
        dotted_names.require(found, MEMBERS[section], where, name)
        is_section = (
            isinstance(found, type) and issubclass(found, Section) and hasattr(found, "name")
        )
        if not (is_section and dataclasses.is_dataclass(found)):
            raise UserError(
                f"{where}={show(name)}: {found.__name__} in {dotted_names.file_of(found)} is not "
                "a config section. Make it a frozen dataclass derived from "
                "titan_dit.config.section.Named."
            )
    kind: type[Section] = found
    return kind


def tensor_plan(model: ModelConfig, chosen: str) -> Callable[[bool], TensorPlan] | None:
    """Look up the tensor plan function `chosen`; "auto": the model's, None if it has none."""
    if chosen == "auto" and model.name not in TENSOR_PLANS:
        return None
    key, name = ("[model] name", model.name) if chosen == "auto" else (PLAN, chosen)
    found: Callable[[bool], TensorPlan] = dotted_names.look_up(TENSOR_PLANS, key, name)
    return found
