"""Random numbers for initial weights: the same bits on every device.

An element's number is a pure function of (key, element). It takes integer operations and the fp64
operations +, -, * and /, which IEEE 754 rounds correctly, each in a kernel of its own: a compiler
that fused two of them could round once where another one rounds twice. log, cos and torch's own
generators differ between devices. So does sqrt: MKL's, on a CPU, is not always correctly rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from titan_dit.rng import GOLDEN, SPLITMIX


def uniform(key: int, elements: Int64[Tensor, " n"], scale: float = 1.0) -> Float64[Tensor, " n"]:
    """Uniform in the open interval (-scale, scale): 31 random bits, symmetric about 0.

    They are the upper bits of SplitMix64: element i takes output i of the generator that is
    seeded with `key`. It needs a quarter of Philox's operations.
    """
    word = mixed(elements * signed(GOLDEN) + signed(key + GOLDEN))
    return (word >> 33).double().add_(0.5).mul_(scale * 2.0**-30)


def mixed(word: Int64[Tensor, "*n"]) -> Int64[Tensor, "*n"]:
    """SplitMix64's hash, in place, without its last step, which leaves the upper 31 bits alone."""
    for shift, multiplier in SPLITMIX:
        # An unsigned shift; torch's is signed.
        word ^= (word >> shift).bitwise_and_(2 ** (64 - shift) - 1)
        word *= signed(multiplier)
    return word


def signed(word: int) -> int:
    """A 64-bit word as int64, which torch's arithmetic wraps."""
    word &= 2**64 - 1
    return word - (word >> 63 << 64)


# The inverse of the normal distribution by P. J. Acklam, "An algorithm for computing the inverse
# normal cumulative distribution function" (2003): relative error below 1.15e-9.
CENTRE = (
    (
        -3.969683028665376e01,
        2.209460984245205e02,
        -2.759285104469687e02,
        1.383577518672690e02,
        -3.066479806614716e01,
        2.506628277459239e00,
    ),
    (
        -5.447609879822406e01,
        1.615858368580409e02,
        -1.556989798598866e02,
        6.680131188771972e01,
        -1.328068155288572e01,
        1.0,
    ),
)
TAIL = (
    (
        -7.784894002430293e-03,
        -3.223964580411365e-01,
        -2.400758277161838e00,
        -2.549732539343734e00,
        4.374664141464968e00,
        2.938163982698783e00,
    ),
    (
        7.784695709041462e-03,
        3.224671290700398e-01,
        2.445134137142996e00,
        3.754408661907416e00,
        1.0,
    ),
)
"""Numerator and denominator, highest power first."""
BREAK = 0.9515
"""|u| above which the tail's approximation is used: a tail probability below 0.02425."""


def normal(key: int, elements: Int64[Tensor, " n"], scale: float = 1.0) -> Float64[Tensor, " n"]:
    """Normal of mean 0 and standard deviation `scale`."""
    return normal_quantile(uniform(key, elements)).mul_(scale)


def normal_quantile(u: Float64[Tensor, " n"]) -> Float64[Tensor, " n"]:
    """The x below which a standard normal has probability (1 + u) / 2."""
    q = u * 0.5
    r = q * q
    found = polynomial(CENTRE[0], r).mul_(q).div_(polynomial(CENTRE[1], r))
    tail = (r > (BREAK / 2) ** 2).nonzero()[:, 0]
    end = u[tail]
    s = square_root(log((1 - end.abs()) * 0.5).mul_(-2))
    # The approximation is for the lower tail.
    x = polynomial(TAIL[0], s).div_(polynomial(TAIL[1], s)).mul_(-end.sign())
    return found.index_copy_(0, tail, x)


def polynomial(coefficients: Sequence[float], x: Float64[Tensor, "*n"]) -> Float64[Tensor, "*n"]:
    """Horner's rule, highest power first; a product and a sum are two kernels."""
    first, second, *rest = coefficients
    value = (x * first).add_(second)
    for coefficient in rest:
        value.mul_(x).add_(coefficient)
    return value


SERIES = tuple(1 / k for k in range(11, 0, -2))
"""atanh(z) / z in powers of z**2, highest first."""
LOG_2 = 0.6931471805599453


def log(x: Float64[Tensor, "*n"]) -> Float64[Tensor, "*n"]:
    """Natural logarithm of normal positive numbers, to a relative error of 1e-11 below x = 1/2.

    x = 2**e m with m in [0.5, 1), and log(n) = 2 atanh((n - 1) / (n + 1)) of n = sqrt(2) m.
    """
    m, e = torch.frexp(x)
    m *= math.sqrt(2)
    z = (m - 1).div_(m + 1)
    series = polynomial(SERIES, z * z).mul_(z).mul_(2)
    return e.double().sub_(0.5).mul_(LOG_2).add_(series)


def square_root(x: Float64[Tensor, "*n"]) -> Float64[Tensor, "*n"]:
    """The root of numbers in [7, 45], -2 log p for p from 0.03 to 2**-32, by Newton's method."""
    root = (x * 0.11).add_(1.9)  # Within 9%: three steps make it 1e-10.
    for _ in range(3):
        root = (x / root).add_(root).mul_(0.5)
    return root
