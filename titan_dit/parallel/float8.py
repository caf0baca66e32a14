"""float8 matmuls in the blocks' linears. Only this file imports torchao, and only if needed.

Weights, gradients and optimizer states keep their dtypes and names, so checkpoints do not depend on
float8. Only operands of matmuls are cast: just before the matmul, or before their all-gather.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
)

from titan_dit.config.layout import PrecisionConfig
from titan_dit.config.section import UserError, show
from titan_dit.models.base import Model
from titan_dit.models.layers import TokenLinear
from titan_dit.parallel import fsdp, transformer_engine
from titan_dit.parallel.float8_gains import UNIT, LinearShape, gains, read_table
from titan_dit.parallel.mesh import AxisSizes
from titan_dit.parallel.tensor import TensorPlan
from titan_dit.parallel.token_order import TokenFirst, inner
from titan_dit.parallel.transformer_engine import is_transformer_engine


def apply(
    model: Model,
    plan: TensorPlan,
    precision: PrecisionConfig,
    sizes: AxisSizes,
    tokens: int,
    device_type: str,
    device: str = "",
) -> TensorPlan:
    """Convert a model on the meta device, before tensor parallelism; returns the adapted plan.

    `tokens`: tokens of a microbatch on this rank. Raises UserError if no layer fits float8. Layers
    that float8 would not make faster on `device` (empty: the device of this process) are not
    converted, see `suits`.
    """
    layers = linears(model, plan, sizes, tokens)
    device = device or device_of(device_type)
    chosen = {name: shape for name, shape in layers.items() if suits(shape, precision, device)}
    if layers and not any(shape.fits for shape in layers.values()):
        shapes = sorted({(s.rows, s.inputs, s.outputs) for s in layers.values()})
        raise UserError(
            f"[precision] float8={show(precision.float8)} needs dimensions that are multiples of "
            f"{UNIT}, but (tokens of a microbatch, inputs, outputs) on a rank are "
            f"{', '.join(map(str, shapes))}. Set float8 = "
            '"off", or another [training] microbatch_size.'
        )
    if is_transformer_engine(precision.float8):
        transformer_engine.convert(model, chosen.keys(), precision.float8)
        return plan
    convert(model, chosen, precision, sizes.product("fsdp"))
    # gloo cannot send float8: without CUDA, tokens are gathered in their own dtype.
    if sizes.tp > 1 and precision.float8 == "tensorwise" and device_type == "cuda":
        return replace(plan, block=float8_styles(plan.block, model))
    return plan


def linears(
    model: Model, plan: TensorPlan, sizes: AxisSizes, tokens: int
) -> dict[str, LinearShape]:
    """The blocks' linears over tokens, by name, with their shapes on one rank."""
    found = {}
    for key, block in model.blocks.items():
        for name, layer in block.named_modules():
            if isinstance(layer, TokenLinear):
                style = inner(plan.block.get(name))
                inputs = layer.in_features // sizes.tp ** isinstance(style, RowwiseParallel)
                outputs = layer.out_features // sizes.tp ** isinstance(style, ColwiseParallel)
                found[f"blocks.{key}.{name}"] = LinearShape(tokens, inputs, outputs)
    return found


def suits(shape: LinearShape, precision: PrecisionConfig, device: str) -> bool:
    """True if a layer is to be converted for the named device, see `device_of`."""
    if precision.float8_layers == "all":
        return shape.fits
    return gains(shape, precision.float8, device, read_table())


def device_of(device_type: str) -> str:
    """The name of this process's GPU; empty without one."""
    on_gpu = device_type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_name() if on_gpu else ""


def convert(
    model: Model, chosen: Mapping[str, LinearShape], precision: PrecisionConfig, shards: int | None
) -> None:
    """Replace the chosen linears by torchao's, which keep their parameters.

    With tensorwise, FSDP all-gathers a weight in float8 if its rows divide evenly by `shards`. All
    shards of a weight have one scale. `shards` is None without FSDP.
    """
    torchao = load_torchao()
    recipe = torchao.Float8LinearConfig.from_recipe_name(precision.float8)
    plain = replace(recipe, emulate=precision.float8_emulate)
    gathered = plain
    if precision.float8 == "tensorwise" and shards:
        gathered = replace(plain, enable_fsdp_float8_all_gather=True)

    # FSDP2 cannot all-gather float8 weights from shards of unequal size.
    even = {name for name, shape in chosen.items() if shards and shape.outputs % shards == 0}
    for config, names in ((gathered, even), (plain, chosen.keys() - even)):
        torchao.convert_to_float8_training(model, module_filter_fn=named(names), config=config)
    if gathered is not plain:
        # With tp, torch logs that it reduces each amax over two axes in turn.
        logging.getLogger("torch.distributed.tensor._redistribute").addFilter(is_not_about_amax)


def scale_before_gathers(model: nn.Module, *, pipelined: bool) -> None:
    """Recompute the scales of float8 all-gathers before they start; call it after `fsdp.shard`.

    Weights change between passes: by a step, a checkpoint, a swapped-in average. A stale scale
    would clip values that have grown.

    `pipelined`: `fsdp.gather` starts the all-gathers of a pass. Otherwise forwards do.
    """
    kind = float8_linear()
    if not any(
        isinstance(layer, kind) and layer.config.enable_fsdp_float8_all_gather
        for layer in model.modules()
    ):
        return
    if pipelined:
        # Not a forward hook: replicas may run forwards in different orders, but must all-reduce the
        # scales in one order.
        fsdp.before_gathers(model, compute_scales)
    else:
        # Before FSDP's hook: its stream casts the weights, and waits only for earlier work.
        model.register_forward_pre_hook(lambda module, _: compute_scales(module), prepend=True)


def compute_scales(model: nn.Module) -> None:
    """Compute the scales of all float8 weights, with one all-reduce."""
    load_torchao().precompute_float8_dynamic_scale_for_fsdp(model)


def console_lines(parts: Iterable[nn.Module], precision: PrecisionConfig) -> list[str]:
    """Console line with the number of torchao's float8 layers; empty if torchao is not in use."""
    if precision.float8 == "off" or is_transformer_engine(precision.float8):
        return []
    kind = float8_linear()
    layers = [layer for part in parts for layer in part.modules()]
    number = sum(isinstance(layer, kind) for layer in layers)
    total = number + sum(isinstance(layer, TokenLinear) for layer in layers)
    why = "" if number else ': no layer would be faster (float8_layers = "all" takes all that fit)'
    return [f"float8  {precision.float8} in {number} of {total} block linears of this rank{why}"]


def is_not_about_amax(record: logging.LogRecord) -> bool:
    """Log filter: False for torch's lines about reducing an amax."""
    return "Partial(max)" not in record.getMessage()


def named(names: set[str]) -> Callable[[nn.Module, str], bool]:
    """A filter for the modules with these names."""
    return lambda _, name: name in names


def float8_styles(styles: Mapping[str, ParallelStyle], model: Model) -> dict[str, ParallelStyle]:
    """A block's styles with tokens all-gathered in float8: half of bf16's bytes.

    An all-gather is replaced if every column-parallel layer that reads it is float8. A
    column-parallel layer in `TokenFirst` gathers its own tokens.
    """
    kind = float8_linear()
    from torchao.float8 import float8_tensor_parallel

    block = next(iter(model.blocks.values()))
    layers = {
        name: isinstance(layer, kind) for name, layer in block.named_modules() if name in styles
    }
    replaced = dict(styles)
    for name, style in styles.items():
        columns_alone = inner(style)
        if isinstance(style, TokenFirst) and isinstance(columns_alone, ColwiseParallel):
            if layers[name] and isinstance(columns_alone.input_layouts[0], Shard):
                gathering = float8_tensor_parallel.Float8ColwiseParallel
                gathered = gathering(input_layouts=columns_alone.input_layouts[0])
                replaced[name] = TokenFirst(gathered)
        elif isinstance(style, PrepareModuleInput):
            inside = [k for k in layers if k.startswith(f"{name}.")]
            columns = [k for k in inside if isinstance(styles[k], ColwiseParallel)]
            if not all(layers[k] for k in columns) or not isinstance(gathered_from(style), Shard):
                continue
            replaced[name] = float8_tensor_parallel.PrepareFloat8ModuleInput(
                input_layouts=style.input_layouts, desired_input_layouts=style.desired_input_layouts
            )
            for k in columns:
                replaced[k] = float8_tensor_parallel.Float8ColwiseParallel()
    return replaced


def gathered_from(style: PrepareModuleInput) -> Any:
    """Placement of the first input before the all-gather."""
    layouts = style.input_layouts
    return layouts[0] if isinstance(layouts, tuple) else layouts


def float8_linear() -> Any:
    """The class of float8 layers in torchao."""
    load_torchao()
    from torchao.float8.float8_linear import Float8Linear

    return Float8Linear


def load_torchao() -> ModuleType:
    """Import torchao.float8 without its warnings about missing CUDA libraries."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torchao.float8
    finally:
        logging.disable(logging.NOTSET)
    module: ModuleType = torchao.float8
    return module
