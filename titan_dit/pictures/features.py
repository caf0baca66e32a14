"""Features of pictures by a frozen network, which `data encode --features` stores for [repa]."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from titan_dit.config.dotted_names import imported
from titan_dit.config.section import UserError
from titan_dit.data.latent_facts import FEATURES_DTYPE, TEXT_DTYPES, FeatureFacts
from titan_dit.pictures.autoencoder import digest_of_weights

WHERE = "[data encode] features"
IN_STEPS = "[repa] network"
MOST = 10**4
"""Maximum rows, and columns, of a grid."""


def user_function(name: str, device: torch.device, where: str) -> tuple[Callable[..., Any], str]:
    """A user's function of pictures, and the SHA-256 of its weights, else of its source file.

    A class is instantiated once, without arguments. A module is moved to the device. Raises
    UserError for what cannot be imported or called.
    """
    function = imported(name, where)
    if isinstance(function, type):
        function = function()
    if not callable(function):
        raise UserError(f"{where} {name} cannot be called. Give a function of pictures.")
    if isinstance(function, nn.Module):
        function = function.to(device).eval().requires_grad_(False)
        return function, digest_of_weights(function.state_dict())
    module = sys.modules[name.partition(":")[0]]
    return function, hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest()


def parse_grid(text: str) -> tuple[int, int]:
    """Rows and columns of 16x16. Raises UserError."""
    found = re.fullmatch(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", text)
    sizes = [int(number) for number in found.groups()] if found else []
    if not sizes or max(sizes) > MOST:
        raise UserError(
            f"[data encode] features_grid={text}: give rows x columns up to {MOST}, such as 16x16."
        )
    return sizes[0], sizes[1]


@dataclass(frozen=True)
class PictureFeatures:
    """A frozen network on a device, for pictures of one size."""

    name: str
    digest: str
    """See `user_function`."""
    function: Callable[[Tensor], Any]
    where: str
    """The flag or key that names it, for errors."""
    grid: tuple[int, int]
    """Rows and columns of the stored features, to which the network's are resampled."""
    dim: int

    @classmethod
    def load(
        cls,
        name: str,
        device: torch.device,
        size: tuple[int, int],
        grid: tuple[int, int] | None,
        where: str = WHERE,
    ) -> PictureFeatures:
        """Load a function, and call it for one picture. Raises UserError.

        `size`: height and width. `grid`: None takes the network's own.
        """
        function, digest = user_function(name, device, where)
        # Noise, not black: a function may divide by the norm of its features.
        rng = torch.Generator().manual_seed(0)
        picture = torch.randint(256, (1, 3, *size), generator=rng, dtype=torch.uint8)
        found = checked(f"{where} {name}", function, picture.to(device))
        rows, columns = grid or (found.shape[1], found.shape[2])
        return cls(name, digest, function, where, (rows, columns), found.shape[3])

    def to(self, device: torch.device) -> None:
        """Move the network, if it is a module; a function computes where its pictures are."""
        if isinstance(self.function, nn.Module):
            self.function.to(device)

    @property
    def facts(self) -> FeatureFacts:
        """The features as facts of a dataset."""
        return FeatureFacts(name=self.name, digest=self.digest, grid=self.grid, dim=self.dim)

    @property
    def entry(self) -> dict[str, Any]:
        """The features in a manifest."""
        return {"name": self.name, "digest": self.digest, "grid": [*self.grid], "dim": self.dim}

    @property
    def num_bytes(self) -> int:
        """Bytes of a picture's features."""
        rows, columns = self.grid
        return rows * columns * self.dim * TEXT_DTYPES[FEATURES_DTYPE].itemsize

    def of(self, pictures: UInt8[Tensor, "b 3 h w"]) -> Float[Tensor, "b rows columns dim"]:
        """Features to store. Raises UserError if the function gives others than for one picture."""
        found = checked(f"{self.where} {self.name}", self.function, pictures)
        if found.shape[3] != self.dim:
            raise UserError(
                f"{self.where} {self.name} gave {found.shape[3]} elements of a feature, but "
                f"{self.dim} for the first picture. Give as many for all."
            )
        if found.shape[1:3] != self.grid:
            channels = found.permute(0, 3, 1, 2).float()
            channels = F.interpolate(channels, self.grid, mode="bilinear", antialias=True)
            found = channels.permute(0, 2, 3, 1)
        return found.to(TEXT_DTYPES[FEATURES_DTYPE])


@torch.no_grad()
def checked(
    what: str, function: Callable[[Tensor], Any], pictures: UInt8[Tensor, "b 3 h w"]
) -> Float[Tensor, "b rows columns dim"]:
    """Features by a user's function. Raises UserError for what is none."""
    found, count = function(pictures), len(pictures)
    if (
        not isinstance(found, Tensor)
        or found.ndim != 4
        or len(found) != count
        or not found.numel()
        or not found.is_floating_point()
        or max(found.shape[1:3]) > MOST
    ):
        given = type(found).__name__
        if isinstance(found, Tensor):
            given = f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}"
        raise UserError(
            f"{what} gave {given} for {count} pictures. It must give a floating-point "
            f"tensor ({count}, rows, columns, dim)."
        )
    return found
