"""Moving averages of (sharded) weights, in fp32, shard by shard: without communication."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from titan_dit.config.training import EMAConfig
from titan_dit.optim.optimizer import device_of, pieces, shards_of, to_fp32
from titan_dit.optim.stochastic_rounding import PIECE

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
    """L2 distance of the combined profile to the wanted one, relative to the wanted one's norm."""


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


NOTHING: Mapping[str, Collection[str]] = MappingProxyType({})
"""An empty selection: no tensor of any average."""


class EMA:
    """One average per decay, and one per width (sigma_rel) of a power function.

    Frozen parameters have no average: it would equal the parameter.
    An update is memory-bound (12 bytes per parameter): on a GPU it can overlap the next forward
    (`run_beside`).
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: EMAConfig) -> None:
        self.config = config.settled()
        self.parameters = {n: p for n, p in parameters.items() if p.requires_grad}
        self._averages: dict[str, dict[str, Tensor]] = {
            key: {name: averaged_from(p) for name, p in self.parameters.items()}
            for key in config.names
        }
        self._exponents = [exponent(sigma_rel) for sigma_rel in config.power]
        self._beside: torch.cuda.Stream | None = None

    @property
    def averages(self) -> dict[str, dict[str, Tensor]]:
        """Key (`EMAConfig.names`) -> name -> tensor, after any update in flight."""
        self.settle()
        return self._averages

    def run_beside(self, optimizer: torch.optim.Optimizer) -> None:
        """Run updates on a side stream; optimizer steps wait for them."""
        if self._averages and any(p.is_cuda for p in self.parameters.values()):
            self._beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            optimizer.register_step_pre_hook(lambda *_: self.settle())

    def settle(self) -> None:
        """Make the current stream wait for the last update."""
        if self._beside is not None:
            torch.cuda.current_stream().wait_stream(self._beside)

    def decay(self, decay: float, step: int) -> float:
        """Decay of the update after `step` (1-based): (`decay`, less in warm-up) ** [ema] every."""
        if self.config.warmup:
            update = step // self.config.every
            decay = min(decay, (1 + update) / (10 + update))
        return float(decay**self.config.every)

    def shares(self, step: int) -> list[float]:
        """Share of the weights after `step` in each average.

        A power function of exponent gamma keeps (1 - every / step) ** (gamma + 1): the share of the
        weights of step s is then s ** (gamma + 1) - (s - every) ** (gamma + 1), over step **
        (gamma + 1) (arXiv:2312.02696). The initial weights have no share.
        """
        exponential = [1 - self.decay(decay, step) for decay in self.config.decays]
        kept = 1 - self.config.every / step
        return exponential + [1 - kept ** (gamma + 1) for gamma in self._exponents]

    @torch.no_grad()
    def restart(self, except_for: Mapping[str, Collection[str]] = NOTHING) -> None:
        """Reset the averages to the weights. `except_for`: names of tensors to keep, by key."""
        for key, average in self.averages.items():
            kept = except_for.get(key, ())
            reset = {name: tensor for name, tensor in average.items() if name not in kept}
            if reset:
                torch._foreach_copy_(
                    shards_of(reset.values()), shards_of(self.parameters[n] for n in reset)
                )

    @torch.no_grad()
    def copy_first_to_all(self) -> None:
        """Copy the first average to all others."""
        averages = [shards_of(average.values()) for average in self.averages.values()]
        for average in averages[1:]:
            torch._foreach_copy_(average, averages[0])

    @torch.no_grad()
    def update(self, step: int, skip: Tensor) -> None:
        """Update all averages if [ema] every divides `step`, unless `skip` (on device) is true."""
        if step % self.config.every:
            return
        if self._beside is None:
            self._update(step, skip)
            return
        self._beside.wait_stream(torch.cuda.current_stream())
        skip.record_stream(self._beside)
        with torch.cuda.stream(self._beside):
            self._update(step, skip)

    def _update(self, step: int, skip: Tensor) -> None:
        if not self._averages:
            return
        skip = skip.to(device_of(self.parameters.values()))
        skipped = skip.float()
        move = move_together if skip.is_cuda else move_one_by_one
        in_bf16 = any(p.dtype == torch.bfloat16 for p in self.parameters.values())
        name_of: dict[Tensor, str] = {p: name for name, p in self.parameters.items()}
        # Weights in bf16 are copied to fp32, some at a time.
        most = PIECE if in_bf16 else sys.maxsize
        for some in pieces([*self.parameters.values()], most):
            weights = [to_fp32(weight) for weight in shards_of(some)]
            for share, average in zip(self.shares(step), self._averages.values(), strict=True):
                move(shards_of(average[name_of[p]] for p in some), weights, share, skipped)

    @contextmanager
    @torch.no_grad()
    def swapped_in(self, key: str | None = None) -> Iterator[None]:
        """Swap an average into the model's weights inside the block; a no-op without averages.

        `key`: one of `averages`; None takes the first.
        """
        averages = self.averages
        if not averages:
            yield
            return
        chosen = averages[next(iter(averages)) if key is None else key]
        average, weights = shards_of(chosen.values()), shards_of(self.parameters.values())
        kept = [weight.clone() for weight in weights]
        torch._foreach_copy_(weights, average)
        try:
            yield
        finally:
            torch._foreach_copy_(weights, kept)


def averaged_from(parameter: Tensor) -> Tensor:
    """A copy of a parameter to average from: fp32 if the parameter is bf16."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return parameter.detach().to(dtype, copy=True)


def move_one_by_one(
    averages: list[Tensor], weights: list[Tensor], share: float, skipped: Tensor
) -> None:
    """Add share (weights - averages) to averages of equal shapes: a kernel per tensor.

    `skipped`: if 1, nothing is added; 0 or 1, an fp32 scalar on the device. Reading it on the host
    would synchronise.
    """
    moved = share * (1 - skipped)
    torch._foreach_lerp_(averages, weights, [moved] * len(weights))


def move_together(
    averages: list[Tensor], weights: list[Tensor], share: float, skipped: Tensor
) -> None:
    """`move_one_by_one` up to rounding, in one call per dtype and without temporary memory.

    Few launches on a GPU. It is a step of SGD with the weights as gradients and a weight decay of
    -1, so that the direction is weights - averages, and with a negative rate. (`maximize` negates
    the gradient before or after the decay, depending on the version of torch.)
    """
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for average, weight in zip(averages, weights, strict=True):
        some, targets = by_dtype.setdefault(weight.dtype, ([], []))
        some.append(average)
        targets.append(weight)
    for some, targets in by_dtype.values():
        torch._fused_sgd_(
            some,
            targets,
            [],
            lr=-share,
            weight_decay=-1.0,
            maximize=False,
            momentum=0.0,
            dampening=0.0,
            nesterov=False,
            is_first_step=False,
            found_inf=skipped,
        )
