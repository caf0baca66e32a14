"""References for scores: real pictures, their moments in a file, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TypeAlias

import numpy as np
import torch

from titan_dit.config.section import UserError
from titan_dit.scores import pictures, score
from titan_dit.scores.features import Features
from titan_dit.scores.moments import Moments
from titan_dit.scores.pictures import Pictures
from titan_dit.scores.score import Statistics

UNKNOWN = 2**31
"""Count of moments that were stored without one. It is large: the covariance then has full rank."""
MEAN, COVARIANCE, COUNT, MADE_BY, SIZE = "mu", "sigma", "count", "features", "size"
"""Arrays of a .npz with moments. MEAN and COVARIANCE are those of ADM and pytorch-fid; SIZE is the
pictures' side."""

Reference: TypeAlias = Pictures | Statistics

REMEDY = "Give pictures, or a file whose moments were computed again."


def open_reference(
    path: str, size: int, network: Features, names: Sequence[str], where: str
) -> Reference:
    """Open a reference: pictures of a folder or a .npz, or the moments of a .npz.

    `size`: width and height of the drawn pictures; `names`: the metrics. Raises UserError if there
    is no such reference, or if it cannot serve the metrics.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        return pictures.open_folder(place, size, where)
    if not place.is_file() or place.suffix != ".npz":
        raise UserError(
            f"{where} {path}: no such reference. Give a folder of pictures, or a .npz file with "
            f"{pictures.PICTURES}, or {MEAN} and {COVARIANCE}."
        )
    held = pictures.names_in(place, where)
    if pictures.PICTURES not in held:
        if other := misfit_of_moments(place, network, where):
            raise UserError(other)
        if lacking := sorted({"kid", "prdc"} & {*names}):
            raise UserError(
                f"{where} {path} holds moments only, but {', '.join(lacking)} needs pictures. Give "
                "pictures, or leave the metric out."
            )
        return Statistics(moments_of(place, size, network, where))
    found = pictures.open_npz(place, where)
    check_size(found.read(range(1)).shape[1:3], size, f"{where} {path}")
    serves = "fid" in names and {MEAN, COVARIANCE} <= held
    if serves and not misfit_of_moments(place, network, where):
        return replace(found, moments=moments_of(place, size, network, where))
    return found


def misfit_of_moments(path: Path, network: Features, where: str) -> str:
    """The error if another network made the moments of a .npz; "" if this one did."""
    made_by = ""
    if MADE_BY in pictures.names_in(path, where):
        stored = pictures.array_of(path, where, MADE_BY)
        made_by = (
            str(stored) if stored.dtype.kind == "U" else f"{stored.dtype} {list(stored.shape)}"
        )
    if made_by and made_by != f"{network.name} {network.digest}":
        return (
            f"{where} {path} holds moments of {made_by[:40]}..., but the features are "
            f"{network.name} {network.digest[:12]}.... Give pictures, or moments of these features."
        )
    if not made_by and network.name != "inception":
        return (
            f"{where} {path} does not say which features its moments are of; those of Inception "
            f"are meant, not {network.name}. Give pictures."
        )
    return ""


def moments_of(path: Path, size: int, network: Features, where: str) -> Moments:
    """Moments of a .npz: `mu`, `sigma` and, if it is there, `count`.

    Raises UserError unless they fit the network's features of pictures of `size`.
    """
    mu, sigma = (pictures.array_of(path, where, name) for name in (MEAN, COVARIANCE))
    width = network.probe(size)[0].shape[1]
    if any(array.dtype.kind not in "fiu" for array in (mu, sigma)) or (
        (mu.shape, sigma.shape) != ((width,), (width, width))
    ):
        raise UserError(
            f"{where} {path}: {MEAN} is {mu.dtype} {list(mu.shape)} and {COVARIANCE} {sigma.dtype} "
            f"{list(sigma.shape)}. Those of {network.name} are numbers [{width}] and "
            f"[{width}, {width}]. {REMEDY}"
        )
    mean, covariance = (torch.from_numpy(np.array(a, dtype=np.float64)) for a in (mu, sigma))
    if not (mean.isfinite().all() and covariance.isfinite().all()):
        raise UserError(f"{where} {path}: {MEAN} or {COVARIANCE} is not finite. {REMEDY}")
    allowed = 1e-4 * covariance.abs().max()  # Of fp32.
    if (covariance - covariance.T).abs().max() > allowed:
        raise UserError(
            f"{where} {path}: {COVARIANCE} is not symmetric, so it is no covariance. {REMEDY}"
        )
    if torch.linalg.eigvalsh(covariance)[0] < -allowed:
        raise UserError(
            f"{where} {path}: {COVARIANCE} has a negative eigenvalue, so it is no covariance. "
            f"{REMEDY}"
        )
    # Without MADE_BY it is a file of others, whose `size` may be anything.
    if {SIZE, MADE_BY} <= pictures.names_in(path, where):
        side = integer_of(path, where, SIZE, 1)
        check_size((side, side), size, f"{where} {path}")
    count = count_of(path, where)
    return Moments(count, mean, covariance * (count - 1))


def check_size(found: Sequence[int], size: int, where: str) -> None:
    """Raise UserError unless pictures have the drawn ones' size: features depend on it."""
    height, width = found
    if (height, width) != (size, size):
        raise UserError(
            f"{where} is of pictures of {width} x {height} pixels, but the drawn ones have {size} "
            f"x {size}. Give those of that size, or a folder of pictures: they are cropped."
        )


def count_of(path: Path, where: str) -> int:
    """Number of pictures behind the moments of a .npz; UNKNOWN if it is not stored."""
    if COUNT not in pictures.names_in(path, where):
        return UNKNOWN
    return integer_of(path, where, COUNT, 2)


def integer_of(path: Path, where: str, name: str, least: int) -> int:
    """An array of a .npz that holds one integer, at least `least`. Raises UserError."""
    array = pictures.array_of(path, where, name)
    if array.dtype.kind not in "iu" or array.shape or array < least:
        is_number = array.dtype.kind in "biuf" and not array.shape
        given = str(array) if is_number else f"{array.dtype} {list(array.shape)}"
        raise UserError(
            f"{where} {path}: {name} is {given}, not an integer of at least {least}. {REMEDY}"
        )
    return int(array)


def counts(real: Reference) -> dict[str, int]:
    """Metric -> number of a reference's pictures that it compares with."""
    if isinstance(real, Statistics):
        return {"fid": real.moments.count}
    of_fid = real.count if real.moments is None else real.moments.count
    return {"fid": of_fid, "kid": real.count, "prdc": real.count}


def reference_statistics(
    network: Features, real: Reference, names: Sequence[str]
) -> Statistics | None:
    """Statistics of a reference on the first rank; None on the others. Collective.

    Moments in its file replace those of its pictures, which may be fewer.
    """
    if isinstance(real, Statistics):
        return real
    if real.moments is None:
        return score.compute_statistics(network, real, names)
    if not {"kid", "prdc"} & {*names}:
        return Statistics(real.moments)
    found = score.compute_statistics(network, real, names)
    return found and replace(found, moments=real.moments)


def save_moments(file: IO[bytes], described: Statistics, network: Features, size: int) -> None:
    """Write moments as ADM's `mu` and `sigma`, with their count, features and pictures' size."""
    moments = described.moments
    np.savez(
        file,
        mu=moments.mean.numpy(),
        sigma=moments.covariance.numpy(),
        count=np.array(moments.count),
        features=np.array(f"{network.name} {network.digest}"),
        size=np.array(size),
    )
