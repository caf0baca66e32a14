"""Power-function averages of weights, and how to combine some of them to another one.

Karras et al., Analyzing and Improving the Training Dynamics of Diffusion Models (arXiv:2312.02696),
section 3 and appendix C. At time t an average of exponent gamma weighs the weights of time s by
s ** gamma, over its integral from 0 to t. Its relative width sigma_rel, the standard deviation of
that profile over t, does not depend on t. Times may have any unit.

A combination of averages is the same combination of their profiles. Its weights are the
least-squares fit to the profile that is wanted (algorithm 3); they are made to add up to 1, else
the error would grow with the weights instead of with what they have moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
NEGLIGIBLE = 1e-10
"""Weights below it are set to 0: they change no fp32 number."""


def exponent(sigma_rel: float) -> float:
    """The exponent gamma of a relative width, from 0 to 12 ** -0.5."""
    # sigma_rel ** 2 = (gamma + 1) / ((gamma + 2) ** 2 (gamma + 3))
    inverse = sigma_rel**-2
    roots = np.roots([1.0, 7.0, 16.0 - inverse, 12.0 - inverse])
    return float(roots.real.max())


@dataclass(frozen=True)
class Profile:
    """The profile of one average."""

    time: float
    """Time at which it ends, above 0."""
    sigma_rel: float


@dataclass(frozen=True)
class Fit:
    """The weights of given profiles that make up another one."""

    weights: tuple[float, ...]
    """One per given profile; their sum is 1."""
    error: float
    """L2 distance of the combined profile to the wanted one, over the norm of that one."""


def products(a: Sequence[Profile], b: Sequence[Profile]) -> Array:
    """Integrals of the products of profiles, [len(a), len(b)], in 1 / time (eq. 151)."""

    def columns(profiles: Sequence[Profile]) -> tuple[Array, Array]:
        gammas = {p.sigma_rel: exponent(p.sigma_rel) for p in profiles}
        times = np.array([p.time for p in profiles], dtype=np.float64)
        return times, np.array([gammas[p.sigma_rel] for p in profiles], dtype=np.float64)

    (times_a, gammas_a), (times_b, gammas_b) = columns(a), columns(b)
    first, second = times_a[:, None], times_b[None, :]
    gamma_a, gamma_b = gammas_a[:, None], gammas_b[None, :]
    # The later profile is cut off where the earlier one ends.
    power = np.where(first < second, gamma_b, gamma_a)
    smaller, larger = np.minimum(first, second), np.maximum(first, second)
    overlap: Array = (smaller / larger) ** power / ((gamma_a + gamma_b + 1) * larger)
    return (gamma_a + 1) * (gamma_b + 1) * overlap


def fit(given: Sequence[Profile], wanted: Profile) -> Fit:
    """Least-squares weights of `given` for `wanted`, in fp64, under the condition of sum 1."""
    return fits(given, [wanted])[0]


def fits(given: Sequence[Profile], wanted: Sequence[Profile]) -> list[Fit]:
    """`fit` of each of `wanted`."""
    number = len(given)
    square, targets = products(given, given), products(given, wanted)
    unit = max(p.time for p in given)
    # With a Lagrange multiplier for the sum. Profiles of neighbours are nearly dependent: lstsq
    # drops what fp64 cannot tell apart.
    ones = np.ones((number, 1))
    system = np.block([[square * unit, ones], [ones.T, np.zeros((1, 1))]])
    right = np.vstack([targets * unit, np.ones((1, len(wanted)))])
    columns = np.linalg.lstsq(system, right, rcond=None)[0][:number].T
    norms = np.diag(products(wanted, wanted))
    found = []
    for weights, target, norm in zip(columns, targets.T, norms, strict=True):
        weights[np.abs(weights) < NEGLIGIBLE] = 0.0
        weights[np.argmax(np.abs(weights))] += 1.0 - weights.sum()
        missed = weights @ square @ weights - 2 * (weights @ target) + norm
        found.append(Fit(tuple(map(float, weights)), float(np.sqrt(max(missed, 0.0) / norm))))
    return found


def expressible(given: Sequence[Profile], time: float, error: float) -> list[tuple[float, float]]:
    """Ranges of sigma_rel that `given` fit at `time` within `error`, on a grid of 3%."""
    # With three digits, as they are shown: a bound that is rounded later may lie outside.
    steps = (float(f"{sigma_rel:.3g}") for sigma_rel in np.geomspace(0.001, 0.28, 200))
    grid = sorted({*steps, *(p.sigma_rel for p in given)})
    ranges: list[tuple[float, float]] = []
    is_open = False
    for sigma_rel, found in zip(grid, fits(given, [Profile(time, s) for s in grid]), strict=True):
        if found.error <= error:
            first = ranges.pop()[0] if is_open else sigma_rel
            ranges.append((first, sigma_rel))
        is_open = found.error <= error
    return ranges


def clock(step: int, every: int, skipped: Iterable[tuple[int, int]]) -> float:
    """Time, in steps, of the averages after `step`.

    Skipped updates do not advance it; `skipped`: ranges of (first, last) step. With u(s) = s before
    such a range and s * a / b after one from time a to b, an average weighs the weights of step s
    by a power of u, as if the range did not exist. The first updates of a run do not count: the
    initial weights take their place.
    """
    time, done = float(step - step % every), 0
    for first, last in sorted(skipped):
        # Updates follow the multiples of `every`. A step may be in several ranges.
        begin, end = max(done, (first - 1) // every * every), last // every * every
        if 0 < begin < end <= step:
            time *= begin / end
        done = max(done, end)
    return time
