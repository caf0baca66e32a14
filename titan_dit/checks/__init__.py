"""Config checks across sections, ranks and device; they run before anything is built.

Sections check their own values. diffusion/fits.py checks a diffusion objective's model and data.
Every message names the section, the values and a fix.
"""

from __future__ import annotations

import torch

from titan_dit.checks import (
    adapters,
    device,
    folders,
    formats,
    layout,
    pipeline_order,
    pipeline_transport,
    torch_parts,
)
from titan_dit.config.job import JobConfig
from titan_dit.plan import RunPlan


def validate(config: JobConfig, plan: RunPlan, on: torch.device | None = None) -> None:
    """Raise UserError on all ranks if settings conflict; with `on`, also check that device."""
    layout.check_spec(plan)
    layout.check_world(plan)
    layout.check_batch(plan)
    layout.check_tensor(plan)
    layout.check_context(plan)
    layout.check_tensor_specs(plan)
    layout.check_pipeline(plan)
    pipeline_order.check_order(plan)
    pipeline_transport.check_keys(plan.pipeline)
    formats.check_compile(plan)
    formats.check_remat(plan)
    formats.check_float8(plan)
    adapters.check_lora(config, plan)
    config.validation.check(has_part=config.data.has_validation_part)
    config.objective.check_sampling(config.model, config.sampling)
    config.evaluation.check()
    config.objective.check_evaluation(config.model, config.sampling, config.evaluation)
    folders.check_folders(config)
    if on is None:
        return
    rings = plan.sizes.cp > 1 and plan.parallel.cp_method == "ring"
    torch_parts.check(profiles_memory=config.profile.memory, rings=rings)
    pipeline_transport.check_host(plan.pipeline)
    device.check_writers(config.metrics)
    device.check_profiled(config.profile, plan)
    device.check_matmuls(plan.precision, plan.parallel.async_tp, on)
    device.check_kernels(plan, on)
