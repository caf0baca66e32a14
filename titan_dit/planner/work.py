"""The work of one part of a model on one rank: its FLOPs, moved bytes and messages.

A `Work` belongs to one pass (forward, backward or update) of one part (embed, block, head) of one
rank, for one microbatch. Nothing here knows a model or a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple, TypeAlias, TypeVar

from titan_dit.parallel.fsdp import unit_sizes
from titan_dit.parallel.offload import LEAST_BYTES

Key = TypeVar("Key")


class Product(NamedTuple):
    """A matrix product [m, k] x [k, n], `batch` times in one call."""

    batch: float
    m: float
    n: float
    k: float
    dtype: str
    """One of "fp32", "bf16", "fp16", "float8", "fp64"."""
    is_weight_gradient: bool = False
    """True if it belongs to the second half of a split backward."""

    @property
    def flops(self) -> float:
        """FLOPs: two per multiply-add."""
        return 2 * self.batch * self.m * self.n * self.k


class AttentionCall(NamedTuple):
    """A fused attention kernel. Unfused attention is counted as products and moved bytes."""

    batch: float
    heads: float
    """Query heads of this rank."""
    queries: float
    """Tokens of this rank."""
    keys: float
    """Tokens that they attend to, on other ranks, too."""
    head_dim: float
    dtype: str
    is_causal: bool
    is_backward: bool
    ring: int = 1
    """Ranks of a ring: attention runs in this many blocks and sends meanwhile."""
    hop_bytes: float = 0
    """Bytes that a rank sends in each of the `ring - 1` hops; `messages` has them, too."""

    @property
    def flops(self) -> float:
        """Model FLOPs: 4 q k d per head forward, twice that backward; half with a causal mask."""
        whole = 4 * self.batch * self.heads * self.queries * self.keys * self.head_dim
        return whole * (2 if self.is_backward else 1) * (0.5 if self.is_causal else 1)


class Message(NamedTuple):
    """A collective or a send."""

    axis: str
    """Mesh axis as in the dry run's traffic: "tp", "cp", "dp_shard", "dp_replicate", "pp",
    "all"."""
    operation: str
    """Collective as in the dry run's traffic: "all-gather", "reduce-scatter", "all-reduce", "ring",
    ..."""
    bytes: float
    """Bytes that a rank sends, with the algorithm that sends the fewest (`dry_run.traffic`)."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One pass of one part. Values of the mappings are numbers of calls."""

    products: Mapping[Product, float] = field(default_factory=dict)
    attention: Mapping[AttentionCall, float] = field(default_factory=dict)
    messages: Mapping[Message, float] = field(default_factory=dict)
    """The pass waits for each message; a "ring" is hidden by its `AttentionCall`."""
    moved: float = 0.0
    """Bytes that all other operators read and write if each one is a kernel."""
    fused: float = 0.0
    """Bytes that they read and write if neighbouring elementwise operators and reductions are
    fused."""
    operators: float = 0.0
    """Kernels to launch without fusion, products and attention included."""
    kernels: float = 0.0
    """Kernels to launch with fusion, products and attention included."""

    def __add__(self, other: Work) -> Work:
        """The work of both."""
        return Work(
            products=added(self.products, other.products),
            attention=added(self.attention, other.attention),
            messages=added(self.messages, other.messages),
            moved=self.moved + other.moved,
            fused=self.fused + other.fused,
            operators=self.operators + other.operators,
            kernels=self.kernels + other.kernels,
        )

    def __sub__(self, other: Work) -> Work:
        """The work of `self` without that of `other`, a part of it."""
        return self + other.times(-1)

    def times(self, count: float) -> Work:
        """The work, `count` times."""
        return Work(
            products={key: count * each for key, each in self.products.items()},
            attention={key: count * each for key, each in self.attention.items()},
            messages={key: count * each for key, each in self.messages.items()},
            moved=count * self.moved,
            fused=count * self.fused,
            operators=count * self.operators,
            kernels=count * self.kernels,
        )

    @property
    def flops(self) -> float:
        """FLOPs of products and attention."""
        return sum(
            count * item.flops
            for items in (self.products, self.attention)
            for item, count in items.items()
        )


def added(first: Mapping[Key, float], second: Mapping[Key, float]) -> dict[Key, float]:
    """The sum by key, without keys that add up to 0."""
    both = {key: first.get(key, 0) + second.get(key, 0) for key in (*first, *second)}
    return {key: count for key, count in both.items() if count}


class AllocatedBytes(NamedTuple):
    """Bytes after every allocation and free in a part's passes.

    Each is linear in the microbatch size; their maximum is not.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    gradients: tuple[float, ...]
    """Bytes of parameter gradients within `backward`."""

    def peaks(self, kept: float) -> dict[str, float]:
        """The fields forward_peak, backward_peak and backward_gradients of `Part`."""
        total, gradients = max(zip(self.backward, self.gradients, strict=True), default=(0.0, 0.0))
        return {
            "forward_peak": max(0.0, max(self.forward, default=0.0) - kept),
            "backward_peak": total - gradients,
            "backward_gradients": gradients,
        }


@dataclass(frozen=True, kw_only=True)
class Part:
    """Embed, a block or the head (with the loss) of one tp x cp rank, for one microbatch."""

    forward: Work
    backward: Work
    """Includes what [activation_checkpoint] recomputes and sends again."""
    update: Work
    """Clipping, optimizer, EMA and casts of the part's parameters. All shards of FSDP are counted
    together: a rank of n shards does 1/n of it. Messages over tp sum in fp32 the gradients of which
    each tp rank has a part. The norm's all-reduce over all ranks is not included."""
    parameters: float
    """Elements on a tp rank, all shards of FSDP together."""
    trained: float
    """Elements that are not frozen."""
    buffers: float
    """Bytes of tensors that are held and not trained."""
    kept: float
    """Bytes that forward keeps until backward, its outputs included."""
    forward_peak: float
    """Bytes of temporary tensors at the highest point of forward, above what it keeps."""
    backward_peak: float
    """Bytes at the highest point of backward, above what this part and those before it keep.
    Counted: the gradients of its outputs, its allocations and what is recomputed, less what it
    has freed. Not counted: gradients of parameters. The outputs are free by then if only the next
    part kept them. May be negative."""
    backward_gradients: float
    """Bytes of its parameters' gradients at that point, in the compute dtype."""
    tensors: int
    """Parameter tensors."""
    on_host: Work = field(default_factory=Work)
    """Part of `update` that runs on the host with [offload] parameters: clipping, optimizer,
    EMA."""
    allocated: AllocatedBytes | None = None
    """Bytes at every moment, whose maxima the peaks are; None if not known."""
    quantized: float = 0.0
    """Bytes of quantised weights on a tp rank, all shards of FSDP together; not in `parameters`."""
    storages: tuple[float, ...] = ()
    """Bytes of the storages that are `kept`; empty: all are large."""

    @property
    def small(self) -> float:
        """Bytes of `kept` that [offload] activations leaves on the device."""
        return sum(size for size in self.storages if size < LEAST_BYTES)

    @property
    def unit_size(self) -> float:
        """Elements by which FSDP units are sized, see `fsdp.count_parameters`."""
        return self.parameters + self.quantized / 2


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The counts of a model's parts, for one tp, cp, recomputation mode and microbatch size."""

    embed: Part
    blocks: Mapping[str, Part]
    """Kind (`models.base.kind_of`) -> a block of it."""
    head: Part
    prepare: Work
    """Noise, timesteps, inputs and targets of the objective, per microbatch of this rank."""
    inputs: float
    """Bytes of a prepared sample on a rank: the batch, its noise and targets, and a cp rank's copy
    of its tokens. A step holds those of all its microbatches."""
    static: float
    """Bytes of inputs that do not depend on the sample."""
    stream: float
    """Bytes per rank that a microbatch sends between two pipeline stages."""
    tied: float
    """Elements on a tp rank that the last pipeline stage has a copy of."""

    @property
    def block(self) -> Part:
        """The block of a model whose blocks are all alike."""
        [found] = self.blocks.values()
        return found

    @property
    def parts(self) -> tuple[Part, ...]:
        """Embed, a block of each kind, and the head."""
        return self.embed, *self.blocks.values(), self.head

    def each(self, change: Callable[[Part], Part]) -> Counts:
        """The counts with every part changed."""
        return replace(
            self,
            embed=change(self.embed),
            blocks={kind: change(part) for kind, part in self.blocks.items()},
            head=change(self.head),
        )

    def sum(self, blocks: Blocks, key: str) -> float:
        """The sum over blocks of a number of `Part`, named `key`."""
        return float(sum(count * getattr(self.blocks[kind], key) for kind, count in blocks))

    def units(self, kinds: Sequence[str], size: int | None) -> tuple[Blocks, ...]:
        """The FSDP units of consecutive blocks, see `fsdp.units`."""
        largest = max((self.blocks[kind].unit_size for kind in set(kinds)), default=1.0)
        ends = accumulate(unit_sizes(len(kinds), largest, size), initial=0)
        return tuple(blocks_of(kinds[first:end]) for first, end in pairwise(ends))


Blocks: TypeAlias = tuple[tuple[str, int], ...]
"""Consecutive blocks: (kind, how many in a row)."""


def blocks_of(kinds: Sequence[str]) -> Blocks:
    """Consecutive blocks by their kinds."""
    return tuple((kind, len([*group])) for kind, group in groupby(kinds))


def number_of(blocks: Blocks) -> int:
    """Number of blocks."""
    return sum(count for _, count in blocks)
