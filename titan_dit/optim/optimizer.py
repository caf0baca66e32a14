"""AdamW that can skip a bad step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from titan_dit.config.training import OptimizerConfig


def build_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig
) -> torch.optim.AdamW:
    """AdamW over plain or sharded parameters."""
    first, second = config.betas
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=(first, second),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=config.fused,
    )


def apply_gradients(optimizer: torch.optim.Optimizer, lr: float, skip: Tensor) -> None:
    """Take one optimizer step at `lr`, unless `skip` (a scalar on the device) is true.

    The fused kernel reads `skip` on the device. The other implementations synchronise.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    if optimizer.defaults["fused"]:
        optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
        optimizer.step()
    elif not skip.item():
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, Tensor]]:
    """AdamW's moments and step counts by parameter name, to save or to load in place.

    Before the first step they do not exist yet and are created as AdamW would.
    """
    for parameter in parameters.values():
        state = optimizer.state[parameter]
        if not state:
            on_device = optimizer.defaults["fused"]
            device = parameter.device if on_device else torch.device("cpu")
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            state["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
    return {name: optimizer.state[parameter] for name, parameter in parameters.items()}
