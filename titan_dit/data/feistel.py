"""A keyed permutation of range(size) that is computed element by element.

A generalised Feistel network (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA
2002, section 5): a number below a * b is a pair (left, right), and each round adds a random
function of one half to the other, modulo a or b. With a and b next to sqrt(size), fewer than a
numbers are outside range(size). A number that lands there is permuted again until it is inside
(cycle walking, section 3). Halves of few values would need more rounds: smaller datasets are
sorted.

The random function of a round is SplitMix64 seeded by the round's key: its output number `half`.
All arithmetic is on 64-bit integers, so the permutation is equal on every machine and version.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from titan_dit.rng import GOLDEN, SPLITMIX, words

LEAST_SIZE, MOST_SIZE = 1 << 16, 1 << 62
"""Sizes of permutations."""
ROUNDS = 8
"""As FF3 (NIST SP 800-38G); the tests see structure with 2."""
GAMMA = np.uint64(GOLDEN)
MIX = [(np.uint64(shift), np.uint64(multiplier)) for shift, multiplier in SPLITMIX]
LAST_SHIFT, ONE = np.uint64(31), np.uint64(1)

Words = NDArray[np.uint64]


def mix(key: np.uint64 | Words, numbers: Words) -> Words:
    """Return the outputs `numbers` of SplitMix64 seeded with `key`."""
    z = numbers * GAMMA
    z += key
    for shift, multiplier in MIX:
        z ^= z >> shift
        z *= multiplier
    z ^= z >> LAST_SHIFT
    return z


@dataclass(frozen=True)
class Permutation:
    """A permutation of range(size), by one key per round."""

    size: int
    keys: Sequence[np.uint64 | Words]
    """An even number. Arrays [n, 1] give n permutations at once."""

    @classmethod
    def of(cls, seed: int, stream: str, number: int, size: int) -> Permutation:
        """Return permutation `number` of a stream; each is independent of all others."""
        return cls(size, round_keys(seed, stream, number, ROUNDS))

    @property
    def halves(self) -> tuple[int, int]:
        """(a, b), both next to sqrt(size)."""
        a = math.isqrt(self.size - 1) + 1
        return a, -(-self.size // a)

    def __call__(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Map places in range(size) to elements, in the memory of a few arrays like `places`."""
        assert LEAST_SIZE <= self.size <= MOST_SIZE
        found = self.permuted(places.astype(np.uint64))
        outside = np.flatnonzero(found >= self.size)
        while len(outside):
            found[outside] = self.permuted(found[outside])
            outside = outside[found[outside] >= self.size]
        return found.astype(np.int64)

    def permuted(self, numbers: Words) -> Words:
        """Permute range(a * b)."""
        a, b = map(np.uint64, self.halves)
        right = numbers // a
        left = numbers - right * a
        for first, second in zip(self.keys[::2], self.keys[1::2], strict=True):
            # 63 bits: a sum that wrapped at 2^64 would not be one-to-one.
            left = (left + (mix(first, right) >> ONE)) % a
            right = (right + (mix(second, left) >> ONE)) % b
        return right * a + left


@lru_cache(maxsize=8)
def round_keys(seed: int, stream: str, number: int, rounds: int) -> tuple[np.uint64, ...]:
    """Return the 64-bit keys of the rounds, drawn by Philox."""
    drawn = words(seed, stream, torch.tensor([number]), 2 * rounds)[0].numpy().astype(np.uint64)
    return tuple(drawn[::2] << np.uint64(32) | drawn[1::2])
