"""`python -m titan_dit predict`: run the network on given inputs, to compare it with others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from titan_dit.checkpoint.store import place
from titan_dit.commands.restore import Restored, device_of, find, restore
from titan_dit.config.section import PositiveInt, Section, UserError
from titan_dit.diffusion.base import Clean
from titan_dit.diffusion.objective import Diffusion
from titan_dit.execution.base import first_of
from titan_dit.interop.tensor_file import check_labels, read_tensors, write_tensors
from titan_dit.observe import console


@dataclass(frozen=True, kw_only=True)
class Options(Section):
    """Run a network on latents, timesteps and labels from a file."""

    section = "predict"

    checkpoint: str
    """A checkpoint, or a run directory for its newest one; a path or a URL."""
    inputs: str
    """FILE.safetensors with `x` [b, c, h, w], `t` [b] (from 0, as the original counts) and
    `y` [b] (labels; the number of classes, or -1, stands for none). With `noise` like x, x is the
    clean latents and the network is given what the objective makes of the two at t."""
    out: str
    """FILE.safetensors for `out` [b, c_out, h, w], a learned sigma behind the prediction; where
    `noise` was given, also the loss of each sample and its parts, `loss_mse`, ... [b]."""
    weights: Literal["ema", "model"] = "ema"
    """Averaged weights, or the last ones."""
    decay: float | None = None
    """Which average, if the run keeps several; the first if not given."""
    step: int | None = None
    """Which checkpoint of a run; the newest if not given."""
    batch_size: PositiveInt = 64
    """Samples at a time."""
    device: str | None = None
    """cuda where there is one, else cpu."""


def main(options: Options) -> None:
    """Restore, predict in fp32, write."""
    out = Path(options.out)
    if out.suffix != ".safetensors":
        raise UserError(f"--out {out}: name a file that ends in .safetensors.")
    device = device_of(options.device)
    path = find(place(options.checkpoint), options.step, "--checkpoint")
    run = restore(path, options.weights, options.decay, device)
    diffusion = run.diffusion("predict")
    inputs = read_inputs(Path(options.inputs), diffusion)
    size, parts = len(inputs["x"]), []
    for first in range(0, size, options.batch_size):
        rows = slice(first, first + options.batch_size)
        part = {name: v[rows].to(device) for name, v in inputs.items()}
        parts.append(predict(run, diffusion, part))
    found = {name: torch.cat([part[name].cpu() for part in parts]) for name in parts[0]}
    write_tensors(out, found)
    console.say(f"wrote {out}: {size} predictions of {path} ({run.weights}): {', '.join(found)}")


@torch.no_grad()
def predict(run: Restored, diffusion: Diffusion, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """`out` [b, c_out, h, w] and, for given noise, the loss of every sample and its parts [b]."""
    model, path = diffusion.model, diffusion.path
    x, t, y = model.tokenize(inputs["x"]), inputs["t"], inputs["y"]
    static = model.static(x.device)
    if "noise" not in inputs:
        prediction = first_of(run.model({"tokens": x, "timestep": t, "labels": y}, static))
        return {"out": model.detokenize(prediction).contiguous()}
    clean = Clean(x, y, model.sample_shape[0])
    corrupted = path.corrupt(clean, t, model.tokenize(inputs["noise"]), y)
    if not torch.equal(corrupted.inputs["timestep"], t):
        raise UserError("--inputs: with noise, t must hold whole steps of the diffusion.")
    prediction = first_of(run.model(corrupted.inputs, static))
    given = {"prediction": prediction}, corrupted.targets
    losses = {f"loss_{name}": term.mean(1) for name, term in diffusion.terms(*given).items()}
    losses["loss"] = diffusion.loss(*given).mean(1)
    return {"out": model.detokenize(prediction).contiguous(), **losses}


def read_inputs(path: Path, diffusion: Diffusion) -> dict[str, Tensor]:
    """x, t, y and perhaps noise of a file, checked against the network."""
    tensors = read_tensors(path, "--inputs", ("x", "t", "y"))
    x, t, y = tensors["x"], tensors["t"], tensors["y"]
    sample = diffusion.model.sample_shape
    if tuple(x.shape[1:]) != sample:
        raise UserError(
            f"--inputs {path}: x is {list(x.shape)}, but the network takes "
            f"[b, {', '.join(map(str, sample))}]."
        )
    rows = len(x)
    for name, shape in (("t", (rows,)), ("y", (rows,)), ("noise", tuple(x.shape))):
        if name in tensors and tuple(tensors[name].shape) != shape:
            raise UserError(
                f"--inputs {path}: {name} is {list(tensors[name].shape)}, but for x of "
                f"{list(x.shape)} it must be {list(shape)}."
            )
    check_labels(path, "--inputs", y, diffusion.model.num_classes)
    last = diffusion.path.last_timestep
    if not (t.min() >= 0 and t.max() <= last):
        raise UserError(f"--inputs {path}: t must lie in 0 to {last}.")
    given = {"x": x.float(), "t": t.float(), "y": y.long()}
    return given | ({"noise": tensors["noise"].float()} if "noise" in tensors else {})
