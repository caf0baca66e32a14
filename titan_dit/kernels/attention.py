"""Which of torch's kernels computes attention: [precision] attention. "auto" leaves it to torch.

For few tokens in compiled bf16 on a CPU "auto" is short_attention.py. The choice holds for the
model's own layers and nothing else in the process, and becomes a part of what is compiled. The ring
of context parallelism calls kernels by name (attention_kernels.py), by the same key. The only file
that calls torch.nn.attention, which may still change.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.attention as implementations
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from titan_dit.config.section import UserError
from titan_dit.kernels.attention_kernels import MATH, masked_products, named
from titan_dit.models import layers
from titan_dit.models.base import Mask
from titan_dit.models.layers import Attention, within

Attend = Callable[..., Tensor]
"""(q, k, v, causal=..., lengths=...): `layers.attend`."""

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "flash3": SDPBackend.FLASH_ATTENTION,
    "flash4": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
KEYS = (*BACKENDS, "math")
"""All but auto."""
IMPLEMENTATIONS = {"flash3": "FA3", "flash4": "FA4"}
"""What torch calls kernels of other packages that take the place of its own flash kernels."""
PACKAGES = {"flash3": "flash_attn_interface", "flash4": "flash_attn.cute"}
"""The modules that torch imports them from."""
CHANNELS = 32
"""Flash kernels are made for head dims that are multiples of this one."""
PROBE_TOKENS = 256
NO_MASK = "a ring attends all to all: its kernels know no mask"


@dataclass(frozen=True)
class AttentionShape:
    """What one rank's attention works on."""

    heads: int
    tokens: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    ring: bool = False
    """By the ring's kernels, on a slice of the tokens."""
    mask: Mask = "none"

    def __str__(self) -> str:
        """As error messages name it."""
        name = str(self.dtype).removeprefix("torch.")
        masked = "" if self.mask == "none" else f", masked by {self.mask},"
        heads = f"{self.heads} heads of {self.head_dim} channels"
        return f"{heads}{masked} in {name} on {self.device.type}"


def apply(model: nn.Module, attend: Attend) -> None:
    """Let every attention of the model use a kernel; before context parallelism and remat."""
    for layer in model.modules():
        if isinstance(layer, Attention):
            layer.attend = attend


def attend_by(key: str) -> Attend:
    """q, k, v [b, heads, n, head_dim] to the same shape, by the kernel of a key."""
    if key == "auto":
        return layers.attend
    if key == "math":
        return by_products
    return functools.partial(attend, backend=BACKENDS[key])


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    lengths: Tensor | None = None,
    *,
    backend: SDPBackend,
) -> Tensor:
    """By this backend; a RuntimeError where it cannot."""
    with sdpa_kernel(backend):
        return layers.attend(q, k, v, causal, lengths)


def by_products(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, lengths: Tensor | None = None
) -> Tensor:
    """Plain matrix products, the n x n scores in memory in fp32.

    Not torch's own: torch.compile finds the softmax between two products and puts flash there.
    """
    scale, n = 1 / math.sqrt(q.shape[-1]), k.shape[2]
    if not causal and lengths is None:
        out, _ = MATH.forward(q, k, v, scale)
        return out
    seen = torch.ones(q.shape[2], n, dtype=torch.bool, device=q.device)
    seen = seen.tril() if causal else within(lengths, n)  # type: ignore[arg-type]
    return masked_products(q, k, v, scale, seen)


def use_implementation(key: str) -> None:
    """Put another package's flash kernels in the place of torch's, or torch's own back in theirs.

    For this whole process: torch knows no other way. Raises RuntimeError where torch has no such
    switch or the package is missing.
    """
    current = getattr(implementations, "current_flash_attention_impl", lambda: None)()
    wanted = IMPLEMENTATIONS.get(key)
    if wanted == current:
        return
    if wanted is None:
        implementations.restore_flash_attention_impl()
    elif wanted not in getattr(implementations, "list_flash_attention_impls", list)():
        raise RuntimeError(f"torch {torch.__version__} has no switch for it")
    else:
        try:
            implementations.activate_flash_attention_impl(wanted)
        except ImportError as error:
            raise RuntimeError(f"it needs the module {PACKAGES[key]} ({error})") from error


def check(key: str, shape: AttentionShape) -> None:
    """Run the chosen kernel once, forward and backward, on a sample of this rank's shape.

    Raises a UserError that gives torch's reason, and names those that would do. "auto" always does.
    """
    if key == "auto":
        use_implementation(key)
        return
    reason = refusal(key, shape)
    if reason is None:
        return
    others = [
        f'"{other}"'
        for other in KEYS
        if other not in (key, *IMPLEMENTATIONS) and refusal(other, shape) is None
    ]
    use_implementation("auto")
    ring = " in the ring of context parallelism" if shape.ring else ""
    raise UserError(
        f'[precision] attention="{key}" cannot run {shape}{ring}: {reason}. '
        f'Set attention = "auto", or one that can: {", ".join(others)}.'
    )


def refusal(key: str, shape: AttentionShape) -> str | None:
    """Why a backend cannot run one sample of such a shape forward and backward; None if it can.

    Leaves the flash kernels of that backend in place (see `use_implementation`).
    """
    if shape.device.type == "cpu" and key not in ("auto", "flash", "math"):
        return "a CPU has flash and math only"
    # Few, but as uneven as they are: kernels differ in the lengths they take.
    tokens = min(shape.tokens, PROBE_TOKENS + shape.tokens % PROBE_TOKENS)
    size = (1, tokens, shape.heads, shape.head_dim)
    # As views, as the layers make them.
    q, k, v = (
        torch.zeros(size, dtype=shape.dtype, device=shape.device).transpose(1, 2).requires_grad_()
        for _ in range(3)
    )
    masked: dict[str, Any] = {"causal": True} if shape.mask == "causal" else {}
    if shape.mask == "lengths":
        masked = {"lengths": torch.full((1,), tokens, device=shape.device)}
    with warnings.catch_warnings(record=True) as said:
        # torch gives its reasons as warnings, and then an error without any.
        warnings.simplefilter("always")
        try:
            use_implementation(key)
            if shape.ring and shape.mask != "none":
                raise RuntimeError(NO_MASK)
            if shape.ring:
                run_kernel(key, q.detach(), k.detach(), v.detach())
            else:
                torch.autograd.grad(attend_by(key)(q, k, v, **masked).sum(), (q, k, v))
            if shape.device.type == "cuda":
                torch.cuda.synchronize(shape.device)
        except Exception as error:  # Other packages' kernels raise what they like.
            return reason_of([str(warning.message) for warning in said], str(error))
    return None


def reason_of(said: list[str], error: str) -> str:
    """Torch's own reason in one line, without the place in its source.

    It warns of every backend, "Flash attention kernel not used because:" and then why; of those
    that are switched off, too.
    """
    lines = [in_a_line(text) for text in said]
    reasons = [x for x in lines if not x.endswith("because:") and "disabled" not in x]
    return "; ".join(reasons) or in_a_line(error)


def run_kernel(key: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Forward and backward of the ring's kernel."""
    kernel, scale = named(key, q), 1 / math.sqrt(q.shape[-1])
    out, lse = kernel.forward(q, k, v, scale)
    kernel.backward(out, q, k, v, out, lse, scale)


def in_a_line(text: str) -> str:
    """The first line of what torch says, without the place in its source."""
    lines = text.strip().splitlines() or ["no reason given"]
    return lines[0].partition(" (Triggered internally")[0].strip().rstrip(".")


def padding(head_dim: int, tokens: int, share: float) -> str | None:
    """What a head dim costs that flash kernels are not made for, in words; None if they are.

    `share`: of the model's FLOPs that is attention's.
    """
    whole = -(-head_dim // CHANNELS) * CHANNELS
    if whole == head_dim:
        return None
    more = whole / head_dim - 1
    return (
        f"[model] a head has {head_dim} channels, no multiple of {CHANNELS}: flash kernels work on "
        f"{whole}, {more:.0%} more arithmetic in attention and {more * share:.1%} in the whole "
        f"model at {tokens} tokens"
    )
