"""Seconds of work on a device: products, attention, moved bytes, messages, launches.

A roofline, max(FLOPs / rate, bytes / rate), whose rates are the peaks of the device times its
`Efficiency`, times a factor below 1 for shapes that do not fill the kernels' tiles.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from titan_dit.planner.hardware import Device
from titan_dit.planner.links import Network
from titan_dit.planner.work import AttentionCall, Product, Work


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """How a trainer runs a step. The defaults are titan_dit's; others are published trainers'."""

    is_fused: bool | None = None
    """True if elementwise operators are fused. None: as [compile] says."""
    sharding: Literal["fsdp", "gradients", "replicas"] = "fsdp"
    """Meaning of dp_shard. "fsdp": FSDP. "gradients": FSDP that keeps parameters gathered
    (SHARD_GRAD_OP). "replicas": plain replicas, whose gradients are all-reduced."""
    overlaps_data: bool = True
    """Gathers and reductions over data-parallel ranks hide behind computing."""
    reduces_each_microbatch: bool = False
    """Gradients are reduced over data-parallel ranks in every microbatch, not in the last one."""
    gather_bytes: int | None = None
    """Bytes per parameter of an all-gather; None takes the itemsize of [precision] dtype."""
    gradient_bytes: int = 4
    """Bytes per gradient of a reduction over data-parallel ranks."""
    update_bytes: float | None = None
    """Bytes read and written per parameter by clipping, optimizer and casts; None: counted."""
    state_bytes: float | None = None
    """Bytes of weights, gradients and optimizer per parameter; None: counted."""
    blocking_messages: bool = False
    """A pipeline rank does not compute while it sends. Receiving at the same time costs nothing
    more."""
    scattered_messages: bool = False
    """Stage messages are cut over the tp ranks and gathered inside the node."""
    attention_dropout: bool = False
    """Dropout of unfused attention's probabilities: one more mask read and written."""


OURS = Runtime()


ITEM_BYTES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2, "float8": 1}
OUTPUT_BYTES = ITEM_BYTES | {"float8": 2}
"""Products of float8 are written in bf16."""
SHORT_SIDE = 96
"""A product whose shortest side is this long reaches half the rate of a large one: tiles of 128 x
128 are cut, and a short sum waits at its first and last steps. Assumed, not fitted."""
TILE = 128
"""Rows and columns of a tile of fused attention."""
FULL_HEAD = 128
"""Head dim at which `Efficiency.attention` is measured."""
HEAD_OVERHEAD = 32
"""Softmax and loads of a key cost as much as this many channels: head dim 64 reaches 5/6 of the
rate of 128, about what the figures of arXiv:2307.08691 show."""
CAUSAL_TILES = 3
"""Tiles that attention with a causal mask loses at the ends and to the mask. Assumed."""
BACKWARD_TILES = 2
"""Tiles that backward without a mask loses for forward's one. On an H200 it reaches 0.44, 0.82 and
0.94 of its rate of long sequences at 256, 1,024 and 4,096 tokens with cuDNN, 0.57, 0.84 and 0.97
with FlashAttention-2 (benchmarks/results/h200-2026-11-26); forward 0.67, 0.92 and 1."""
BACKWARD_FLOPS = 2.5 / 2
"""Backward of fused attention has 5 products for forward's 2; model FLOPs count 4."""
BACKWARD_RATE = 0.85
"""FlashAttention-2 reaches up to 73% of an A100's peak forward, 63% backward (arXiv:2307.08691
section 4.1); on an H200, at 16,384 tokens, it has 0.89 of forward's rate, and cuDNN 0.84."""


@functools.lru_cache(maxsize=2**16)
def product_s(product: Product, device: Device) -> float:
    """Seconds of a product. UserError if the device does not have its format."""
    batch, m, n, k, dtype = product[:5]
    peak = device.peak(dtype) * device.efficiency.products
    item = ITEM_BYTES[dtype]
    nbytes = batch * (item * (m * k + k * n) + OUTPUT_BYTES[dtype] * m * n)
    return max(product.flops / (peak * shape_factor(m, n, k)), moved_s(nbytes, device))


def shape_factor(m: float, n: float, k: float) -> float:
    """Share of a large product's rate: half at a shortest side of `SHORT_SIDE`."""
    return 1 / (1 + SHORT_SIDE / min(m, n, k))


@functools.lru_cache(maxsize=2**16)
def block_s(attention: AttentionCall, device: Device) -> float:
    """Seconds of one call of a fused attention kernel; for a ring, of one of its blocks."""
    keys = attention.keys / attention.ring
    flops = attention.flops / attention.ring
    rate = device.peak(attention.dtype) * device.efficiency.attention
    rate *= head_factor(attention.head_dim, device.head_step)
    rate *= length_factor(keys, attention.is_causal, attention.is_backward)
    tensors = attention.queries + keys  # q and o; k and v
    passes = 2
    if attention.is_backward:
        flops, rate, passes = flops * BACKWARD_FLOPS, rate * BACKWARD_RATE, 4
    elements = passes * attention.batch * attention.heads * tensors * attention.head_dim
    return max(flops / rate, moved_s(ITEM_BYTES[attention.dtype] * elements, device))


def head_factor(head_dim: float, step: int) -> float:
    """Share of the rate at head dim 128. Head dims are padded to a multiple of `step`."""
    padded = -(-head_dim // step) * step
    full = FULL_HEAD / (FULL_HEAD + HEAD_OVERHEAD)
    return min(1.0, head_dim / (padded + HEAD_OVERHEAD) / full)


def length_factor(keys: float, is_causal: bool, is_backward: bool = False) -> float:
    """Share of the rate of long sequences: tiles at the ends and at a causal mask are cut."""
    tiles = CAUSAL_TILES if is_causal else BACKWARD_TILES if is_backward else 1
    return 1 / (1 + tiles * TILE / keys)


def attention_s(attention: AttentionCall, device: Device, links: Network) -> float:
    """Seconds of fused attention; the hops of a ring hide behind its blocks.

    As `parallel.ring_attention` does it: a block of keys is sent on while it is attended to.
    """
    block = block_s(attention, device)
    if attention.ring == 1:
        return block
    if attention.is_backward:
        return ring_backward_s(attention, block, links)
    hop = links.hop_s(attention.hop_bytes, "cp")
    return block + (attention.ring - 1) * max(block, hop)


def ring_backward_s(attention: AttentionCall, block: float, links: Network) -> float:
    """Seconds of a ring's backward, one of whose blocks takes `block`.

    Gradients of keys and values follow their block, one hop behind: those of a rank's own block
    are not sent, the first ones hide behind the third block, and nothing hides the last ones.
    """
    item = ITEM_BYTES[attention.dtype]
    sums = max(item, ITEM_BYTES["fp32"])
    keys_s, gradients_s = (
        links.hop_s(attention.hop_bytes * own / (item + sums), "cp") for own in (item, sums)
    )
    if attention.ring == 2:
        return max(block, keys_s) + block + gradients_s
    # The ends send either keys or gradients, the blocks between them both.
    between = (attention.ring - 3) * max(block, keys_s + gradients_s)
    return 2 * max(block, keys_s) + between + max(block, gradients_s) + gradients_s


def moved_s(nbytes: float, device: Device) -> float:
    """Seconds in which elementwise kernels read and write `nbytes` together."""
    return nbytes / (1e9 * device.copy_gb_per_s * device.efficiency.moved)


def host_s(nbytes: float, device: Device) -> float:
    """Seconds in which `nbytes` are copied to the host, or back."""
    return nbytes / (1e9 * device.host_gb_per_s)


def host_step_s(nbytes: float, device: Device) -> float:
    """Seconds in which a rank reads and writes `nbytes` of host memory, as all of its node do."""
    return nbytes * device.gpus_per_node / (1e9 * device.host_memory_gb_per_s)


def seconds(work: Work, device: Device, links: Network, *, fused: bool) -> dict[str, float]:
    """Seconds of work, one operator after another; the terms add up.

    "products", "attention", "elementwise", "tp" and "cp" (messages that the work waits for), every
    other axis that it sends on, and "launches": host time beyond the device's.
    """
    terms = defaultdict[str, float](float)
    terms["products"] = sum(
        count * product_s(product, device) for product, count in work.products.items()
    )
    terms["attention"] = sum(
        count * attention_s(attention, device, links) for attention, count in work.attention.items()
    )
    terms["elementwise"] = moved_s(work.fused if fused else work.moved, device)
    terms["tp"] = terms["cp"] = 0.0
    for message, count in work.messages.items():
        if message.operation != "ring":
            terms[message.axis] += count * links.seconds(message)
    host = 1e-6 * device.launch_us * (work.kernels if fused else work.operators)
    terms["launches"] = max(0.0, host - sum(terms.values()))
    return dict(terms)
