"""What --labels, --noise and --vae of `sample` and `evaluate` name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from titan_dit.commands.chosen_classes import chosen_classes
from titan_dit.commands.flags.sample import PictureFlags
from titan_dit.config.section import UserError
from titan_dit.diffusion.base import LatentModel
from titan_dit.diffusion.drawing import spread_labels
from titan_dit.diffusion.objective import Diffusion
from titan_dit.interop.tensor_file import check_finite, check_labels, read_tensors
from titan_dit.pictures import autoencoder
from titan_dit.pictures.autoencoder import Autoencoder

NO_VAE = "none"


def labels_of(text: str, num: int, num_classes: int, names: Sequence[str]) -> Int64[Tensor, " num"]:
    """Spread the classes of --labels over `num` samples; -1 is unconditional."""
    word = text if text in names else text.lower()
    if word == "none":
        return torch.full((num,), -1)
    every = word == "all"
    classes = range(num_classes) if every else chosen_classes(text, num_classes, names)
    return spread_labels(num, list(classes))


def read_noise(
    path: Path, model: LatentModel
) -> tuple[Float[Tensor, "n c h w"], Int64[Tensor, " n"]]:
    """Read the initial noise and the labels (-1: unconditional) from a file."""
    tensors = read_tensors(path, "--noise", ("noise", "labels"))
    noise, labels = tensors["noise"], tensors["labels"]
    if tuple(noise.shape[1:]) != model.sample_shape or noise.shape[:1] != labels.shape:
        raise UserError(
            f"--noise {path}: noise is {list(noise.shape)} and labels {list(labels.shape)}; the "
            f"network takes [n, {', '.join(map(str, model.sample_shape))}] and [n]."
        )
    check_labels(path, "--noise", labels, model.num_classes)
    check_finite(path, "--noise", {"noise": noise})
    labels = labels.long()
    return noise.float(), labels.where(labels < model.num_classes, -1)


def vae_of(diffusion: Diffusion, flags: PictureFlags, device: torch.device) -> Autoencoder | None:
    """The autoencoder of --vae, else the recorded one if the output needs pictures."""
    data, suffix = diffusion.data, Path(flags.out).suffix
    if flags.vae == NO_VAE or data.value_range is not None:
        if flags.vae not in ("", NO_VAE):
            raise UserError(f"--vae {flags.vae}: the run was trained on pixels, not on latents.")
        needs = suffix in ("", ".npz") and data.value_range is None
    elif flags.vae or (data.vae is not None and suffix != ".safetensors"):
        try:
            vae = autoencoder.load(flags.vae or data.vae_source, device)
        except UserError as error:
            if flags.vae:
                raise
            raise UserError(
                f"{error} It made the run's latents. If it is somewhere else now: --vae DIR."
            ) from None
        vae.check_fits(data, "--vae", diffusion.model.sample_shape[0])
        return vae
    else:
        needs = suffix in ("", ".npz")
    if needs:
        what = "a folder of pictures" if not suffix else "a .npz"
        raise UserError(
            f"--out {flags.out}: {what} needs an autoencoder, because the run's samples are "
            "latents: give --vae DIR, or write a .safetensors file."
        )
    return None
