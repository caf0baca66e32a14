"""Checks of compilation, recomputation and number formats against each other and the layout."""

from __future__ import annotations

import importlib.util
import math

from titan_dit.config.section import UserError, show
from titan_dit.parallel.transformer_engine import PACKAGE, is_transformer_engine
from titan_dit.plan import RunPlan
from titan_dit.ranks.torch_range import pip_install


def check_compile(plan: RunPlan) -> None:
    """Raise UserError for combinations of [compile] that torch cannot compile.

    A split backward; CUDA graphs with several ranks or microbatches; dynamic shapes of buckets with
    tp, for which torch's compiler does not end.
    """
    settings = plan.compile
    if settings.enabled and settings.shapes == "dynamic" and plan.sizes.tp > 1 and plan.bucket:
        raise UserError(
            f'[compile] shapes="dynamic" with [parallel] tp={plan.sizes.tp}: torch cannot compile '
            'DTensors of dynamic shapes (RecursionError in 2.13). Set shapes = "each" or "auto".'
        )
    if settings.enabled and plan.splits_backward:
        key, other = plan.what_splits
        raise UserError(
            f"[pipeline] {key} splits the backward pass, which torch does not support for compiled "
            f"blocks. Set [compile] enabled = false, or {other}."
        )
    if not (settings.enabled and settings.cuda_graphs):
        return
    ranks, passes = math.prod(vars(plan.sizes).values()), plan.num_microbatches
    if ranks > 1:
        raise UserError(
            f"[compile] cuda_graphs=true is for one GPU, but {ranks} ranks were started. "
            "Set cuda_graphs = false."
        )
    if passes > 1:
        raise UserError(
            f"[compile] cuda_graphs=true keeps the activations of one microbatch, but a step has "
            f"{passes}. Set cuda_graphs = false, or [training] microbatch_size = "
            f"{plan.global_batch_size}."
        )


def check_remat(plan: RunPlan) -> None:
    """Raise UserError for modes that torch cannot run, or that recompute a block several times."""
    config, sizes = plan.activation_checkpoint, plan.sizes
    if config.mode in ("selective", "full") and plan.splits_backward:
        # selective: "Trying to backward an extra time". full: correct, but each partial backward
        # (one for the inputs, one per linear layer) recomputes the whole forward.
        key, other = plan.what_splits
        raise UserError(
            f'[activation_checkpoint] mode="{config.mode}" does not work with [pipeline] {key}: '
            "its backward is split, and torch would recompute a block for each part. "
            f'Set mode = "attention" or {other}.'
        )
    if config.mode in ("attention", "full") and plan.compile.enabled and sizes.tp > 1:
        # torch 2.13: "expected all tensors_saved_with_vc_check to be Tensors, got DeviceMesh".
        raise UserError(
            f'[activation_checkpoint] mode="{config.mode}" does not work with [compile] '
            f"enabled=true and [parallel] tp={sizes.tp}: torch cannot compile the recomputed "
            "all-gather. "
            'Set mode = "selective" or [compile] enabled = false.'
        )


def check_offload(plan: RunPlan) -> None:
    """Raise UserError for settings with which [offload] does not work."""
    own = plan.offload
    if own.activations and plan.splits_backward:
        key, other = plan.what_splits
        raise UserError(
            f"[offload] activations=true does not work with [pipeline] {key}: its backward is "
            f"split, and would copy a block's activations back for each part. Set {other}."
        )
    mode, compiled = plan.activation_checkpoint.mode, plan.compile.enabled
    if own.activations and mode == "selective" and not compiled:
        raise UserError(
            '[offload] activations=true with [activation_checkpoint] mode="selective" needs '
            "[compile] enabled=true: uncompiled, torch holds what is not recomputed where no hook "
            'sees it. Set enabled = true, or mode = "full" or "none".'
        )
    if own.activations and plan.compile.cuda_graphs and compiled:
        raise UserError(
            "[offload] activations=true does not work with [compile] cuda_graphs=true, whose "
            "activations have fixed addresses. Set cuda_graphs = false."
        )
    if own.parameters and plan.precision.float8 not in ("off", "rowwise", "rowwise_with_gw_hp"):
        raise UserError(
            f"[offload] parameters=true does not work with [precision] float8="
            f"{show(plan.precision.float8)}, which computes scales of the shards on the device. "
            'Set float8 = "rowwise" or "off".'
        )


def check_float8(plan: RunPlan) -> None:
    """Raise UserError for float8 or async_tp that conflicts with other settings.

    `checks.device.check_matmuls` checks the device.
    """
    precision = plan.precision
    if plan.parallel.async_tp:
        check_async_tp(plan)
    if precision.float8 == "off":
        return
    if precision.dtype == "fp64":
        raise UserError(
            f'[precision] dtype="fp64" is for comparing layouts, float8={show(precision.float8)} '
            'rounds to 3 bits. Set float8 = "off" or dtype = "bf16".'
        )
    if precision.dtype == "fp16":
        raise UserError(
            f'[precision] dtype="fp16" does not work with float8={show(precision.float8)}: devices '
            'with float8 have bf16. Set dtype = "bf16" or float8 = "off".'
        )
    if precision.dtype == "fp32" and "rowwise" in precision.float8 and not precision.float8_emulate:
        raise UserError(
            f"[precision] float8={show(precision.float8)} outputs bf16, but dtype is "
            '"fp32". Set dtype = "bf16" or float8 = "tensorwise".'
        )
    if is_transformer_engine(precision.float8):
        check_transformer_engine(plan)


def check_async_tp(plan: RunPlan) -> None:
    """Raise UserError for async_tp without tp > 1, sequence parallelism and compilation."""
    if plan.sizes.tp == 1 or not plan.parallel.sequence_parallel or not plan.compile.enabled:
        raise UserError(
            f"[parallel] async_tp=true overlaps the all-gathers and reduce-scatters of compiled "
            f"blocks with their matrix products, but tp={plan.sizes.tp}, sequence_parallel="
            f"{show(plan.parallel.sequence_parallel)} and [compile] enabled="
            f"{show(plan.compile.enabled)}. Set async_tp = false, or tp above 1 and both to true."
        )
    if plan.lora.base != "full":
        raise UserError(
            f"[parallel] async_tp=true works on weights that are numbers, but [lora] "
            f'base={show(plan.lora.base)} holds codes. Set async_tp = false, or base = "full".'
        )


def check_transformer_engine(plan: RunPlan) -> None:
    """Raise UserError for settings that Transformer Engine does not support.

    Emulation, tp, pp, compilation, selective or full remat.
    """
    float8 = show(plan.precision.float8)
    if plan.precision.float8_emulate:
        raise UserError(
            f"[precision] float8={float8} cannot be emulated: Transformer Engine needs a GPU. "
            'Set float8 = "tensorwise" with float8_emulate = true, or float8_emulate = false.'
        )
    if plan.sizes.tp > 1 or plan.sizes.pp > 1:
        raise UserError(
            f"[precision] float8={float8} does not work with [parallel] tp={plan.sizes.tp}, "
            f"pp={plan.sizes.pp}: Transformer Engine's layers take no DTensors, and all-reduce "
            "their amax over ranks with the same layers. "
            'Set float8 = "tensorwise", or tp = 1 and pp = 1.'
        )
    if plan.compile.enabled:
        raise UserError(
            f"[precision] float8={float8} does not work with [compile] enabled=true: Transformer "
            'Engine\'s layers break the graph. Set enabled = false or float8 = "tensorwise".'
        )
    if plan.activation_checkpoint.mode in ("selective", "full"):
        raise UserError(
            f"[precision] float8={float8} does not work with [activation_checkpoint] "
            f"mode={show(plan.activation_checkpoint.mode)}: a recomputed forward would record "
            "every amax twice. "
            'Set mode = "attention" or "none", or float8 = "tensorwise".'
        )
    if importlib.util.find_spec("transformer_engine") is None:
        raise UserError(
            f"[precision] float8={float8} needs Transformer Engine, which is not installed. "
            f"Install it with: {pip_install(PACKAGE)}, "
            'or set float8 = "tensorwise".'
        )
