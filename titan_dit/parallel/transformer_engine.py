"""NVIDIA's Transformer Engine in place of the blocks' linears. Only this file imports it.

Its layers keep nn.Linear's `weight` and `bias`, in fp32, so names, checkpoints and the optimizer do
not change. The amax history of delayed scaling (1024 calls) is not saved: it is empty after a
resume.

Not yet run on a GPU: the tests use a stub.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from titan_dit.config.section import UserError, show
from titan_dit.ranks.torch_range import pip_install

PACKAGE = "--no-build-isolation 'transformer-engine[pytorch]>=2.9'"
"""Arguments for pip: it is built against the installed torch."""


def is_transformer_engine(float8: str) -> bool:
    """True if Transformer Engine runs the recipe; torchao runs the others."""
    return float8.startswith("te_")


def convert(model: nn.Module, names: Collection[str], float8: str) -> None:
    """Replace the linears of a model on the meta device, and run its forward under the recipe."""
    te = load("transformer_engine.pytorch", float8)
    recipe = recipe_of(load("transformer_engine.common.recipe", float8), float8)
    for name in names:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, replaced(te, model.get_submodule(name)))
    model.forward = under(te, recipe, model.forward)


def load(module: str, float8: str) -> Any:
    """Import a module of Transformer Engine; UserError if that fails."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        raise UserError(
            f"[precision] float8={show(float8)}: Transformer Engine cannot be imported "
            f"({type(error).__name__}: {error}). Reinstall it for this CUDA and torch: "
            f"{pip_install(PACKAGE)}, or set "
            'float8 = "tensorwise".'
        ) from error


def recipe_of(recipes: Any, float8: str) -> Any:
    """E4M3 forward and E5M2 backward with delayed or current scaling; or MXFP8."""
    if float8 == "te_delayed":
        return recipes.DelayedScaling(
            fp8_format=recipes.Format.HYBRID, amax_history_len=1024, amax_compute_algo="max"
        )
    if float8 == "te_current":
        return recipes.Float8CurrentScaling(fp8_format=recipes.Format.HYBRID)
    return recipes.MXFP8BlockScaling(fp8_format=recipes.Format.E4M3)


def replaced(te: Any, linear: nn.Module) -> nn.Module:
    """The layer of Transformer Engine with the same parameters."""
    assert isinstance(linear, nn.Linear)
    made: nn.Module = te.Linear(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        params_dtype=linear.weight.dtype,
        device="meta",
    )
    made.weight = linear.weight
    if linear.bias is not None:
        made.bias = linear.bias
    return made


def under(te: Any, recipe: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Run the whole forward in the recipe's autocast; amaxes are all-reduced once, at its end."""
    autocast = getattr(te, "autocast", None)
    # Before 2.9 the function and its argument had other names.
    context = (
        functools.partial(te.fp8_autocast, enabled=True, fp8_recipe=recipe)
        if autocast is None
        else functools.partial(autocast, enabled=True, recipe=recipe)
    )

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with context():
            return forward(*args, **kwargs)

    return run
