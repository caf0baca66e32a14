"""Console lines of `replay`: the samples of a repeated step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from titan_dit.data.sample_ranges import ranges_of


@dataclass(frozen=True)
class Replayed:
    """One sample of the repeated step."""

    number: int
    row: int
    loss: float
    microbatch: int
    described: Mapping[str, float]
    """The objective's values for it: label, timestep, ..."""
    not_finite: tuple[str, ...]
    """Names of the tensors (fields, inputs, prediction, loss) with NaN or infinity."""


def report(
    samples: Sequence[Replayed], norms: Sequence[tuple[int, int, float]], show: int
) -> Iterator[str]:
    """Yield the lines to print; of the finite samples, the `show` of the highest loss."""
    faulty = [sample for sample in samples if sample.not_finite]
    others = [sample for sample in samples if not sample.not_finite]
    for number, size, norm in norms:
        yield f"microbatch {number}: {size} samples, gradient norm {norm:.6g}"
    yield f"{len(faulty)} of {len(samples)} samples are at fault" + (":" if faulty else "")
    yield from map(line_of, faulty)
    if not faulty and not all(math.isfinite(norm) for _, _, norm in norms):
        yield "Only a gradient overflows: find its sample with --microbatch-size 1."
    if show and others:
        yield f"of the others, the {min(show, len(others))} of the highest loss:"
        yield from map(line_of, sorted(others, key=lambda sample: -sample.loss)[:show])


def line_of(sample: Replayed) -> str:
    """Format one sample."""
    described = "".join(f"{name} {value:.4g}  " for name, value in sample.described.items())
    fault = f"  not finite: {', '.join(sample.not_finite)}" if sample.not_finite else ""
    return (
        f"  sample {sample.number}  row {sample.row}  {described}"
        f"loss {sample.loss:.6g}  microbatch {sample.microbatch}{fault}"
    )


def shown(numbers: Sequence[int]) -> str:
    """Format numbers as ranges: "176-191, 200-203"."""
    return ", ".join(f"{first}-{end - 1}" for first, end in ranges_of(numbers))
