"""Config checks across sections, ranks and device; they run before anything is built.

Sections check their own values, diffusion/fits.py what a diffusion objective needs. Every
message names the section, the values and a fix.
"""

from __future__ import annotations

import torch

from titan_dit.checks import device, formats, layout, parts, pipeline
from titan_dit.config.job import JobConfig
from titan_dit.plan import RunPlan


def validate(config: JobConfig, plan: RunPlan, on: torch.device | None = None) -> None:
    """Raise UserError on all ranks if settings conflict; with `on`, also check that device."""
    check_plan(plan)
    parts.check_lora(config, plan)
    config.validation.check(has_part=config.data.has_validation_part)
    config.objective.check_sampling(config.model, config.sampling)
    config.fid.check()
    config.objective.check_evaluation(config.model, config.sampling, config.fid)
    parts.check_folders(config)
    if on is None:
        return
    rings = plan.sizes.cp > 1 and plan.parallel.cp_method == "ring"
    device.check_torch_parts(profiles_memory=config.profile.memory, rings=rings)
    pipeline.check_transport_of_host(plan.pipeline)
    device.check_writers(config.metrics)
    device.check_profiled(config.profile, plan)
    device.check_matmuls(plan.precision, plan.parallel.async_tp, on)
    device.check_base(plan, on)
    device.check_kernels(plan, on)


def check_plan(plan: RunPlan) -> None:
    """Raise UserError on all ranks if a layout, batch and pipeline do not fit the model."""
    layout.check_spec(plan)
    layout.check_world(plan)
    layout.check_batch(plan)
    layout.check_tensor(plan)
    layout.check_context(plan)
    layout.check_tensor_specs(plan)
    layout.check_pipeline(plan)
    pipeline.check_order(plan)
    pipeline.check_transport(plan.pipeline)
    formats.check_compile(plan)
    formats.check_remat(plan)
    formats.check_float8(plan)
    formats.check_offload(plan)
