"""`python -m titan_dit predict`: run the network on given inputs, for parity checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from titan_dit.checkpoint.run_checkpoints import find_checkpoint
from titan_dit.checkpoint.store import location
from titan_dit.commands.flags import PredictFlags
from titan_dit.config.section import UserError
from titan_dit.diffusion.base import CaptionedModel
from titan_dit.diffusion.conditions import Given, rows_of
from titan_dit.diffusion.objective import Diffusion
from titan_dit.diffusion.text_lengths import by_text_length
from titan_dit.execution import first_of
from titan_dit.interop.tensor_file import (
    check_finite,
    check_labels,
    not_finite,
    read_tensors,
    write_tensors,
)
from titan_dit.models.base import ModelSpec
from titan_dit.observe import console
from titan_dit.system.progress import ProgressLine
from titan_dit.trained_model import TrainedModel, device_of, load_trained


@runtime_checkable
class OfTokens(Protocol):
    """A [model] section of a network of token ids."""

    vocab_size: int

    def static(self, device: torch.device) -> dict[str, Tensor]:
        """Inputs that are equal for all samples."""


@torch.no_grad()
def predictions_of_tokens(run: TrainedModel, inputs: Path, batch_size: int) -> Iterator[Tensor]:
    """Yield logits [b, n, vocab_size] of a file's tokens, batch by batch, on the CPU.

    Raises UserError for a network without tokens.
    """
    spec, model = run.spec, run.model_config
    if not isinstance(model, OfTokens):
        raise UserError(
            f"predict: {run.path} holds a model {model.name}, which has no tokens. Give a run of "
            "diffusion, GPT or BERT."
        )
    given, context = read_tokens(inputs, spec)
    n = given["tokens"].shape[1]
    static = {
        name: tensor if (dim := spec.static[name].token_dim) is None else tensor.narrow(dim, 0, n)
        for name, tensor in model.static(run.device).items()
    }
    for first in range(0, len(given["tokens"]), batch_size):
        rows = slice(first, first + batch_size)
        part, side = (
            {k: v[rows].long().to(run.device) for k, v in tensors.items()}
            for tensors in (given, context)
        )
        yield first_of(run.network(part, static | side)).float().cpu()


def read_tokens(path: Path, spec: ModelSpec) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Read `tokens` and the network's other inputs; missing ones are 0, missing lengths n.

    Raises UserError for other names or shapes.
    """
    tensors = read_tensors(path, "--input", ("tokens",))
    tokens, vocabulary = tensors["tokens"], next(iter(spec.predictions.values())).shape[-1]
    check(path, "tokens", tokens, vocabulary)
    if tokens.ndim != 2 or tokens.shape[1] > spec.num_tokens:
        raise UserError(
            f"--input {path}: tokens is {list(tokens.shape)}, but the network takes [b, n] with "
            f"n up to {spec.num_tokens}."
        )
    given = {name: tensors.get(name, torch.zeros_like(tokens)) for name in spec.inputs}
    context = {}
    if spec.mask == "lengths":
        whole = torch.full_like(tokens[:, 0], tokens.shape[1])
        context["lengths"] = tensors.get("lengths", whole)
    known = given | context
    for name, tensor in tensors.items():
        if name not in known:
            raise UserError(
                f"--input {path}: the network takes no {name}, only {', '.join(known)}."
            )
        shape = tokens.shape if name in given else tokens.shape[:1]
        if tensor.shape != shape:
            raise UserError(f"--input {path}: {name} is {list(tensor.shape)}, not {list(shape)}.")
    if "types" in given:
        check(path, "types", given["types"], 2)
    if context:
        check(path, "lengths", context["lengths"], tokens.shape[1] + 1, least=1)
    return given, context


def check(path: Path, name: str, ids: Tensor, limit: int, least: int = 0) -> None:
    """Raise UserError for values that are no integers from `least` to below `limit`."""
    is_number = not ids.is_floating_point() and ids.dtype != torch.bool
    if not is_number or ids.min() < least or ids.max() >= limit:
        raise UserError(f"--input {path}: {name} must be integers from {least} to {limit - 1}.")


def main(options: PredictFlags) -> None:
    """Predict in fp32 and write the outputs."""
    out = Path(options.out)
    if out.suffix != ".safetensors":
        raise UserError(f"--out {out}: name a .safetensors file.")
    device = device_of(options.device)
    path = find_checkpoint(location(options.run), options.step, "--run")
    run = load_trained(path, options.weights, options.decay, device, options.trust)
    if isinstance(run.objective, Diffusion):
        found = predict_diffusion(run, run.objective, options)
    else:
        parts = predictions_of_tokens(run, Path(options.input), options.batch_size)
        found = {"out": torch.cat(list(parts))}
    for name, values in found.items():
        if lost := not_finite(values):
            raise UserError(
                f"{name} of samples {lost} of {path} ({run.weights}) is NaN or infinite. Take "
                "another --step of the run, or other --input. Nothing was written."
            )
    write_tensors(out, found)
    size = len(found["out"])
    console.say(f"wrote {out}: {size} predictions of {path} ({run.weights}): {', '.join(found)}")


def predict_diffusion(
    run: TrainedModel, diffusion: Diffusion, options: PredictFlags
) -> dict[str, Tensor]:
    """Predict batch by batch; on the CPU."""
    inputs = read_inputs(Path(options.input), diffusion)
    size, parts = len(inputs["x"]), []
    progress = ProgressLine(size, "samples")
    for first in range(0, size, options.batch_size):
        rows = slice(first, first + options.batch_size)
        part = {name: v[rows].to(run.device) for name, v in inputs.items()}
        given = {name: part.pop(field) for name, field in condition_fields(diffusion).items()}
        parts.append(predict(run, diffusion, part, given))
        progress(min(first + options.batch_size, size))
    progress.end()
    return {name: torch.cat([part[name].cpu() for part in parts]) for name in parts[0]}


def predict(
    run: TrainedModel, diffusion: Diffusion, inputs: Mapping[str, Tensor], given: Given
) -> Mapping[str, Tensor]:
    """Return `out` [b, c_out, h, w], of clips [b, c_out, f, h, w].

    With noise, also the loss per sample and its terms [b].
    """

    def predicted(rows: Tensor | slice, conditions: Sequence[Given]) -> dict[str, Tensor]:
        return predict_alike(run, diffusion, rows_of(inputs, rows), *conditions)

    return by_text_length(diffusion.model, [given], predicted)


@torch.no_grad()
def predict_alike(
    run: TrainedModel, diffusion: Diffusion, inputs: Mapping[str, Tensor], given: Given
) -> dict[str, Tensor]:
    """See `predict`, for texts of one length.

    Raises UserError for a t between timesteps with noise.
    """
    model = diffusion.model
    x, t = model.tokenize(inputs["x"]), inputs["t"]
    static = diffusion.with_text(given).static(x.device)
    if "noise" not in inputs:
        prediction = first_of(run.network({"tokens": x, "timestep": t, **given}, static))
        return {"out": model.detokenize(prediction).contiguous()}
    corrupted = diffusion.corrupt(x, t, model.tokenize(inputs["noise"]))
    if not torch.equal(corrupted.inputs["timestep"], t):
        raise UserError(
            "--input: with noise, t must be integer diffusion timesteps. Round it, or leave noise "
            "out."
        )
    predictions = {"prediction": first_of(run.network({**corrupted.inputs, **given}, static))}
    terms = diffusion.terms(predictions, corrupted.targets)
    losses = {f"loss_{name}": term.mean(1) for name, term in terms.items()}
    losses["loss"] = diffusion.loss(predictions, corrupted.targets).mean(1)
    prediction = predictions["prediction"]
    return {"out": model.detokenize(prediction).contiguous(), **losses}


def condition_fields(diffusion: Diffusion) -> dict[str, str]:
    """Input of the network that conditions a sample -> its name in a file of inputs."""
    if diffusion.captions is None:
        return {"labels": "y"}
    return {"text": "text", "text_length": "text_length"}


def read_inputs(path: Path, diffusion: Diffusion) -> dict[str, Tensor]:
    """Read x, t, the condition and optionally noise, checked against the network's shapes.

    Raises UserError for other shapes or t.
    """
    if reference := diffusion.data.reference:
        raise UserError(
            f"[predict] the network is given {reference}, which a file of inputs does not hold. "
            "Draw with one, by `sample --reference FILE`, or call the network in Python "
            "(docs/python-api.md)."
        )
    names = tuple(condition_fields(diffusion).values())
    tensors = read_tensors(path, "--input", ("x", "t", *names))
    x, t = tensors["x"], tensors["t"]
    sample = diffusion.model.sample_shape
    if tuple(x.shape[1:]) != sample:
        raise UserError(
            f"--input {path}: x is {list(x.shape)}, but the network takes "
            f"[b, {', '.join(map(str, sample))}]."
        )
    rows = len(x)
    shapes = {"t": (rows,), "y": (rows,), "text_length": (rows,), "noise": tuple(x.shape)}
    if isinstance(diffusion.model, CaptionedModel):
        shapes["text"] = (rows, diffusion.model.text_tokens, diffusion.model.text_dim)
    for name, shape in shapes.items():
        if name in tensors and tuple(tensors[name].shape) != shape:
            raise UserError(
                f"--input {path}: {name} is {list(tensors[name].shape)}, but must be "
                f"{list(shape)} for x {list(x.shape)}."
            )
    if isinstance(diffusion.model, CaptionedModel):
        check(path, "text_length", tensors["text_length"], diffusion.model.text_tokens + 1)
    else:
        check_labels(path, "--input", tensors["y"], diffusion.num_classes)
    last = diffusion.last_timestep
    if not (t.min() >= 0 and t.max() <= last):
        raise UserError(f"--input {path}: t must be between 0 and {last:g}.")
    kept = {name: v.float() if v.is_floating_point() else v.long() for name, v in tensors.items()}
    given = {"x": x.float(), "t": t.float(), **{name: kept[name] for name in names}}
    given |= {"noise": tensors["noise"].float()} if "noise" in tensors else {}
    check_finite(path, "--input", given)
    return given
