"""`python -m titan_dit predict`: run the network on given inputs, for parity checks."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from titan_dit.checkpoint.run_path import find_checkpoint
from titan_dit.checkpoint.store import location
from titan_dit.commands import predict_tokens
from titan_dit.commands.flags.predict import Options
from titan_dit.config.section import UserError
from titan_dit.diffusion.base import Clean
from titan_dit.diffusion.objective import Diffusion
from titan_dit.execution.base import first_of
from titan_dit.interop.tensor_file import (
    check_finite,
    check_labels,
    not_finite,
    read_tensors,
    write_tensors,
)
from titan_dit.observe import console
from titan_dit.system.progress import ProgressLine
from titan_dit.trained_model import TrainedModel, device_of, load_trained


def main(options: Options) -> None:
    """Predict in fp32 and write the outputs."""
    out = Path(options.out)
    if out.suffix != ".safetensors":
        raise UserError(f"--out {out}: name a .safetensors file.")
    device = device_of(options.device)
    path = find_checkpoint(location(options.checkpoint), options.step, "--checkpoint")
    run = load_trained(path, options.weights, options.decay, device, options.trust)
    if isinstance(run.objective, Diffusion):
        found = predict_diffusion(run, run.objective, options)
    else:
        parts = predict_tokens.predictions(run, Path(options.inputs), options.batch_size)
        found = {"out": torch.cat(list(parts))}
    for name, values in found.items():
        if lost := not_finite(values):
            raise UserError(
                f"{name} of samples {lost} of {path} ({run.weights}) is NaN or infinite. Take "
                "another --step of the run, or other --inputs. Nothing was written."
            )
    write_tensors(out, found)
    size = len(found["out"])
    console.say(f"wrote {out}: {size} predictions of {path} ({run.weights}): {', '.join(found)}")


def predict_diffusion(
    run: TrainedModel, diffusion: Diffusion, options: Options
) -> dict[str, Tensor]:
    """Predict batch by batch; on the CPU."""
    inputs = read_inputs(Path(options.inputs), diffusion)
    size, parts = len(inputs["x"]), []
    progress = ProgressLine(size, "samples")
    for first in range(0, size, options.batch_size):
        rows = slice(first, first + options.batch_size)
        part = {name: v[rows].to(run.device) for name, v in inputs.items()}
        parts.append(predict(run, diffusion, part))
        progress(min(first + options.batch_size, size))
    progress.end()
    return {name: torch.cat([part[name].cpu() for part in parts]) for name in parts[0]}


@torch.no_grad()
def predict(
    run: TrainedModel, diffusion: Diffusion, inputs: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return `out` [b, c_out, h, w]; with noise, also the loss per sample and its terms [b]."""
    model, path = diffusion.model, diffusion.path
    x, t, y = model.tokenize(inputs["x"]), inputs["t"], inputs["y"]
    static = model.static(x.device)
    if "noise" not in inputs:
        prediction = first_of(run.network({"tokens": x, "timestep": t, "labels": y}, static))
        return {"out": model.detokenize(prediction).contiguous()}
    clean = Clean(x, y, model.sample_shape[0])
    corrupted = path.corrupt(clean, t, model.tokenize(inputs["noise"]), y)
    if not torch.equal(corrupted.inputs["timestep"], t):
        raise UserError("--inputs: with noise, t must be integer diffusion timesteps.")
    prediction = first_of(run.network(corrupted.inputs, static))
    given = {"prediction": prediction}, corrupted.targets
    losses = {f"loss_{name}": term.mean(1) for name, term in diffusion.terms(*given).items()}
    losses["loss"] = diffusion.loss(*given).mean(1)
    return {"out": model.detokenize(prediction).contiguous(), **losses}


def read_inputs(path: Path, diffusion: Diffusion) -> dict[str, Tensor]:
    """Read x, t, y and optionally noise, checked against the network's shapes."""
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
                f"--inputs {path}: {name} is {list(tensors[name].shape)}, but must be "
                f"{list(shape)} for x {list(x.shape)}."
            )
    check_labels(path, "--inputs", y, diffusion.model.num_classes)
    last = diffusion.path.last_timestep
    if not (t.min() >= 0 and t.max() <= last):
        raise UserError(f"--inputs {path}: t must be between 0 and {last:g}.")
    given = {"x": x.float(), "t": t.float(), "y": y.long()}
    given |= {"noise": tensors["noise"].float()} if "noise" in tensors else {}
    check_finite(path, "--inputs", given)
    return given
