"""`sample` of a diffusion run: pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from titan_dit.commands.chosen_classes import chosen_classes
from titan_dit.commands.flags.sample import CommonFlags, PictureFlags
from titan_dit.config import dotted_names
from titan_dit.config.section import UserError
from titan_dit.diffusion import drawing
from titan_dit.diffusion.base import LatentModel
from titan_dit.diffusion.drawing import spread_labels
from titan_dit.diffusion.objective import Diffusion
from titan_dit.diffusion.pictures import draw_grid
from titan_dit.diffusion.samplers import ode
from titan_dit.diffusion.samplers.base import Sampler
from titan_dit.execution.base import first_of
from titan_dit.interop.tensor_file import check_labels, read_tensors, write_tensors
from titan_dit.models.base import Model
from titan_dit.observe import console
from titan_dit.system.progress import ProgressLine
from titan_dit.trained_model import TrainedModel

NUM = 100


def check(flags: CommonFlags) -> None:
    """Require a file for pictures."""
    if Path(flags.out).suffix not in (".safetensors", ".png"):
        raise UserError(f"--out {flags.out}: name a .safetensors or .png file.")


def main(run: TrainedModel, diffusion: Diffusion, flags: PictureFlags) -> None:
    """Draw samples and write them."""
    out = Path(flags.out)
    drawing.check(diffusion.path, diffusion.model, flags, "--{}")
    sampler = drawing.sampler_of(diffusion.path, flags.sampler, "--sampler")
    for line in dotted_names.origins({"sampler": sampler}):
        console.say(line)
    names = diffusion.data.class_names
    labels = labels_of(flags.labels, flags.num or NUM, diffusion.model.num_classes, names)
    noise = None
    if flags.noise is not None:
        noise, labels = read_noise(Path(flags.noise), diffusion.model)
    console.say(
        f"sampling {len(labels)} from {run.path} ({run.weights}): {sampler.__name__}, "
        f"{flags.steps} steps, cfg_scale {flags.cfg_scale:g}, seed {flags.seed}"
    )
    samples = draw(run.network, diffusion, sampler, labels, noise, flags)
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".png":
        draw_grid(out, samples, labels.tolist(), diffusion.data.value_range, names)
    else:
        write_tensors(out, {"samples": samples.contiguous(), "labels": labels})
    console.say(f"wrote {out}")


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
    labels = labels.long()
    return noise.float(), labels.where(labels < model.num_classes, -1)


@torch.no_grad()
def draw(
    network: Model,
    diffusion: Diffusion,
    sampler: Sampler,
    labels: Int64[Tensor, " n"],
    noise: Float[Tensor, "n c h w"] | None,
    flags: PictureFlags,
) -> Float[Tensor, "n c h w"]:
    """Draw samples in the dataset's stored units, fp32, on the CPU."""
    model, device = diffusion.model, next(network.parameters()).device
    parts = []
    # Heun evaluates the network twice in a step; of a sampler from outside it is not known.
    evaluations = flags.steps * (2 if sampler is ode.heun else 1)
    progress = ProgressLine(len(labels), "samples")
    for first in range(0, len(labels), flags.batch_size):
        rows = slice(first, first + flags.batch_size)
        part = labels[rows].to(device)
        tokens = drawing.generate(
            Counted(network, partial(report, progress, first, len(part), evaluations)),
            diffusion.path,
            model,
            part,
            torch.arange(first, first + len(part), device=device),
            seed=flags.seed,
            sampler=sampler,
            steps=flags.steps,
            eta=flags.eta,
            cfg_scale=flags.cfg_scale,
            cfg_channels=flags.cfg_channels,
            noise=None if noise is None else model.tokenize(noise[rows].to(device)),
        )
        parts.append(diffusion.data.to_stored_units(model.detokenize(tokens)).cpu())
        progress(first + len(part))
    progress.end()
    return torch.cat(parts)


class Counted:
    """A network that reports the number of its calls after each."""

    def __init__(self, network: Model, report: Callable[[int], None]) -> None:
        self.network, self.report, self.calls = network, report, 0

    def __call__(self, inputs: Mapping[str, Tensor], static: Mapping[str, Tensor]) -> Tensor:
        """Run the network."""
        output = first_of(self.network(inputs, static))
        self.calls += 1
        self.report(self.calls)
        return output


def report(progress: ProgressLine, first: int, size: int, evaluations: int, calls: int) -> None:
    """Show the samples done: those before this batch, and the batch's share by network calls."""
    progress(first + size * min(calls, evaluations) // evaluations)
