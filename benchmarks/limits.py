"""Roofline of a DiT training step: the least time of every term on a device.

docs/roofline.md derives the counts. All are per rank and step: b samples of s tokens, width h, MLP
width f, l layers, P parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from titan_dit.config.section import UserError
from titan_dit.models.dit_config import DiTConfig

BF16, FP32 = 2, 4
"""Bytes per element."""


@dataclass(frozen=True)
class Ceilings:
    """Ceilings of a device and its links."""

    gemm_tflops: float
    """A large bf16 product."""
    copy_gb_per_s: float
    """A copy in device memory, bytes read plus written."""
    attention_tflops: float | None = None
    """Model FLOP/s of attention, forward and backward; default gemm_tflops."""
    peak_tflops: float | None = None
    """From the data sheet, for MFU."""
    link_gb_per_s: float | None = None
    """Bandwidth of a rank along dp_shard and dp_replicate."""
    inner_gb_per_s: float | None = None
    """Bandwidth of a rank along tp and cp; default link_gb_per_s."""


@dataclass(frozen=True)
class Work:
    """The work of a rank and step."""

    config: DiTConfig
    output_channels: int
    batch: int
    """Samples per step of the rank, or of its whole tp x cp group."""
    is_compiled: bool = True
    remat: str = "none"
    microbatches: int = 1
    num_averages: int = 1
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Ranks by axis: dp_replicate, dp_shard, tp, cp; default 1."""
    cp_method: str = "ring"

    def size(self, axis: str) -> int:
        """Ranks along an axis."""
        return self.sizes.get(axis, 1)

    @property
    def tokens(self) -> float:
        """Tokens per step of the rank, before sequence parallelism."""
        return self.batch * self.config.token_shape[0] / self.size("cp")

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole network, derived in docs/roofline.md."""
        h, layers, heads, patch = self.config.shape
        f, pixels = self.config.ffn, patch * patch
        modulation, attention = 6 * h * h + 6 * h, 4 * h * h + 4 * h
        mlp = 2 * h * f + f + h
        norms = 2 * (h // heads) if self.config.qk_norm else 0
        patch_in = (pixels * self.config.in_channels + 1) * h
        timestep = 256 * h + h + h * h + h
        labels = (self.config.num_classes + 1) * h
        head = 2 * h * h + 2 * h + (h + 1) * pixels * self.output_channels
        blocks = layers * (modulation + attention + mlp + norms)
        return blocks + patch_in + timestep + labels + head


@dataclass(frozen=True)
class Product:
    """A matrix product [m, k] x [k, n] in forward; backward has one or two of its size."""

    name: str
    m: float
    n: float
    k: float
    count: float = 1
    passes: int = 3
    """Forward, gradient of the input, gradient of the weight."""
    is_in_block: bool = True

    @property
    def flops(self) -> float:
        """FLOPs of one pass, two per multiply-add."""
        return 2 * self.m * self.n * self.k

    def seconds(self, ceilings: Ceilings) -> float:
        """Least time of one pass: the slower of compute and memory traffic."""
        moved = BF16 * (self.m * self.k + self.k * self.n + self.m * self.n)
        return max(self.flops / ceilings.gemm_tflops / 1e12, moved / ceilings.copy_gb_per_s / 1e9)


def products(work: Work) -> Iterator[Product]:
    """Every matrix product of a rank's step; tp divides widths, cp and microbatches rows."""
    h, layers, _, patch = work.config.shape
    f, pixels, t = work.config.ffn, patch * patch, work.size("tp")
    count, rows = work.microbatches, work.tokens / work.microbatches
    samples = work.batch / work.microbatches
    each = layers * count
    yield Product("qkv", rows, 3 * h / t, h, each)
    yield Product("attention out", rows, h, h / t, each)
    yield Product("MLP up", rows, f / t, h, each)
    yield Product("MLP down", rows, h, f / t, each)
    yield Product("modulation", samples, 6 * h / t, h, each)
    ends = {"count": count, "is_in_block": False}
    # The network's input needs no gradient. Embedding and head are not divided by tp: every rank
    # computes all tokens.
    yield Product("patch", rows, h, pixels * work.config.in_channels, passes=2, **ends)
    yield Product("head", rows, pixels * work.output_channels, h, **ends)
    yield Product("head modulation", samples, 2 * h, h, **ends)
    yield Product("timestep up", samples, h, 256, passes=2, **ends)
    yield Product("timestep down", samples, h, h, **ends)


def gemm_passes(work: Work, product: Product) -> int:
    """Passes of a product, recomputation included."""
    return product.passes + (work.remat == "full" and product.is_in_block)


def gemm_s(work: Work, ceilings: Ceilings) -> float:
    """Seconds of all matrix products, each at its own shape."""
    return sum(p.count * gemm_passes(work, p) * p.seconds(ceilings) for p in products(work))


def attention_flops(work: Work) -> float:
    """Model FLOPs: forward 4 s^2 h per sample and layer, backward twice that."""
    h, layers, *_ = work.config.shape
    passes = 3 + (work.remat in ("attention", "full"))
    return passes * 4 * work.tokens * work.config.token_shape[0] * h * layers / work.size("tp")


def attention_s(work: Work, ceilings: Ceilings) -> float:
    """Seconds of attention: compute, or traffic of q, k, v, output and, in backward, gradients."""
    h, layers, *_ = work.config.shape
    forwards = 1 + (work.remat in ("attention", "full"))
    moved = (4 * forwards + 8) * BF16 * work.tokens * h * layers / work.size("tp")
    tflops = ceilings.attention_tflops or ceilings.gemm_tflops
    return max(attention_flops(work) / tflops / 1e12, moved / ceilings.copy_gb_per_s / 1e9)


ELEMENTWISE = {
    #               forward      backward       again under "selective"
    #              h   f          h   f          h   f
    "compiled": ((9, 2), (19, 3), (5, 2)),
    "eager": ((14, 2), (49, 4), (11, 2)),
}
"""Elements read and written per token and layer, in units of (h, f)."""
QK_NORM = (4, 6)
"""Extra elements of qk_norm in units of h, (forward, backward)."""
ENDS = 7
"""Elements per token outside the blocks in units of h: positions, the head's modulation."""


def elementwise_bytes(work: Work) -> float:
    """Bytes of norms, modulation, gates, GELU, residual adds and the q, k, v concatenation."""
    h, layers, *_ = work.config.shape
    forward, backward, again = ELEMENTWISE["compiled" if work.is_compiled else "eager"]
    norm = QK_NORM if work.config.qk_norm else (0, 0)
    passes = [(forward[0] + norm[0], forward[1]), (backward[0] + norm[1], backward[1])]
    passes += [passes[0]] if work.remat == "full" else []
    passes += [(again[0] + norm[0], again[1])] if work.remat == "selective" else []
    per_token = sum(of_h * h + of_f * work.config.ffn for of_h, of_f in passes)
    # tp divides all of it: widths, or tokens by sequence parallelism.
    return BF16 * work.tokens * (layers * per_token / work.size("tp") + ENDS * h)


def state_bytes(work: Work) -> float:
    """Memory traffic of clipping, optimizer, EMA and casts, for this rank's shard.

    AdamW reads weight, gradient and two moments, and writes all but the gradient. Clipping reads
    the gradient twice and writes it. An EMA reads itself and the weight, and writes itself. Casts:
    weight to bf16, gradient from bf16.
    """
    shard = work.num_parameters / (work.size("dp_shard") * work.size("cp") * work.size("tp"))
    adamw, clipping, average = 7 * FP32, 3 * FP32, 3 * FP32
    casts = 2 * (BF16 + FP32)
    return shard * (adamw + clipping + average * work.num_averages + casts)


def seconds_on(link: float | None, sent: float, axis: str) -> float:
    """Seconds to send bytes over a link; UserError without its bandwidth."""
    if not sent:
        return 0.0
    if link is None:
        flag = "--link-gbs" if axis == "dp" else "--inner-gbs or --link-gbs"
        raise UserError(f"{axis} sends {sent:.3g} bytes per step. Set its bandwidth with {flag}.")
    return sent / link / 1e9


def data_parallel_s(work: Work, ceilings: Ceilings) -> float:
    """FSDP's all-gathers and reduce-scatter, HSDP's all-reduce (docs/parallelism.md); hidden."""
    d, r = work.size("dp_shard") * work.size("cp"), work.size("dp_replicate")
    held = work.num_parameters / work.size("tp")
    sent = (2 * work.microbatches * BF16 + FP32) * held * (d - 1) / d
    sent += 2 * (r - 1) / r * FP32 * held / d
    return seconds_on(ceilings.link_gb_per_s, sent, "dp")


SENT_AGAIN = {
    # tp: tokens, vectors; cp: the ring's keys and values, Ulysses' tensors
    "none": (0, 0, 0, 0),
    "attention": (0, 0, 2, 3),
    "selective": (2, 1, 0, 0),
    "full": (4, 1, 2, 4),
}
"""Communication that recomputation repeats per layer (docs/remat.md). tp: all-gathers of tokens, of
the six modulation vectors; ring: keys and values; Ulysses: q, k, v (and the output). Tested against
the counts of benchmarks/collectives.py."""


def tensor_parallel_s(work: Work, ceilings: Ceilings) -> float:
    """Collectives of tp with sequence parallelism; exposed in every layer."""
    h, layers, *_ = work.config.shape
    t, (tokens, vectors, *_) = work.size("tp"), SENT_AGAIN[work.remat]
    sent = (8 + tokens) * work.tokens + (2 + vectors) * 6 * work.batch
    sent *= layers * (t - 1) / t * h * BF16
    return seconds_on(ceilings.inner_gb_per_s or ceilings.link_gb_per_s, sent, "tp")


def context_parallel_s(work: Work, ceilings: Ceilings) -> float:
    """Ring attention's keys and values (hidden), or Ulysses' all-to-alls (exposed)."""
    h, layers, *_ = work.config.shape
    c, t = work.size("cp"), work.size("tp")
    *_, ring, ulysses = SENT_AGAIN[work.remat]
    of_ring, of_ulysses = (4 + ring) * BF16 + 2 * FP32, (8 + ulysses) * BF16 / c
    # `work.tokens` is already divided by cp.
    sent = layers * (c - 1) * work.tokens * h / t
    sent *= of_ring if work.cp_method == "ring" else of_ulysses
    return seconds_on(ceilings.inner_gb_per_s or ceilings.link_gb_per_s, sent, "cp")


def terms_ms(work: Work, ceilings: Ceilings) -> dict[str, float]:
    """Milliseconds of every term, and the resulting lower bound of the step."""
    copy = ceilings.copy_gb_per_s * 1e9
    computing = {
        "GEMM": gemm_s(work, ceilings),
        "attention": attention_s(work, ceilings),
        "elementwise": elementwise_bytes(work) / copy,
        "optimizer": state_bytes(work) / copy,
    }
    context = context_parallel_s(work, ceilings)
    is_ring = work.cp_method == "ring"
    exposed = tensor_parallel_s(work, ceilings) + (0 if is_ring else context)
    hidden = data_parallel_s(work, ceilings), context if is_ring else 0.0
    step = max(sum(computing.values()) + exposed, *hidden)
    parts = computing | {
        "tp, ulysses": exposed,
        "dp (hidden)": hidden[0],
        "ring (hidden)": hidden[1],
        "step": step,
    }
    return {name: 1e3 * seconds for name, seconds in parts.items()}


def model_tflop(work: Work) -> float:
    """Model TFLOPs of the rank's share, without recomputation."""
    plain = replace(work, remat="none", sizes={})
    flops = sum(p.count * p.passes * p.flops for p in products(plain)) + attention_flops(plain)
    return flops / work.size("tp") / work.size("cp") / 1e12


def mfu(work: Work, ceilings: Ceilings, ms: float) -> float | None:
    """Model FLOP/s over the data sheet's peak, or None if that is unknown."""
    return model_tflop(work) / ms * 1e3 / ceilings.peak_tflops if ceilings.peak_tflops else None
