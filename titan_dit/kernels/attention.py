"""The attention kernel of [precision] attention: set, checked and named.

"auto" is torch's choice where attention_choice.py agrees with it, and short_attention.py for few
tokens in compiled bf16 on a CPU. The key affects only the model's own layers, and is part of the
compiled graph. Ring attention calls kernels by name (attention_kernels.py), with the same key. Only
this file calls torch.nn.attention, whose API may still change.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention as implementations
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from titan_dit.config.section import UserError
from titan_dit.kernels.attention_choice import (
    AttentionShape,
    hardware_of,
    harm,
    order,
    overflows_at,
)
from titan_dit.kernels.attention_kernels import MATH, masked_products, named
from titan_dit.models import layers
from titan_dit.models.layers import Attention, CrossAttention, for_heads, within

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
IMPLEMENTATIONS = {"flash3": "FA3", "flash4": "FA4"}
"""Value of [precision] attention -> torch's name for another package's flash kernel."""
PACKAGES = {"flash3": "flash_attn_interface", "flash4": "flash_attn.cute"}
"""Value of [precision] attention -> module that torch imports the kernel from."""
NAMES = {SDPBackend.MATH: "math"} | {BACKENDS[key]: key for key in ("flash", "cudnn", "efficient")}
"""torch's backend -> value of [precision] attention."""
CHANNELS = (32, 64, 96, 128, 192, 256)
"""Head dims that torch's flash kernels do not pad."""
CUDNN_CHANNELS = (64, 128)
"""Head dims that cuDNN 9.19 does not pad. It does not document them: on an H200 72 takes as long as
128."""
PROBE_TOKENS = 256
MIN_ERROR = 0.05
"""Minimum error against matmuls, relative to the largest value, that counts as wrong; rounding of
bf16 is smaller."""
NO_LENGTHS = "ring attention supports no mask by lengths"


def apply(model: nn.Module, attend: Attend) -> None:
    """Set the kernel of every attention layer; before context parallelism and remat."""
    for layer in model.modules():
        if isinstance(layer, Attention | CrossAttention):
            layer.attend = attend


def attend_by(key: str, device_type: str = "cpu") -> Attend:
    """The attention function of a key, with the arguments of `layers.attend`."""
    if key == "auto":
        overflows = hardware_of(torch.device(device_type)).overflows
        return attend_finitely if overflows else layers.attend
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
    """`layers.attend` by one of torch's backends: q [b, heads, n, d], k and v [b, groups, m, d].

    Raises RuntimeError if the backend refuses these tensors.
    """
    with sdpa_kernel(backend):
        return layers.attend(q, k, v, causal, lengths)


def attend_finitely(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, lengths: Tensor | None = None
) -> Tensor:
    """`layers.attend` by torch's choice, but not cuDNN where its gradients can be NaN.

    q [b, heads, n, d], k and v [b, groups, m, d], lengths [b].
    """
    if not overflows_at(k.shape[2], causal):
        return layers.attend(q, k, v, causal, lengths)
    # Only for these lengths: the context costs 10 us of the host.
    with sdpa_kernel([BACKENDS["flash"], BACKENDS["efficient"], SDPBackend.MATH]):
        return layers.attend(q, k, v, causal, lengths)


def by_products(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, lengths: Tensor | None = None
) -> Tensor:
    """`layers.attend` by fp32 matmuls: q [b, heads, n, d], k and v [b, groups, m, d].

    Not torch's math backend, which torch.compile turns into flash.
    """
    scale, n = 1 / math.sqrt(q.shape[-1]), k.shape[2]
    k, v = for_heads(k, q.shape[1]), for_heads(v, q.shape[1])
    if not causal and lengths is None:
        out, _ = MATH.forward(q, k, v, scale, False)
        return out
    seen = torch.ones(q.shape[2], n, dtype=torch.bool, device=q.device)
    seen = seen.tril() if causal else within(lengths, n)  # type: ignore[arg-type]
    return masked_products(q, k, v, scale, seen)


def use_implementation(key: str) -> None:
    """Use the flash kernels of the key's package, or torch's own if the key names no package.

    torch can only do this for the whole process. Raises RuntimeError if torch does not support the
    package or the package is missing.
    """
    current = getattr(implementations, "current_flash_attention_impl", lambda: None)()
    wanted = IMPLEMENTATIONS.get(key)
    if wanted == current:
        return
    if wanted is None:
        implementations.restore_flash_attention_impl()
    elif wanted not in getattr(implementations, "list_flash_attention_impls", list)():
        raise RuntimeError(f"torch {torch.__version__} does not support it")
    else:
        try:
            implementations.activate_flash_attention_impl(wanted)
        except ImportError as error:
            raise RuntimeError(f"it needs the module {PACKAGES[key]} ({error})") from error


def settled(key: str, shape: AttentionShape) -> str:
    """The key; in a ring, "auto" becomes the first kernel of `order` that runs the shape.

    UserError if none does. Local "auto" stays: torch itself takes another kernel if one refuses.
    """
    if key != "auto" or not shape.ring:
        return key
    reasons = []
    for candidate in order(shape, hardware_of(shape.device), is_deterministic()):
        reason = refusal(candidate, shape)
        if reason is None:
            return candidate
        reasons.append(f"{candidate}: {reason}")
    raise UserError(
        f'[precision] attention="auto" cannot run {shape} in the ring of context parallelism: '
        f'{"; ".join(reasons)}. Set [parallel] cp_method = "ulysses".'
    )


def kernel_of(key: str, shape: AttentionShape) -> str:
    """The value of [precision] attention that runs for a key; for local "auto" torch is asked."""
    if key != "auto":
        return key
    if shape.ring:
        return order(shape, hardware_of(shape.device), is_deterministic())[0]
    q, k, v = sample(shape)
    masked = mask_of(shape, q.shape[2])
    seen = within(masked["lengths"], q.shape[2]) if "lengths" in masked else None
    causal = "causal" in masked
    taken = torch.ops.aten._fused_sdp_choice(q, k, v, seen, 0.0, causal)
    hardware = hardware_of(shape.device)
    if SDPBackend(taken) == SDPBackend.CUDNN_ATTENTION and harm("cudnn", shape, hardware):
        return order(shape, hardware)[0]  # As in `attend_finitely`.
    return NAMES.get(SDPBackend(taken), "unknown")


def is_deterministic() -> bool:
    """[training] deterministic, once it is set."""
    return torch.are_deterministic_algorithms_enabled()


def check_runs(key: str, shape: AttentionShape) -> None:
    """Run the kernel once on a sample of this rank. UserError names the reason and alternatives."""
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
    """The reason why a kernel cannot run a sample forward and backward; None if it can.

    Side effect: the key's flash implementation stays active (see `use_implementation`).
    """
    if wrong := harm(key, shape, hardware_of(shape.device), is_deterministic()):
        return wrong
    if shape.device.type == "cpu" and key not in ("auto", "flash", "math"):
        return "a CPU has flash and math only"
    q, k, v = sample(shape)
    masked = mask_of(shape, q.shape[2])
    with warnings.catch_warnings(record=True) as said:
        # torch warns with the reasons, then raises an error without them.
        warnings.simplefilter("always")
        try:
            use_implementation(key)
            if shape.ring and shape.mask == "lengths":
                raise RuntimeError(NO_LENGTHS)
            if shape.ring:
                # A causal ring calls the kernel without a mask for the keys of other ranks.
                for causal in {False, shape.mask == "causal"}:
                    compare_with_matmuls(key, q.detach(), k.detach(), v.detach(), causal)
            else:
                torch.autograd.grad(attend_by(key)(q, k, v, **masked).sum(), (q, k, v))
            if shape.device.type == "cuda":
                torch.cuda.synchronize(shape.device)
        except Exception as error:  # Other packages' kernels raise exceptions of any type.
            return reason_of([str(warning.message) for warning in said], str(error))
    return None


def sample(shape: AttentionShape) -> list[Tensor]:
    """q, k and v [1, heads, n, d] of zeros, with gradients; strided views, as in the layers."""
    # Fewer tokens, with the same remainder: kernels differ in the lengths they accept.
    tokens = min(shape.tokens, PROBE_TOKENS + shape.tokens % PROBE_TOKENS)
    size = (1, tokens, shape.heads, shape.head_dim)
    kind: dict[str, Any] = {"dtype": shape.dtype, "device": shape.device}
    return [torch.zeros(size, **kind).transpose(1, 2).requires_grad_() for _ in range(3)]


def mask_of(shape: AttentionShape, tokens: int) -> dict[str, Any]:
    """The mask of one sample, as arguments of `layers.attend`."""
    if shape.mask == "lengths":
        return {"lengths": torch.full((1,), tokens, device=shape.device)}
    return {"causal": True} if shape.mask == "causal" else {}


def reason_of(said: list[str], error: str) -> str:
    """The reasons in torch's warnings `said`, as one line; the first line of `error` if none."""
    lines = [first_line(text) for text in said]
    reasons = [x for x in lines if not x.endswith("because:") and "disabled" not in x]
    return "; ".join(reasons) or first_line(error)


def compare_with_matmuls(key: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    """Run a ring kernel on normal values in the layout of q, k, v; RuntimeError if it is wrong.

    A ring calls the kernels' own operators, whose statistics (layout, base of the logarithm) torch
    does not document: a kernel that misread them would train without an error.
    """
    scale, kernel = 1 / math.sqrt(q.shape[-1]), named(key, q, causal)
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_out = (
        x.copy_(torch.randn(x.shape, generator=generator)) for x in (q, k, v, torch.empty_like(q))
    )
    out, lse = kernel.forward(q, k, v, scale, causal)
    exact_out, exact_lse = MATH.forward(q, k, v, scale, causal)
    # Those of all ranks, in a ring, differ from a rank's own.
    of_all = d_out, q, k, v, 0.5 * exact_out, exact_lse + 0.5, scale, causal
    pairs = zip(
        (out, lse, *kernel.backward(*of_all)),
        (exact_out, exact_lse, *MATH.backward(*of_all)),
        ("output", "log-sum-exp", "gradient of q", "gradient of k", "gradient of v"),
        strict=True,
    )
    for found, exact, what in pairs:
        error = float((found.double() - exact.double()).abs().max() / exact.double().abs().max())
        if not error < MIN_ERROR:
            raise RuntimeError(f"its {what} differs from that of matmuls by {error:.2g}")


def first_line(text: str) -> str:
    """The first line of a message of torch, without its source location."""
    lines = text.strip().splitlines() or ["no reason given"]
    return lines[0].partition(" (Triggered internally")[0].strip().rstrip(".")


def padding(kernel: str, head_dim: int, tokens: int, share: float) -> str | None:
    """Console warning if a kernel pads the head dim; `share`: FLOPs fraction of attention."""
    sizes = CUDNN_CHANNELS if kernel == "cudnn" else CHANNELS
    whole = next((channels for channels in sizes if channels >= head_dim), head_dim)
    is_padded = kernel == "cudnn" or BACKENDS.get(kernel) == SDPBackend.FLASH_ATTENTION
    if whole == head_dim or not is_padded:
        return None
    more = whole / head_dim - 1
    dims = ", ".join(map(str, sizes))
    name = "cuDNN's" if kernel == "cudnn" else "flash"
    return (
        f"[model] head dim {head_dim} is none of {dims}: {name} kernels pad it to "
        f"{whole}, +{more:.0%} FLOPs in attention, +{more * share:.1%} in the model at {tokens} "
        "tokens"
    )
