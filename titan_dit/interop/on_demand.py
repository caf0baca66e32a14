"""Tensors that are read or computed on access, so that no process holds a whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor


class OnDemand(Mapping[str, Tensor]):
    """Tensors by name; each access reads or computes the tensor again, and none is kept."""

    def __init__(self, outline: Mapping[str, Tensor], get: Callable[[str], Tensor]) -> None:
        self.outline = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in outline.items()
        }
        """Shapes and dtypes, as tensors on the meta device."""
        self.get_tensor = get

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.outline:
            raise KeyError(name)
        return self.get_tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self.outline  # Mapping's own would read the tensor.

    def __iter__(self) -> Iterator[str]:
        return iter(self.outline)

    def __len__(self) -> int:
        return len(self.outline)


def outline_of(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Tensors of the same shapes and dtypes, without reading any."""
    return tensors.outline if isinstance(tensors, OnDemand) else tensors


def numel(tensors: Mapping[str, Tensor]) -> int:
    """Number of elements of all tensors."""
    return sum(tensor.numel() for tensor in outline_of(tensors).values())


def dtypes(tensors: Mapping[str, Tensor]) -> set[str]:
    """Names of the floating dtypes, such as "float32"."""
    kinds = {tensor.dtype for tensor in outline_of(tensors).values()}
    return {str(kind)[6:] for kind in kinds if kind.is_floating_point}
