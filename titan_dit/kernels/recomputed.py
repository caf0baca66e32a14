"""Activation recomputation of one function: torch's non-reentrant checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """Call the function; the tensors that it would save are recomputed in backward.

    If no input requires a gradient, as in the first blocks if they are frozen, it is a plain call:
    torch's compiler cannot recompute what has no backward. `options`: see torch's checkpoint.
    """
    if not any(learns(value) for value in reversed(given)):
        return function(*given)
    # The models draw no random numbers: there is no RNG state to save.
    return checkpoint(function, *given, use_reentrant=False, preserve_rng_state=False, **options)


def learns(given: Any) -> bool:
    """True if a value requires a gradient: a tensor, a module, or a collection of these."""
    if isinstance(given, Tensor):
        return given.requires_grad
    if isinstance(given, nn.Module):
        return any(parameter.requires_grad for parameter in given.parameters())
    if isinstance(given, Mapping):
        given = given.values()
    elif not isinstance(given, tuple | list):
        return False
    return any(learns(value) for value in given)
