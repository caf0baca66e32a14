"""LoRA: a linear layer's weight plus a product of two small matrices (arXiv:2106.09685).

W + alpha / rank * B A, with A [rank, inputs] and B [outputs, rank]. B starts at 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from titan_dit.config.parameter_groups import GroupConfig, groups_of, matches
from titan_dit.config.training import LoRAConfig
from titan_dit.models import lora_dropout
from titan_dit.models.initializers import Independent, Initializer, constant, zeros

A, B = "lora_A", "lora_B"
"""Names of an adapted layer's parameters, as in peft."""
UNIFORM = Independent("uniform", lambda shape: shape[1] ** -0.5)
"""A's initial values: uniform within 1 / sqrt(inputs), as peft's and as a linear layer's."""


def is_adapter(name: str) -> bool:
    """True if a parameter is an adapter's A or B."""
    return name.rpartition(".")[2] in (A, B)


def trained(names: Iterable[str], config: LoRAConfig, groups: Sequence[GroupConfig]) -> set[str]:
    """The parameters that neither [optimizer] `groups` nor [lora] freeze."""
    names = list(names)
    if config.rank:
        beside = (f"*.{A}", f"*.{B}", "objective.*", *config.trained)
        names = [name for name in names if matches(name, beside)]
    frozen = {name for name, group in groups_of(names, groups).items() if group.frozen}
    return set(names) - frozen


def adapted_layers(model: nn.Module, targets: Sequence[str]) -> dict[str, nn.Linear]:
    """The linear layers whose names match, by name; not those of the objective."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
        and not name.startswith("objective.")
        and matches(name, targets)
    }


def shapes(model: nn.Module, config: LoRAConfig) -> dict[str, torch.Size]:
    """The shapes of all A and B, by name; none with rank 0."""
    found = {}
    for name, layer in adapted_layers(model, config.targets if config.rank else ()).items():
        outputs, inputs = layer.weight.shape
        found[f"{name}.{A}"] = torch.Size([config.rank, inputs])
        found[f"{name}.{B}"] = torch.Size([outputs, config.rank])
    return found


def initializers(model: nn.Module) -> dict[str, Initializer]:
    """Name -> initializer of every adapter and of the dropout's layer-number buffers.

    A is uniform, B zero.
    """
    names = [name for name, _ in model.named_parameters() if is_adapter(name)]
    found: dict[str, Initializer] = {name: UNIFORM if name.endswith(A) else zeros for name in names}
    end = f".{lora_dropout.NUMBER}"
    layers = [name.removesuffix(end) for name, _ in model.named_buffers() if name.endswith(end)]
    return found | {f"{n}{end}": constant(lora_dropout.layer_number(n)) for n in layers}


def pairs(names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (weight, A, B) of every adapted layer, by the names of parameters."""
    for name in names:
        if name.endswith(f".{A}"):
            layer = name.removesuffix(f".{A}")
            yield f"{layer}.weight", name, f"{layer}.{B}"


def product(
    a: Float[Tensor, "rank i"], b: Float[Tensor, "o rank"], scale: float
) -> Float[Tensor, "o i"]:
    """`scale` B A, the adapter's addition to its layer's weight, in fp64."""
    return b.double() @ a.double() * scale
