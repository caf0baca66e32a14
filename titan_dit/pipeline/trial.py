"""What a run needs of its machine, tried before anything is built: attention, the compiler."""

from __future__ import annotations

from typing import Any

import torch

from titan_dit.config import JobConfig
from titan_dit.parallel import attention, compile
from titan_dit.parallel.fsdp import DTYPES
from titan_dit.parallel.mesh import AxisSizes

Config = JobConfig[Any, Any, Any]


def try_out(config: Config, sizes: AxisSizes, device: torch.device) -> None:
    """Raise a UserError where the first step would fail."""
    attention.check(config.precision.attention, attention_shape(config, sizes, device))
    compile.check(config.compile, device)


def attention_shape(config: Config, sizes: AxisSizes, device: torch.device) -> attention.Shape:
    """What attention sees of one sample on one rank."""
    tokens, model = config.model.token_shape[0], config.model
    hidden, heads = model.stream_shapes(1, tokens)[0][-1], model.num_heads
    ring = sizes.cp > 1 and config.parallel.cp_method == "ring"
    exchanged = 1 if ring else sizes.cp
    return attention.Shape(
        heads=heads // sizes.tp // exchanged,
        tokens=tokens // sizes.cp if ring else tokens,
        head_dim=hidden // heads,
        dtype=DTYPES[config.precision.dtype],
        device=device,
        ring=ring,
    )


def attention_cost(config: Config, device: torch.device, flops_per_sample: int) -> str | None:
    """A line about a head dim that costs more than it gives, on a GPU; None where it does not.

    Attention is 12 n^2 h FLOPs per layer, n tokens and h hidden, forward and backward: a product of
    queries and keys and one with the values, and twice that in backward.
    """
    shape = attention_shape(config, AxisSizes(), device)
    if device.type != "cuda":
        return None
    own = 12 * shape.tokens**2 * shape.heads * shape.head_dim * config.model.num_layers
    line = attention.padding(shape.head_dim, shape.tokens, own / flops_per_sample)
    return line and (
        f"{line}. python -m titan_dit bench attention --heads {shape.heads} --head-dim "
        f"{shape.head_dim} --tokens {shape.tokens} measures it"
    )
