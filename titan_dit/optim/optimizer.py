"""AdamW that can leave a bad step out."""

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
    """One step at rate `lr`; where `skip` (a scalar on the device) is true, nothing changes.

    The fused kernel reads `skip` on the device. The other implementations cannot, so there the
    host has to wait for it.
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
    """AdamW's moments and step counts under the names of their parameters, to save or to fill.

    The tensors are the optimizer's own: a checkpoint loads into them in place. Before the first
    step they do not exist yet and are made as AdamW would make them.
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
