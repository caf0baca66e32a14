"""float8 matmuls in the blocks' linear layers: which layers gain, and how they are replaced.

Weights, gradients and optimizer states keep their dtypes and names, so checkpoints do not depend on
float8. Only the operands of matmuls are cast: just before the matmul, or before their all-gather.
`apply` converts the layers that get faster. torchao is imported only if needed.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
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
from titan_dit.models.base import Model, kind_of
from titan_dit.models.layers import TokenLinear
from titan_dit.parallel import fsdp, transformer_engine
from titan_dit.parallel.mesh import AxisSizes
from titan_dit.parallel.tensor import TensorPlan, TokenFirst, inner
from titan_dit.parallel.transformer_engine import is_transformer_engine
from titan_dit.system.quiet_torchao import load_torchao

UNIT = 16
"""Every dimension of a float8 matmul must be a multiple of this."""


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
    converted, see `is_converted`.
    """
    layers = linears(model, plan, sizes, tokens)
    device = device or device_of(device_type)
    chosen = {
        name: shape for name, shape in layers.items() if is_converted(shape, precision, device)
    }
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
        kinds = {kind_of(block): block for block in model.blocks.values()}
        styles = {k: float8_styles(plan.styles_of(block), block) for k, block in kinds.items()}
        return replace(plan, kinds=styles)
    return plan


def linears(
    model: Model, plan: TensorPlan, sizes: AxisSizes, tokens: int
) -> dict[str, LinearShape]:
    """The blocks' linears over tokens, by name, with their shapes on one rank."""
    found = {}
    for key, block in model.blocks.items():
        styles = plan.styles_of(block)
        for name, layer in block.named_modules():
            if isinstance(layer, TokenLinear):
                style = inner(styles.get(name))
                inputs = layer.in_features // sizes.tp ** isinstance(style, RowwiseParallel)
                outputs = layer.out_features // sizes.tp ** isinstance(style, ColwiseParallel)
                found[f"blocks.{key}.{name}"] = LinearShape(tokens, inputs, outputs)
    return found


def is_converted(shape: LinearShape, precision: PrecisionConfig, device: str) -> bool:
    """True if a layer is to be converted for the named device, see `device_of`."""
    if precision.float8_layers == "all":
        return shape.fits
    return is_faster(shape, precision.float8, device, read_table())


def device_of(device_type: str) -> str:
    """The name of this process's GPU; empty without one."""
    on_gpu = device_type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_name() if on_gpu else ""


def convert(
    model: Model, chosen: Mapping[str, LinearShape], precision: PrecisionConfig, shards: int | None
) -> None:
    """Replace the chosen linears by torchao's, which keep their parameters.

    With tensorwise, FSDP all-gathers a weight in float8 if its rows divide evenly by `shards`. All
    shards of a weight have one scale. `shards` is None without FSDP, as in benchmarks of layers.
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


def named(names: set[str]) -> Callable[[nn.Module, str], bool]:
    """A filter for the modules with these names."""
    return lambda _, name: name in names


def is_not_about_amax(record: logging.LogRecord) -> bool:
    """Log filter: False for torch's lines about reducing an amax."""
    return "Partial(max)" not in record.getMessage()


def float8_styles(
    styles: Mapping[str, ParallelStyle], block: nn.Module
) -> dict[str, ParallelStyle]:
    """A block's styles with tokens all-gathered in float8: half of bf16's bytes.

    An all-gather is replaced if every column-parallel layer that reads it is float8. A
    column-parallel layer in `TokenFirst` gathers its own tokens.
    """
    kind = float8_linear()
    from torchao.float8 import float8_tensor_parallel

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


def float8_linear() -> Any:
    """The class of float8 layers in torchao."""
    load_torchao()
    from torchao.float8.float8_linear import Float8Linear

    return Float8Linear


TABLE = Path(__file__).with_name("float8_shapes.json")
"""Measurements: {"rows": [{device, recipe, M, K, N, bf16_ms, float8_ms}]}.

A row also records date, commit, torch and torchao, which are not read.
"""


BALANCE = {
    "L40S": 362 / 0.864,
    "H100 PCIe": 756 / 2.0,
    "H100 NVL": 835 / 3.9,
    "H100": 989 / 3.35,
    "H200 NVL": 835 / 4.8,
    "H200": 989 / 4.8,
    "B200": 2250 / 8.0,
}
"""Dense bf16 FLOPs per byte of memory traffic: TFLOP/s and TB/s of the vendors' data sheets."""

UNKNOWN_BALANCE = BALANCE["H100"]
"""Assumed for a device that is not in BALANCE."""


@dataclass(frozen=True)
class Cost:
    """A recipe's overhead in bytes per element, and its number of matmuls in float8.

    A layer's training step is three matmuls of M rows, K inputs and N outputs, 2 M K N FLOPs each.
    float8 halves the time of `products` (two or three) of them. The overhead is memory traffic:
    passes over input, weight and output gradient, for the amax and for the casts to the matmuls'
    layouts. So float8 gains if

        products x M K N / (bytes of these passes) > slowdown x FLOPs per byte of the device.
    """

    input: int
    weight: int
    gradient: int
    products: int
    slowdown: float = 1.0
    """Time of the passes over that of their bytes at the data sheet's bandwidth."""


ONE_SLOWDOWN = 2.0
"""On an H200 layers break even at 420 FLOPs per byte, twice its balance: qkv of DiT-XL takes 1.00
times as long in float8, up 0.98, down 0.89 (benchmarks/results/h200-2026-11-26)."""
TWO_SLOWDOWN = 5.3
"""On the same H200 the casts of 8 layers of the 7B shape cost 329 ms of a step and save 244: they
would break even at 1.35 times their 810 FLOPs per byte. Column maxima are most of it."""
ONE_SCALE = Cost(input=6, weight=6, gradient=6, products=3, slowdown=ONE_SLOWDOWN)
"""bf16 read for the amax (2), read for the cast (2), written in two layouts (1 + 1)."""
TWO_SCALES = Cost(input=10, weight=10, gradient=10, products=3, slowdown=TWO_SLOWDOWN)
"""Rows and columns have scales of their own: read (2), cast (2 + 1), for each."""
FUSED = Cost(input=4, weight=4, gradient=4, products=3)
"""Read once (2), written in two layouts (1 + 1): the scale is known before, or per small block."""

COSTS = {
    "tensorwise": ONE_SCALE,
    "rowwise": TWO_SCALES,
    # The weight gradient stays in bf16: input and output gradient are cast in one layout only.
    "rowwise_with_gw_hp": Cost(input=5, weight=10, gradient=5, products=2, slowdown=TWO_SLOWDOWN),
    # Kernels of its own, not measured.
    "te_delayed": FUSED,
    "te_current": replace(ONE_SCALE, slowdown=1.0),
    "te_mxfp8": FUSED,
}


@dataclass(frozen=True)
class LinearShape:
    """A linear layer as one rank runs it."""

    rows: int
    """Tokens of a microbatch."""
    inputs: int
    outputs: int

    @property
    def fits(self) -> bool:
        """True if all sizes are multiples of `UNIT`, as float8 matmuls need."""
        return not any(size % UNIT for size in (self.rows, self.inputs, self.outputs))


@dataclass(frozen=True)
class Measured:
    """Measured forward and backward of one layer."""

    device: str
    recipe: str
    shape: LinearShape
    bf16_ms: float
    float8_ms: float


def read_table(path: Path = TABLE) -> list[Measured]:
    """All measurements, of all devices."""
    rows = json.loads(path.read_text())["rows"]
    return [
        Measured(
            row["device"],
            row["recipe"],
            LinearShape(row["M"], row["K"], row["N"]),
            row["bf16_ms"],
            row["float8_ms"],
        )
        for row in rows
    ]


def is_faster(shape: LinearShape, recipe: str, device: str, table: Sequence[Measured]) -> bool:
    """True if float8 makes the layer faster on the named device ("" without a GPU).

    By measurement if there is one near (`python benchmarks/float8_shapes.py` writes their table),
    else by the roofline, which ignores launch overhead.
    """
    if not shape.fits:
        return False
    near = nearest(shape, [m for m in table if (m.device, m.recipe) == (device, recipe)])
    if near is not None:
        return near.float8_ms < near.bf16_ms
    return intensity(shape, recipe) > COSTS[recipe].slowdown * balance(device)


def nearest(shape: LinearShape, measured: Sequence[Measured]) -> Measured | None:
    """The measurement with the nearest shape; None if a dimension differs by more than 2x."""

    def octaves(one: Measured) -> list[float]:
        pairs = zip(vars(one.shape).values(), vars(shape).values(), strict=True)
        return [abs(math.log2(a / b)) for a, b in pairs]

    close = [one for one in measured if max(octaves(one)) <= 1]
    return min(close, key=lambda one: sum(octaves(one)), default=None)


def intensity(shape: LinearShape, recipe: str) -> float:
    """FLOPs saved per byte of overhead."""
    cost, (m, k, n) = COSTS[recipe], (shape.rows, shape.inputs, shape.outputs)
    moved = cost.input * m * k + cost.weight * k * n + cost.gradient * m * n
    return cost.products * m * k * n / moved


def balance(device: str) -> float:
    """BALANCE by whole words of the device's name, longest match; else UNKNOWN_BALANCE.

    Whole words, because a GH200 or an H20 is not an H200.
    """
    name = f" {device} "
    known = [model for model in BALANCE if f" {model} " in name]
    return BALANCE[max(known, key=len)] if known else UNKNOWN_BALANCE
