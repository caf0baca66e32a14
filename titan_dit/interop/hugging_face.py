"""Language models of transformers: weights and configs to ours and back, bitwise."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.interop import tensor_layouts
from titan_dit.interop.hf_bert import BERT
from titan_dit.interop.hf_family import Family
from titan_dit.interop.hf_gpt2 import GPT2
from titan_dit.interop.on_demand import OnDemand, outline_of
from titan_dit.interop.tensor_layouts import Same
from titan_dit.models.base import ModelConfig

FAMILIES: tuple[Family, ...] = (GPT2(), BERT())


def family_of(architecture: str) -> Family:
    """The family of an architecture; UserError if there is none."""
    for family in FAMILIES:
        if architecture in family.architectures:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.architectures)
    raise UserError(f"its architecture {architecture} is not one of {known}.")


def family_for(model: ModelConfig) -> Family:
    """The family that a [model] can be written as; UserError if there is none."""
    for family in FAMILIES:
        if model.name == family.model:
            return family
    known = ", ".join(family.model for family in FAMILIES)
    raise UserError(f"model {model.name}: only dit, {known} can be exported.")


def layouts_of(
    family: Family, model: ModelConfig, parameters: Mapping[str, Tensor]
) -> dict[str, Same]:
    """Name of our parameter -> its layout in transformers' tensors."""
    return {name: family.layout(name, model) for name in parameters}


def to_ours(
    family: Family, model: ModelConfig, objective: Any, tensors: Mapping[str, Tensor]
) -> OnDemand:
    """Our parameters in fp32 from tensors of transformers; UserError on a mismatch."""
    with torch.device("meta"):
        parameters = dict(objective.model_spec(model).build().named_parameters())
    expected = {k: v.shape for k, v in to_theirs(family, model, parameters).items()}
    theirs = cleaned(family, tensors, expected.keys())
    check(theirs, expected)
    return tensor_layouts.to_ours(layouts_of(family, model, parameters), theirs, parameters)


def to_theirs(
    family: Family, model: ModelConfig, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors of transformers from our parameters."""
    return dict(tensor_layouts.to_theirs(layouts_of(family, model, tensors), tensors))


def cleaned(family: Family, tensors: Mapping[str, Tensor], names: Collection[str]) -> OnDemand:
    """The tensors under current names, with the prefix; dropped tensors and copies are left out."""
    kept = {family.name(name): name for name in tensors}
    if not any(name.startswith(family.prefix) for name in kept):
        whole = {*names, *family.copies}
        kept = {k if k in whole else family.prefix + k: stored for k, stored in kept.items()}
    kept = {k: v for k, v in kept.items() if k in names or not family.dropped.fullmatch(k)}
    for copy, original in family.copies.items():
        if copy in names or copy not in kept:
            continue
        stored = kept.pop(copy)
        if not torch.equal(tensors[kept.setdefault(original, stored)], tensors[stored]):
            raise UserError(
                f"{copy} differs from {original}, but in this network they are one tensor "
                "(config.json: tie_word_embeddings)."
            )
    outline = outline_of(tensors)
    return OnDemand({k: outline[v] for k, v in kept.items()}, lambda name: tensors[kept[name]])


def check(tensors: Mapping[str, Tensor], expected: Mapping[str, torch.Size]) -> None:
    """Refuse missing and unexpected tensors, wrong shapes and dtypes, NaN and infinity."""
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    problems += [f"{name} is unexpected" for name in tensors if name not in expected]
    for name, tensor in tensors.items():
        if name not in expected:
            continue
        if tensor.shape != expected[name]:
            problems.append(f"{name} is {list(tensor.shape)}, not {list(expected[name])}")
        elif not tensor.is_floating_point():
            problems.append(f"{name} is {str(tensor.dtype)[6:]}")
        elif not tensor.isfinite().all():
            problems.append(f"{name} holds NaN or infinity")
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError(f"its weights do not fit config.json: {'; '.join(problems[:3])}{more}.")
