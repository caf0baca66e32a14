"""Activation recomputation of one function: torch's non-reentrant checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def recomputed(
    function: Callable[..., Any],
    *given: Any,
    context_fn: Callable[[], Any] | None = None,
    **named: Any,
) -> Any:
    """Call the function; the tensors that it would save are recomputed in backward.

    If no positional input requires a gradient, as in the first blocks if they are frozen, it is a
    plain call: torch's compiler cannot recompute what has no backward. `context_fn`: see torch's
    checkpoint. `named`: the function's other arguments, without gradients.
    """
    if not any(learns(value) for value in reversed(given)):
        return function(*given, **named)
    options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}
    # The models draw no random numbers: there is no RNG state to save.
    options |= {"use_reentrant": False, "preserve_rng_state": False}
    return checkpoint(function, *given, **options, **named)


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
