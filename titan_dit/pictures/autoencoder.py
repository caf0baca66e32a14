"""An autoencoder of diffusers: pictures to latents and back.

Stored latents are the autoencoder's own, unscaled; the dataset's scale and shift make them the
model's input. Pictures are uint8 RGB, which the autoencoder sees in [-1, 1].

FLUX.2's networks take 2x2 latent pixels as one, with four times the channels. They are normalised
by the running mean and variance of the autoencoder's `bn`, which its `encode` leaves out.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from titan_dit.config import user_text
from titan_dit.config.section import Finite, PositiveFloat, PositiveInt, UserError, conform, show
from titan_dit.data.latent_facts import LatentFacts, Units, VAEFacts
from titan_dit.pictures.library import diffusers
from titan_dit.system import stdio
from titan_dit.system.launched_as import LaunchedAs

CONFIG = "config.json"
INSIDE = "vae"
"""Folder of the autoencoder in a pipeline of diffusers."""
PREFIX = "Autoencoder"
"""Prefix of the diffusers classes that can be used."""
CONFIG_KEYS = {
    "latent_channels": PositiveInt,
    "block_out_channels": tuple[PositiveInt, ...] | None,
    "scaling_factor": Finite | None,
    "shift_factor": Finite | None,
    "latents_mean": tuple[Finite, ...] | None,
    "latents_std": tuple[PositiveFloat, ...] | None,
}
"""Config keys whose values are checked here; diffusers checks none."""
PACKED, PATCH = "AutoencoderKLFlux2", 2
"""The class whose latents are cut into squares, and their side in latent pixels."""
MAX_LAYERS = 64
"""Maximum layers of a block. diffusers would build any number before it reads the weights."""


@dataclass(frozen=True)
class Autoencoder:
    """An autoencoder with its weights, in fp32 and eval mode."""

    module: nn.Module
    facts: VAEFacts
    source: str
    """Name that it was loaded by, or its folder as an absolute path: other commands start
    elsewhere."""
    channels: int
    """Channels of a latent."""
    scale: Units
    shift: Units
    """A model should see (latent - shift) * scale, as the autoencoder's config says."""
    patch: int = 1
    """Latent pixels of `module` per side that are one of ours: channels are (c, row, column)."""

    value_range: ClassVar[None] = None
    """Latents have none."""

    @property
    def entry(self) -> dict[str, Any]:
        """`vae` of a manifest."""
        return {
            "class": self.facts.kind,
            "source": self.source,
            "digest": self.facts.digest,
            "factor": self.facts.factor,
        }

    @torch.no_grad()
    def encode(
        self, pictures: UInt8[Tensor, "b 3 h w"]
    ) -> tuple[Float[Tensor, "b c p q"], Float[Tensor, "b c p q"]]:
        """Mean and std of the posterior of every picture."""
        pixels = pictures.to(self.device, non_blocking=True).float() / 127.5 - 1
        posterior = self.module.encode(pixels).latent_dist  # type: ignore[operator]
        mean, std = (F.pixel_unshuffle(x, self.patch) for x in (posterior.mean, posterior.std))
        return mean, std

    @torch.no_grad()
    def decoded(self, latents: Float[Tensor, "b c p q"]) -> Float[Tensor, "b 3 h w"]:
        """Pictures of stored latents, in [-1, 1]."""
        own = F.pixel_shuffle(latents.to(self.device).float(), self.patch)
        found: Tensor = self.module.decode(own).sample  # type: ignore[operator]
        return found

    def decode(self, latents: Float[Tensor, "b c p q"]) -> UInt8[Tensor, "b 3 h w"]:
        """Pictures of stored latents."""
        return as_pixels(self.decoded(latents))

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.module.parameters()).device

    def check_encodes(self, where: str) -> None:
        """Raise UserError unless pictures have a mean and std: a tiny or a video autoencoder."""
        side = 2 * self.facts.factor
        try:
            mean, std = self.encode(torch.zeros(1, 3, side, side, dtype=torch.uint8))
            # A config can describe other latents than its layers give.
            found = mean.shape == std.shape == (1, self.channels, 2, 2)
        except Exception:  # Of diffusers or torch.
            found = False
        if not found:
            raise UserError(
                f"{where} {self.source} is {self.facts.kind}, which gives no mean and std of a "
                "picture, or not of the size that its config says. Give another one, such as "
                "AutoencoderKL."
            )

    def check_fits(self, data: LatentFacts, where: str, channels: int | None = None) -> None:
        """Raise UserError if another autoencoder made a dataset's latents.

        `channels`: channels of the model's samples, if they will be decoded.
        """
        made_by = data.vae
        if data.value_range is not None:
            raise UserError(
                f"{where} {self.source}: the run was trained on pixels, not latents. Leave it out."
            )
        if made_by is not None and made_by.digest != self.facts.digest:
            raise UserError(
                f"{where} {self.source} is {self.facts}, but the latents were made by {made_by} "
                f"({data.vae_source}). Give that one."
            )
        if data.shape[0] not in (self.channels, 2 * self.channels):
            raise UserError(
                f"{where} {self.source} has {self.channels} latent channels, but a sample of the "
                f"dataset has {data.shape[0]}. Give the autoencoder that made it."
            )
        if channels not in (None, self.channels):
            raise UserError(
                f"{where} {self.source} has {self.channels} latent channels, but the model draws "
                f"samples with {channels}. Train it with [model] in_channels = {self.channels}."
            )


def as_pixels(decoded: Float[Tensor, "b 3 h w"]) -> UInt8[Tensor, "b 3 h w"]:
    """Pictures in [-1, 1] as 8-bit RGB."""
    return ((decoded + 1) * 127.5).clamp(0, 255).round().byte()


def load(source: str, device: torch.device, where: str = "--vae") -> Autoencoder:
    """Load an autoencoder: a diffusers folder, a pipeline's folder, or a name on the hub.

    `where` names the flag or key in errors. Raises UserError if there is none.
    """
    library = diffusers(where)
    folder = Path(source).expanduser()
    if folder.is_dir() and not (folder / CONFIG).is_file() and (folder / INSIDE).is_dir():
        folder = folder / INSIDE
    is_path = folder.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1
    if not folder.is_dir() and is_path:
        raise UserError(f"{where} {source}: no such folder.")
    named = str(folder) if folder.is_dir() else source
    if not folder.is_dir() and LaunchedAs.here().is_first:
        stdio.write(sys.stderr, f"there is no folder {source}: loading it from the hub\n")
    try:
        if (folder / CONFIG).is_file():
            user_text.check_size(folder / CONFIG, f"{where} {source}: {CONFIG}")
        config = library.AutoencoderKL.load_config(named)
        kind = class_of(library, config, f"{where} {source}")
        if folder.is_dir():
            check_parameters_fit(kind, config, folder, f"{where} {source}")
        module: nn.Module
        module, report = kind.from_pretrained(
            named, torch_dtype=torch.float32, output_loading_info=True
        )
        # With its class's defaults: older releases wrote no scaling_factor.
        config = dict(module.config)  # type: ignore[arg-type]
        patch = 1 if kind.__name__ != PACKED else PATCH
        if patch > 1:
            missing = [name for name in report["missing_keys"] if name.startswith("bn.")]
            scale, shift = units_of_packed(module, config, missing, f"{where} {source}")
        else:
            scale, shift = units_of(config)
        channels = int(config["latent_channels"]) * patch**2
        factor = factor_of(module, config) * patch
    except UserError:
        raise
    except Exception as error:  # A config with values of wrong types can raise anything.
        told = error if folder.is_dir() else first_cause(error)
        reason = " ".join(str(told).split())[:300]
        nowhere = "" if folder.is_dir() else "no such folder, and by this name on the hub "
        raise UserError(
            f"{where} {source}: {nowhere}no autoencoder can be loaded from it ({reason})."
        ) from None
    facts = VAEFacts(
        kind=kind.__name__, digest=digest_of_weights(module.state_dict()), factor=factor
    )
    module = module.to(device).eval().requires_grad_(False)
    kept = str(folder.resolve()) if folder.is_dir() else source
    return Autoencoder(module, facts, kept, channels, scale, shift, patch)


def first_cause(error: BaseException) -> BaseException:
    """The first error of a chain: diffusers reports a missing network as a missing file."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error


def class_of(library: Any, config: Mapping[str, Any], where: str) -> Any:
    """The diffusers class of a config; UserError unless it is an autoencoder with valid values."""
    name = config.get("_class_name") if isinstance(config, Mapping) else None
    kind = getattr(library, str(name), None)
    if not str(name).startswith(PREFIX) or kind is None or "latent_channels" not in config:
        raise UserError(f"{where} is {show(name)}. Give an autoencoder such as AutoencoderKL.")
    if config.get("quantization_config"):
        # diffusers would import the library that it names.
        raise UserError(f"{where} is quantized (quantization_config). Give it in fp32 or bf16.")
    for key, hint in CONFIG_KEYS.items():
        conform(config.get(key), hint, f"{where}: {CONFIG}: {key}")
    for key, value in config.items():
        layers = value if isinstance(value, list | tuple) else [value]
        if "layers" in key and any(isinstance(n, int | float) and n > MAX_LAYERS for n in layers):
            raise UserError(f"{where}: {CONFIG}: {key}={show(value)} is above {MAX_LAYERS}.")
    return kind


def check_parameters_fit(kind: Any, config: Mapping[str, Any], folder: Path, where: str) -> None:
    """Raise UserError if a config describes more parameters than the folder's files can hold.

    diffusers allocates them before it reads the weights.
    """
    with torch.device("meta"):
        parameters = sum(p.numel() for p in kind.from_config(dict(config)).parameters())
    held = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    if parameters > held:
        raise UserError(
            f"{where}: {CONFIG} describes {parameters:,} parameters, but the files of the folder "
            f"hold {held:,} bytes. Restore the folder."
        )


def units_of(config: Mapping[str, Any]) -> tuple[Units, Units]:
    """Scale and shift of a config: one for all channels, or one for each."""
    mean, std = config.get("latents_mean"), config.get("latents_std")
    if mean and std:
        return tuple(1 / float(value) for value in std), tuple(float(value) for value in mean)
    scale, shift = config.get("scaling_factor"), config.get("shift_factor")
    return float(1.0 if scale is None else scale), float(0.0 if shift is None else shift)


def units_of_packed(
    module: Any, config: Mapping[str, Any], missing: Sequence[str], where: str
) -> tuple[Units, Units]:
    """Scale and shift of each channel, by the statistics of a FLUX.2 autoencoder's `bn`.

    `missing`: tensors of `bn` that its files lack. Raises UserError without them, and for others
    than of 2x2 latent pixels.
    """
    if missing:
        raise UserError(
            f"{where} has no {missing[0]}, by which FLUX.2's latents are normalised. Take the "
            "autoencoder of the release whole."
        )
    epsilon = conform(config.get("batch_norm_eps"), PositiveFloat, f"{where}: batch_norm_eps")
    if list(config.get("patch_size") or ()) != [PATCH, PATCH]:
        raise UserError(
            f"{where}: {CONFIG}: patch_size={show(config.get('patch_size'))}; FLUX.2's pipelines "
            f"take {PATCH}x{PATCH} latent pixels as one."
        )
    variance, mean = (getattr(module.bn, f"running_{name}").double() for name in ("var", "mean"))
    if not (variance + epsilon > 0).all() or not mean.isfinite().all():
        raise UserError(f"{where}: bn has a variance below 0, or values that are not finite.")
    return tuple((variance + epsilon).rsqrt().tolist()), tuple(mean.tolist())


def factor_of(module: nn.Module, config: Mapping[str, Any]) -> int:
    """Pixels per latent, along each side."""
    factor = getattr(module, "spatial_compression_ratio", None)
    return int(factor or 2 ** (len(config["block_out_channels"]) - 1))


def digest_of_weights(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, shapes and fp32 values, whatever files and dtype they were stored in."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        values = tensors[name].detach().float().cpu().contiguous()
        sha.update(f"{name} {list(values.shape)}\n".encode())
        sha.update(values.numpy().tobytes())
    return sha.hexdigest()
