"""Choose the attention kernel for "auto", local or in a ring, from device and shape.

torch's own order (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, 2.11 to 2.15) is cuDNN on
Hopper and Blackwell, flash, efficient, matmuls; the first one that supports the shape runs. This
order is the same, without cuDNN where its gradients can be NaN.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

import torch

from titan_dit.models.base import Mask

HALF = (torch.bfloat16, torch.float16)
CUDNN_LEAST = 91501
"""Oldest cuDNN that is correct for any number of keys (9.15.1); torch prefers no older one."""
CUDNN_FINITE = 92600
"""Oldest cuDNN with finite dQ on Hopper for 64 modulo 128 keys (9.26)."""
TILE, GAP = 128, 64
"""Keys per tile of cuDNN's backward; remainder of the keys for which it overflows."""
CUDNN_SQUARE = 92201
"""Oldest cuDNN (after 9.22) with which torch uses it for wide heads of exactly WIDEST channels
only."""
NARROW, WIDEST = 128, 256
"""Largest head dim of every supported cuDNN, and of some."""
ALIGNMENT = 8
"""Channels to which a ring pads head dims; local attention does not pad."""


@dataclass(frozen=True)
class AttentionShape:
    """The shape of one rank's attention."""

    heads: int
    tokens: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    ring: bool = False
    """True for ring attention on a slice of the tokens."""
    mask: Mask = "none"

    def __str__(self) -> str:
        """Format for error messages."""
        name = str(self.dtype).removeprefix("torch.")
        masked = "" if self.mask == "none" else f", masked by {self.mask},"
        heads = f"{self.heads} heads of {self.head_dim} channels"
        return f"{heads}{masked} in {name} on {self.device.type}"

    @property
    def unmasked_keys(self) -> tuple[int, ...]:
        """Numbers of keys in the kernel calls without a causal mask."""
        if self.mask != "causal":
            return (self.tokens,)
        # See `ring_attention.block_of`.
        return (self.tokens, self.tokens // 2) if self.ring else ()

    @property
    def channels(self) -> int:
        """Head dim of the kernel calls."""
        return -(-self.head_dim // ALIGNMENT) * ALIGNMENT if self.ring else self.head_dim


@dataclass(frozen=True)
class Hardware:
    """Properties of a device that the choice depends on."""

    type: str
    """Type of a torch.device: "cuda", "cpu"."""
    capability: tuple[int, int] = (0, 0)
    """CUDA compute capability."""
    cudnn: int = 0
    """cuDNN's version at run time: 92600 is 9.26.0; 0 without cuDNN."""
    prefers_cudnn: bool = True
    """False if TORCH_CUDNN_SDPA_DEPRIORITIZED=1, a switch of torch."""

    @property
    def overflows(self) -> bool:
        """True if cuDNN's dQ can be NaN: see `harm`."""
        return self.capability[0] == 9 and 0 < self.cudnn < CUDNN_FINITE


@cache
def hardware_of(device: torch.device) -> Hardware:
    """The hardware of a device; a GPU that this process does not have is unknown."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return Hardware(device.type)
    # On ROCm that is the version of MIOpen.
    version = 0 if torch.version.hip else torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
    preferred = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
    return Hardware("cuda", torch.cuda.get_device_capability(device), version, preferred)


def order(
    shape: AttentionShape, hardware: Hardware, deterministic: bool = False
) -> tuple[str, ...]:
    """Values of [precision] attention that can run the shape, the preferred one first."""
    if hardware.type == "cpu":
        return "flash", "math"
    if hardware.type != "cuda" or shape.dtype == torch.float64:
        return ("math",)
    fits = {
        "cudnn": _fits_cudnn(shape, hardware) and not harm("cudnn", shape, hardware, deterministic),
        "flash": _fits_flash(shape, hardware),
        "efficient": _fits_efficient(shape, hardware),
    }
    return (*(key for key, fit in fits.items() if fit), "math")


def harm(
    key: str, shape: AttentionShape, hardware: Hardware, deterministic: bool = False
) -> str | None:
    """The reason why a kernel's results would be wrong or not reproducible; else None."""
    if key != "cudnn":
        return None
    if deterministic:
        return "the gradients of cuDNN attention are not deterministic"
    overflowing = [keys for keys in shape.unmasked_keys if overflows_at(keys, False)]
    if overflowing and hardware.overflows:
        version = f"{hardware.cudnn // 10000}.{hardware.cudnn // 100 % 100}"
        return (
            f"cuDNN {version} can give NaN gradients on Hopper for {overflowing[0]} keys, {GAP} "
            f"modulo {TILE}; 9.26 is right"
        )
    return None


def overflows_at(keys: int, causal: bool) -> bool:
    """True for the lengths at which cuDNN before 9.26 overflows on Hopper.

    Its backward masks keys by tiles of 64 but walks tiles of 128: the empty half of the last one is
    scored 0, and exp(0 - lse) is infinite for lse < -88.7 (NVIDIA/cudnn-frontend#628). It needs no
    mask tensor, with which it was first seen (pytorch/pytorch#196678); a causal mask hides that
    half. torch 2.15 refuses cuDNN for the same shapes: not causal, 64 modulo 128 keys.
    """
    return keys % TILE == GAP and not causal


def _fits_cudnn(shape: AttentionShape, hardware: Hardware) -> bool:
    return (
        hardware.prefers_cudnn
        and hardware.capability[0] in (9, 10)
        and hardware.cudnn >= CUDNN_LEAST
        and shape.dtype in HALF
        and _has_channels(shape.channels, hardware)
        and all(keys > 1 for keys in (shape.tokens, *shape.unmasked_keys))
    )


def _has_channels(channels: int, hardware: Hardware) -> bool:
    if channels % ALIGNMENT or channels > WIDEST:
        return False
    if channels <= NARROW:
        return True
    if hardware.cudnn >= CUDNN_SQUARE:
        return channels == WIDEST
    return hardware.capability == (9, 0)


def _fits_flash(shape: AttentionShape, hardware: Hardware) -> bool:
    capability = hardware.capability
    # Backward of 193 to 224 channels needs more shared memory than these have.
    small = (8, 6) <= capability <= (8, 9) or capability[0] == 12
    return (
        capability >= (8, 0)
        and shape.dtype in HALF
        and shape.head_dim <= 256
        and not (small and 192 < shape.head_dim <= 224)
        and shape.mask != "lengths"
    )


def _fits_efficient(shape: AttentionShape, hardware: Hardware) -> bool:
    if shape.dtype == torch.bfloat16 and hardware.capability < (8, 0):
        return False
    return shape.channels % (ALIGNMENT if shape.dtype in HALF else 4) == 0
