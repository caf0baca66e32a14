"""Random numbers as pure functions of (seed, sample number, stream, element).

All random numbers of training come from here. There is no state: any rank can draw any slice of
any sample's noise, and the values do not depend on layout, loader worker, microbatch size or the
history of the run. The generator is Philox4x32-10 (Salmon et al., SC'11, "Parallel random numbers:
as easy as 1, 2, 3") in integer tensor operations: the bits are equal on every device, the normals
up to the last bits of log and cos.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
GOLDEN = 0x9E3779B97F4A7C15
SPLITMIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""Shift and multiplier of the two rounds of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""


def philox(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four words of counter (int64 tensors below 2**32) to four random words.

    A product of two 32-bit words can pass 2**63: int64 wraps, and the mask after the arithmetic
    shift restores the unsigned high word.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c2 = (p1 >> 32 & MASK) ^ c1 ^ k0, (p0 >> 32 & MASK) ^ c3 ^ k1
        c1, c3 = p1 & MASK, p0 & MASK
        k0, k1 = k0 + WEYL[0] & MASK, k1 + WEYL[1] & MASK
    return c0, c1, c2, c3


def stream_key(seed: int, stream: str) -> tuple[int, int]:
    """The 64-bit Philox key of a named stream: a hash of (seed, stream)."""
    digest = hashlib.blake2b(f"{seed}/{stream}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def words(
    seed: int, stream: str, numbers: Int64[Tensor, " b"], count: int, first: int = 0
) -> Int64[Tensor, "b count"]:
    """Random 32-bit words `first` to `first + count` - 1 of each sample's stream."""
    blocks = torch.arange(first // 4, (first + count + 3) // 4, device=numbers.device)
    numbers, blocks = numbers[:, None], blocks.expand(len(numbers), -1)
    lanes = philox(
        (blocks & MASK, blocks >> 32, numbers & MASK, numbers >> 32), stream_key(seed, stream)
    )
    return torch.stack(lanes, -1).flatten(1)[:, first % 4 : first % 4 + count]


def to_unit(word: Int64[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """A 32-bit word to a float in the open interval (0, 1).

    23 bits: with 24 the largest value would round to 1.0, whose logit is infinite.
    """
    return ((word >> 9).float() + 0.5) * 2.0**-23


@dataclass(frozen=True)
class SampleRNG:
    """Random numbers for a batch of samples, on the device of `sample_numbers`.

    Sample numbers count samples from the start of training; none is used twice. `stream` names the
    variable ("t", "noise", ...): equal names give equal numbers. `first` is the row-major index of
    the first element, so that a rank can draw only its part of a sample.
    """

    seed: int
    sample_numbers: Int64[Tensor, " b"]

    def keys(self, stream: str) -> Int64[Tensor, " b"]:
        """A random number from 0 to 2**63 - 1 for each sample, [b]: the key of another hash."""
        drawn = words(self.seed, stream, self.sample_numbers, 2)
        return drawn[:, 0] >> 1 << 32 | drawn[:, 1]

    def uniform(
        self, stream: str, shape: tuple[int, ...] = (), first: int = 0
    ) -> Float[Tensor, "b ..."]:
        """Uniform in (0, 1), fp32 [b, *shape]."""
        drawn = words(self.seed, stream, self.sample_numbers, math.prod(shape), first)
        return to_unit(drawn).view(-1, *shape)

    def normal(
        self, stream: str, shape: tuple[int, ...] = (), first: int = 0
    ) -> Float[Tensor, "b ..."]:
        """Standard normal, fp32 [b, *shape], by Box-Muller on pairs of neighbouring words."""
        count, odd = math.prod(shape), first % 2
        pairs = (odd + count + 1) // 2
        drawn = words(self.seed, stream, self.sample_numbers, 2 * pairs, first - odd)
        u = to_unit(drawn).view(-1, pairs, 2)
        radius, angle = (-2 * u[..., 0].log()).sqrt(), 2 * math.pi * u[..., 1]
        both = torch.stack((radius * angle.cos(), radius * angle.sin()), -1).flatten(1)
        return both[:, odd : odd + count].reshape(-1, *shape)


def permutation(seed: int, epoch: int, size: int) -> Int64[Tensor, " size"]:
    """The order of an epoch: a permutation of range(size), equal on every machine.

    Sorts random 62-bit keys. numpy and torch do not guarantee their permutations across releases,
    and a resumed run must repeat its order.
    """
    drawn = words(seed, "permutation", torch.tensor([epoch]), 2 * size).view(size, 2)
    keys = (drawn[:, 0] >> 1) << 31 | drawn[:, 1] >> 1
    return torch.argsort(keys, stable=True)
