"""The interface of a family of transformers architectures, to read and write their directories."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from titan_dit.config.section import UserError
from titan_dit.interop.tensor_layouts import Same
from titan_dit.models.base import ModelConfig


class Family(ABC):
    """Architectures of transformers that correspond to one [model]."""

    architectures: tuple[str, ...]
    """Their names in config.json."""
    model: str
    """[model] name."""
    prefix: str
    """Prefix of the names outside the head; directories of the model without a head lack it."""
    dropped: re.Pattern[str]
    """Tensors in files that the network does not have: masks, positions, other heads."""
    special: Mapping[str, str]
    """Keys of config.json with ids of special tokens -> fields of the data's facts."""
    copies: Mapping[str, str] = MappingProxyType({})
    """Name of a tensor that some files store twice -> name of the original, if it is tied."""
    renamed: Mapping[str, str] = MappingProxyType({})
    """Old ending of a name -> current ending."""

    @abstractmethod
    def tables(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """[model] and [objective] for a config.json; UserError if it has no counterpart here."""

    @abstractmethod
    def config(self, model: ModelConfig, objective: Any) -> dict[str, Any]:
        """The config.json of a network; UserError if it fits no architecture."""

    @abstractmethod
    def layout(self, name: str, model: ModelConfig) -> Same:
        """The layout of our parameter `name` in transformers' tensors."""

    def name(self, theirs: str) -> str:
        """The current name of a tensor in transformers."""
        for old, new in self.renamed.items():
            if theirs.endswith(old):
                theirs = theirs.removesuffix(old) + new
        return theirs


def settings(
    config: Mapping[str, Any],
    needed: Sequence[str],
    defaults: Mapping[str, Any],
    fixed: Mapping[str, tuple[Any, ...]],
) -> dict[str, Any]:
    """Values of a config.json; `fixed` keys may have only the values listed, or be absent."""
    if missing := [key for key in needed if not isinstance(config.get(key), int)]:
        raise UserError(f"config.json has no {', '.join(missing)}.")
    for key, allowed in fixed.items():
        if (value := config.get(key, allowed[0])) not in allowed:
            raise UserError(
                f"config.json has {key}={value!r}, which titan_dit cannot compute; it has "
                f"{' or '.join(map(repr, allowed))}."
            )
    found = {key: config.get(key, value) for key, value in defaults.items()}
    return {key: config[key] for key in needed} | found


def width_of(ffn: int, hidden: int) -> int:
    """[model] ffn for a width: 0 if it is the default, so that it equals a config without it."""
    return 0 if ffn == 4 * hidden else ffn
