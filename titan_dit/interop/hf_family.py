"""What an architecture of transformers must tell, so that its directories are read and written."""

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
    """Architectures that are one [model] of ours."""

    architectures: tuple[str, ...]
    """As config.json names them."""
    model: str
    """[model] name."""
    prefix: str
    """Of the names of the part without a head; directories of this part alone lack it."""
    dropped: re.Pattern[str]
    """Tensors in files that the network does not have: masks, positions, other heads."""
    special: Mapping[str, str]
    """Keys of config.json with ids of special tokens -> fields of the data's facts."""
    copies: Mapping[str, str] = MappingProxyType({})
    """Names that some files hold twice, and of which tensor they are a copy if it is tied."""
    renamed: Mapping[str, str] = MappingProxyType({})
    """Older endings of names, and those of today."""

    @abstractmethod
    def tables(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """[model] and [objective] for a config.json; UserError if no network of ours is it."""

    @abstractmethod
    def config(self, model: ModelConfig, objective: Any) -> dict[str, Any]:
        """The config.json of a network; UserError if no architecture is it."""

    @abstractmethod
    def layout(self, name: str, model: ModelConfig) -> Same:
        """Where a parameter of ours lies."""

    def name(self, theirs: str) -> str:
        """A tensor's name as transformers writes it today."""
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
