"""The part of `predict` for language models: logits of token ids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.execution.base import first_of
from titan_dit.interop.tensor_file import read_tensors
from titan_dit.models.base import ModelSpec
from titan_dit.trained_model import TrainedModel


@runtime_checkable
class OfTokens(Protocol):
    """A [model] section of a network of token ids."""

    vocabulary: int

    def static(self, device: torch.device) -> dict[str, Tensor]:
        """Inputs that are equal for all samples."""


@torch.no_grad()
def predictions(run: TrainedModel, inputs: Path, batch_size: int) -> Iterator[Tensor]:
    """Yield logits [b, n, vocabulary] of a file's tokens, batch by batch, on the CPU."""
    spec, model = run.spec, run.model_config
    if not isinstance(model, OfTokens):
        raise UserError(f"predict: {run.path} holds a model {model.name}, which has no tokens.")
    given, context = read_inputs(inputs, spec)
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


def read_inputs(path: Path, spec: ModelSpec) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Read `tokens` and what else the network takes; absent, it is 0, and lengths are whole."""
    tensors = read_tensors(path, "--inputs", ("tokens",))
    tokens, vocabulary = tensors["tokens"], next(iter(spec.predictions.values())).shape[-1]
    check(path, "tokens", tokens, vocabulary)
    if tokens.ndim != 2 or tokens.shape[1] > spec.num_tokens:
        raise UserError(
            f"--inputs {path}: tokens is {list(tokens.shape)}, but the network takes [b, n] with "
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
                f"--inputs {path}: the network takes no {name}, only {', '.join(known)}."
            )
        shape = tokens.shape if name in given else tokens.shape[:1]
        if tensor.shape != shape:
            raise UserError(f"--inputs {path}: {name} is {list(tensor.shape)}, not {list(shape)}.")
    if "types" in given:
        check(path, "types", given["types"], 2)
    if context:
        check(path, "lengths", context["lengths"], tokens.shape[1] + 1, least=1)
    return given, context


def check(path: Path, name: str, ids: Tensor, limit: int, least: int = 0) -> None:
    """Refuse what is no integer from `least` to below `limit`."""
    is_number = not ids.is_floating_point() and ids.dtype != torch.bool
    if not is_number or ids.min() < least or ids.max() >= limit:
        raise UserError(f"--inputs {path}: {name} must be integers from {least} to {limit - 1}.")
