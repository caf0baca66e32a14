"""An autoencoder of diffusers: pictures, or clips, to latents and back.

Stored latents are the autoencoder's own, unscaled; the dataset's scale and shift make them the
model's input. Pictures are uint8 RGB, which the autoencoder sees in [-1, 1].

FLUX.2's networks take 2x2 latent pixels as one, with four times the channels. They are normalised
by the running mean and variance of the autoencoder's `bn`, which its `encode` leaves out.

Wan's and Qwen-Image's are of clips: the first frame becomes a latent frame, and every four after it
another one. A picture is a clip of one frame. An autoencoder of pictures encodes each frame alone.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from titan_dit.config import user_text
from titan_dit.config.section import (
    Bound,
    Finite,
    PositiveFloat,
    PositiveInt,
    UserError,
    conform,
    show,
)
from titan_dit.data.latent_facts import LatentFacts, Units, VAEFacts
from titan_dit.pictures.library import diffusers
from titan_dit.system import stdio
from titan_dit.system.launched_as import LaunchedAs

CONFIG = "config.json"
INSIDE = "vae"
"""Folder of the autoencoder in a pipeline of diffusers."""
PREFIX = "Autoencoder"
"""Prefix of the diffusers classes that can be used."""
MAX_LAYERS = 64
"""Maximum layers of a block. diffusers would build any number before it reads the weights."""
MAX_LEVELS = 16
"""Maximum levels of an autoencoder of clips: each but the last one may halve the sides."""
Layers: TypeAlias = Annotated[int, Bound(least=1, most=MAX_LAYERS)]
CONFIG_KEYS = {
    "latent_channels": PositiveInt | None,
    "z_dim": PositiveInt | None,
    "base_dim": PositiveInt | None,
    "dim_mult": tuple[PositiveInt, ...] | None,
    "num_res_blocks": Layers | None,
    "temperal_downsample": tuple[bool, ...] | None,
    "block_out_channels": tuple[PositiveInt, ...] | None,
    "scaling_factor": Finite | None,
    "shift_factor": Finite | None,
    "latents_mean": tuple[Finite, ...] | None,
    "latents_std": tuple[PositiveFloat, ...] | None,
}
"""Config keys whose values are checked here; diffusers checks none."""
PACKED, PATCH = "AutoencoderKLFlux2", 2
"""The class whose latents are cut into squares, and their side in latent pixels."""
OF_CLIPS = ("AutoencoderKLWan", "AutoencoderKLQwenImage")
"""The classes for clips."""
FRAMES_AT_ONCE = 4
"""Frames that they take at once, after the first one."""
Precision: TypeAlias = Literal["float32", "bfloat16"]
Tiles: TypeAlias = Literal["auto", "always", "never"]


@dataclass(frozen=True)
class Autoencoder:
    """An autoencoder with its weights, in eval mode."""

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
    tiles: Tiles = "auto"
    """Whether it encodes and decodes in overlapping tiles, which take less memory and give slightly
    other values: always, never, or from the first batch on that does not fit into a GPU's."""

    value_range: ClassVar[None] = None
    """Latents have none."""

    @property
    def entry(self) -> dict[str, Any]:
        """`vae` of a manifest."""
        found: dict[str, Any] = {
            "class": self.facts.kind,
            "source": self.source,
            "digest": self.facts.digest,
            "factor": self.facts.factor,
        }
        if self.is_of_clips:
            found["frames_factor"] = self.facts.frames_factor
        if self.dtype != torch.float32:
            found["dtype"] = str(self.dtype).removeprefix("torch.")
        if self.tiles == "always":
            found["tiles"] = True
        return found

    @property
    def is_of_clips(self) -> bool:
        """True if the autoencoder is one of clips, to which a picture is a clip of one frame."""
        return self.facts.kind in OF_CLIPS

    @torch.no_grad()
    def encode(
        self, pictures: Shaped[Tensor, "b 3 *size"]
    ) -> tuple[Float[Tensor, "b c *found"], Float[Tensor, "b c *found"]]:
        """Mean and std of the posterior of every picture [b, 3, h, w] or clip [b, 3, f, h, w].

        Values are 0 to 255, uint8 or float. Those of clips, and all that an autoencoder of clips
        gives, are [b, c, f, h, w].
        """
        clips = pictures.unsqueeze(2) if pictures.ndim == 4 else pictures
        size = clips.shape[2:]
        if not self.is_of_clips:
            clips = clips.transpose(1, 2).flatten(0, 1)  # Each frame alone.
        pixels = clips.to(self.device, non_blocking=True).float() / 127.5 - 1
        posterior = self.encoded_whole(pixels.to(self.dtype)).latent_dist
        found = []
        for values in (posterior.mean, posterior.std):
            values = values.float()
            if not self.is_of_clips:
                values = F.pixel_unshuffle(values, self.patch)
                if pictures.ndim == 5:
                    values = values.view(-1, size[0], *values.shape[1:]).transpose(1, 2)
            found.append(values)
        return found[0], found[1]

    @torch.no_grad()
    def decoded(self, latents: Float[Tensor, "b c *size"]) -> Float[Tensor, "b 3 *found"]:
        """Pictures of stored latents [b, c, h, w], or clips of [b, c, f, h, w], in [-1, 1]."""
        is_clip = latents.ndim == 5
        own = latents.to(self.device)
        if self.is_of_clips:
            own = own if is_clip else own.unsqueeze(2)
        else:
            frames = own.transpose(1, 2).flatten(0, 1) if is_clip else own
            own = F.pixel_shuffle(frames, self.patch)
        found: Tensor = self.tiled_if_needed(self.module.decode, own.to(self.dtype)).sample
        found = found.float()
        if self.is_of_clips:
            return found if is_clip else found[:, :, 0]
        if is_clip:
            found = found.view(-1, latents.shape[2], *found.shape[1:]).transpose(1, 2)
        return found

    def decode(self, latents: Float[Tensor, "b c *size"]) -> UInt8[Tensor, "b 3 *found"]:
        """Pictures, or clips, of stored latents."""
        return as_pixels(self.decoded(latents))

    def encoded_whole(self, values: Tensor) -> Any:
        """Call the module's encoder, in tiles only if all batches are.

        Tiles change values, so with "auto" a batch that does not fit raises UserError: what is
        encoded would depend on the memory of each rank.
        """
        try:
            return self.module.encode(values)  # type: ignore[operator]
        except torch.OutOfMemoryError:
            if self.tiles != "auto":
                raise
        raise UserError(
            f"[data encode] {self.source}: [{', '.join(map(str, values.shape))}] does not fit into "
            "the GPU's memory. Give --vae-tiles always, or a lower --batch-size."
        )

    def tiled_if_needed(self, call: Any, values: Tensor) -> Any:
        """Call the module, in tiles if it has to; once it did not fit, always."""
        if self.tiles != "auto" or getattr(self.module, "use_tiling", True):
            return call(values)
        try:
            return call(values)
        except torch.OutOfMemoryError:
            pass  # Outside of the block its tensors are freed.
        stdio.write(
            sys.stderr,
            f"{self.source}: [{', '.join(map(str, values.shape))}] does not fit into the GPU's "
            "memory: in tiles from here on, whose values differ slightly\n",
        )
        torch.cuda.empty_cache()
        self.module.enable_tiling()  # type: ignore[operator]
        return call(values)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return next(self.module.parameters()).dtype

    def check_encodes(self, where: str) -> None:
        """Raise UserError unless pictures, or clips, have a mean and std of the expected size."""
        side = 2 * self.facts.factor
        pixels = torch.zeros(1, 3, 1 + self.facts.frames_factor, side, side, dtype=torch.uint8)
        try:
            mean, std = self.encode(pixels)
            # A config can describe other latents than its layers give.
            found = mean.shape == std.shape == (1, self.channels, 2, 2, 2)
        except Exception:  # Of diffusers or torch.
            found = False
        if not found:
            raise UserError(
                f"{where} {self.source} is {self.facts.kind}, which gives no mean and std of a "
                "picture, or not of the size that its config says. Give another one, such as "
                "AutoencoderKL, or AutoencoderKLWan for clips."
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


def as_pixels(decoded: Float[Tensor, "b 3 *size"]) -> UInt8[Tensor, "b 3 *size"]:
    """Pictures or clips in [-1, 1] as 8-bit RGB."""
    return ((decoded + 1) * 127.5).clamp(0, 255).round().byte()


def load(
    source: str,
    device: torch.device,
    where: str = "--vae",
    dtype: Precision = "float32",
    tiles: Tiles = "auto",
) -> Autoencoder:
    """Load an autoencoder: a diffusers folder, a pipeline's folder, or a name on the hub.

    `where` names the flag or key in errors. `dtype`: of weights and activations; latents and
    decoded pixels are fp32. Raises UserError if there is none.
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
        missing = [name for name in report["missing_keys"] if name.startswith("bn.")]
        found = facts_of(module, kind.__name__, missing, f"{where} {source}")
    except UserError:
        raise
    except Exception as error:  # A config with values of wrong types can raise anything.
        told = error if folder.is_dir() else first_cause(error)
        reason = " ".join(str(told).split())[:300]
        nowhere = "" if folder.is_dir() else "no such folder, and by this name on the hub "
        raise UserError(
            f"{where} {source}: {nowhere}no autoencoder can be loaded from it ({reason}). Give the "
            "folder of one of diffusers."
        ) from None
    module = module.to(device, getattr(torch, dtype)).eval().requires_grad_(False)
    if tiles == "always":
        enable: Any = getattr(module, "enable_tiling", None)
        if enable is None:
            raise UserError(f"{where} {source}: {kind.__name__} has no tiles. Leave them out.")
        enable()
    kept = str(folder.resolve()) if folder.is_dir() else source
    return Autoencoder(module=module, source=kept, tiles=tiles, **found)


def facts_of(module: Any, kind: str, missing: Sequence[str], where: str) -> dict[str, Any]:
    """Fields of an `Autoencoder`: its facts, channels, units and patch.

    `missing`: tensors of `bn` that its files lack. Raises UserError for a config that contradicts
    itself.
    """
    # With its class's defaults: older releases wrote no scaling_factor.
    config = dict(module.config)
    patch, frames_factor = 1, 1
    if kind == PACKED:
        patch = PATCH
        scale, shift = units_of_packed(module, config, missing, where)
    else:
        scale, shift = units_of(config)
    if kind in OF_CLIPS:
        frames_factor = check_of_clips(config, f"{where}: {CONFIG}")
    facts = VAEFacts(
        kind=kind,
        digest=digest_of_weights(module.state_dict()),  # In fp32, whatever it runs in.
        factor=factor_of(module, config) * patch,
        frames_factor=frames_factor,
    )
    channels = int(config[channels_key(kind)]) * patch**2
    units = {"scale": scale, "shift": shift}
    return {"facts": facts, "channels": channels, "patch": patch, **units}


def first_cause(error: BaseException) -> BaseException:
    """The first error of a chain: diffusers reports a missing network as a missing file."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error


def class_of(library: Any, config: Mapping[str, Any], where: str) -> Any:
    """The diffusers class of a config; UserError unless it is an autoencoder with valid values."""
    name = config.get("_class_name") if isinstance(config, Mapping) else None
    kind = getattr(library, str(name), None)
    if not str(name).startswith(PREFIX) or kind is None or channels_key(str(name)) not in config:
        raise UserError(f"{where} is {show(name)}. Give an autoencoder such as AutoencoderKL.")
    if config.get("quantization_config"):
        # diffusers would import the library that it names.
        raise UserError(f"{where} is quantized (quantization_config). Give it in fp32 or bf16.")
    for key, hint in CONFIG_KEYS.items():
        conform(config.get(key), hint, f"{where}: {CONFIG}: {key}")
    for key, value in config.items():
        layers = value if isinstance(value, list | tuple) else [value]
        if "layers" in key and any(isinstance(n, int | float) and n > MAX_LAYERS for n in layers):
            raise UserError(
                f"{where}: {CONFIG}: {key}={show(value)} is above {MAX_LAYERS}. Lower it."
            )
    if name in OF_CLIPS and len(config.get("dim_mult") or ()) > MAX_LEVELS:
        raise UserError(f"{where}: {CONFIG}: dim_mult has more than {MAX_LEVELS} levels. Lower it.")
    return kind


def channels_key(kind: str) -> str:
    """The key of a config that holds the channels of a latent."""
    return "z_dim" if kind in OF_CLIPS else "latent_channels"


def check_of_clips(config: Mapping[str, Any], where: str) -> int:
    """Frames per latent frame of an autoencoder of clips, by its config with all defaults.

    Raises UserError unless its sizes agree with each other.
    """
    if (found := 2 ** sum(config["temperal_downsample"])) != FRAMES_AT_ONCE:
        raise UserError(
            f"{where}: temperal_downsample makes a latent frame of {found} frames. diffusers "
            f"encodes {FRAMES_AT_ONCE} frames at once: two of its values must be true."
        )
    patch = conform(config.get("patch_size"), Layers | None, f"{where}: patch_size") or 1
    levels = 2 ** (len(config["dim_mult"]) - 1) * patch
    said = config.get("scale_factor_spatial") or levels
    if said != levels:
        raise UserError(
            f"{where}: scale_factor_spatial={said}, but the levels of dim_mult divide a side by "
            f"{levels}. Restore the file."
        )
    for key in ("latents_mean", "latents_std"):
        if len(config.get(key) or ()) != config["z_dim"]:
            raise UserError(
                f"{where}: {key} holds {len(config.get(key) or ())} numbers for z_dim="
                f"{config['z_dim']} channels. Restore the file."
            )
    return int(found)


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
            f"take {PATCH}x{PATCH} latent pixels as one. Take the autoencoder of the release."
        )
    variance, mean = (getattr(module.bn, f"running_{name}").double() for name in ("var", "mean"))
    if not (variance + epsilon > 0).all() or not mean.isfinite().all():
        raise UserError(
            f"{where}: bn has a variance below 0, or values that are not finite. Restore the "
            "folder."
        )
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
