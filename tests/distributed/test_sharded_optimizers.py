"""Optimizers on shards: uneven, empty, over two mesh axes."""

import pytest
import torch
from harness import on_ranks
from tiny import randomize, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from titan_dit.config.training import OptimizerConfig
from titan_dit.optim.optimizer import apply_gradients, build_optimizer, optimizer_tensors
from titan_dit.parallel import tensor

SETTINGS = {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.1}
SKIPPED = 2
"""A step in which the gradients are not finite."""


class Net(nn.Module):
    """Rows that do not divide by two or four; the last layer has one, so other shards are empty."""

    def __init__(self):
        super().__init__()
        self.wide, self.back, self.out = nn.Linear(6, 10), nn.Linear(10, 6), nn.Linear(6, 1)

    def forward(self, x):
        return self.out(x + self.back(self.wide(x).tanh()))


def sharded(world, tp):
    """A Net in the layout (world / tp) x tp, with random weights."""
    with torch.device("meta"):
        net = Net()
    if tp > 1:
        mesh = init_device_mesh("cpu", (world.size // tp, tp), mesh_dim_names=("dp", "tp"))
        styles = {"wide": ColwiseParallel(), "back": RowwiseParallel()}
        parallelize_module(net, mesh["tp"], styles)
        tensor.replicate(net.out, mesh["tp"])
        fully_shard(net, mesh=mesh["dp"])
    else:
        fully_shard(net, mesh=init_device_mesh("cpu", (world.size,)))
    net.to_empty(device="cpu")
    randomize(dict(net.named_parameters()))
    return net


def train(net, step):
    """Four steps, one of them bad."""
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        net(torch.randn(8, 6, generator=generator)).square().mean().backward()
        if number == SKIPPED:
            for parameter in net.parameters():
                parameter.grad.to_local().fill_(float("nan"))
        step(number)


def with_ours(net, fused):
    optimizer = build_optimizer(net.parameters(), OptimizerConfig(fused=fused, **SETTINGS))

    def step(number):
        apply_gradients(optimizer, 0.02 / (number + 1), torch.tensor(number == SKIPPED))

    for parameter in net.parameters():
        # As FSDP2 does where it pads the shard of a new parameter, in the first forward.
        parameter._local_tensor = parameter._local_tensor.clone()
    train(net, step)
    return optimizer_tensors(optimizer, dict(net.named_parameters()))


def with_torchs(net, fused):
    adamw = torch.optim.AdamW(net.parameters(), fused=fused, **SETTINGS)

    def step(number):
        for group in adamw.param_groups:
            group["lr"] = 0.02 / (number + 1)
        if number != SKIPPED:
            adamw.step()
        adamw.zero_grad()

    train(net, step)
    return {name: adamw.state[parameter] for name, parameter in net.named_parameters()}


def adamw_beside_torchs(world, layouts):
    """Names of tensors that differ, by a bit, from those of torch's AdamW on DTensors."""
    wrong = []
    for tp in layouts:
        for fused in (True, False):
            nets = sharded(world, tp), sharded(world, tp)
            ours, torchs = with_ours(nets[0], fused), with_torchs(nets[1], fused)
            pairs = {
                f"tp {tp} {fused} {name}": (p, dict(nets[1].named_parameters())[name])
                for name, p in nets[0].named_parameters()
            }
            for name, state in torchs.items():
                assert ours[name].keys() == state.keys()
                for key, value in state.items():
                    assert type(ours[name][key]) is type(value), (name, key)
                    pairs[f"tp {tp} {fused} {name}.{key}"] = ours[name][key], value
            wrong += [name for name, pair in pairs.items() if not torch.equal(*map(whole, pair))]
    return wrong


@pytest.mark.parametrize(("num_ranks", "layouts"), [(3, [1]), (4, [1, 2])])
def test_adamw_on_shards_is_torchs_on_dtensors_to_the_bit(num_ranks, layouts):
    assert on_ranks(num_ranks, adamw_beside_torchs, layouts) == [[]] * num_ranks
