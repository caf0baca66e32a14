"""Optimizers on shards: uneven, empty, over two mesh axes."""

import pytest
import torch
from harness import on_ranks
from tiny import randomize, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from titan_dit.models.dit_config import DiTConfig
from titan_dit.optim.optimizer import (
    apply_gradients,
    build_optimizer,
    optimizer_tensors,
    shards_of,
)
from titan_dit.optim.sections import AdamWConfig, MuonConfig
from titan_dit.parallel import fsdp, tensor
from titan_dit.parallel.init import put

SPEC = DiTConfig(size="S/2", latent_size=32, in_channels=4, num_classes=10).spec()
SETTINGS = {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.1}
MUON = {"lr": 0.02, "weight_decay": 0.1, "ns_dtype": "fp32", "matrices": ("*",), "fused_qkv": ()}
SKIPPED = 2
"""A step in which the gradients are not finite."""


class Net(nn.Module):
    """Rows that do not divide by two or four; the last layer has one, so other shards are empty."""

    def __init__(self):
        super().__init__()
        self.wide, self.back, self.out = nn.Linear(6, 10), nn.Linear(10, 6), nn.Linear(6, 1)

    def forward(self, x):
        return self.out(x + self.back(self.wide(x).tanh()))


def sharded(world, tp, copies=1, in_bf16=False):
    """A Net in the layout (world / tp) x tp, with random weights."""
    with torch.device("meta"):
        net = Net()
    if tp > 1:
        mesh = init_device_mesh("cpu", (world.size // tp, tp), mesh_dim_names=("dp", "tp"))
        styles = {"wide": ColwiseParallel(), "back": RowwiseParallel()}
        parallelize_module(net, mesh["tp"], styles)
        tensor.replicate(net.out, mesh["tp"])
        if in_bf16:
            fsdp.hold_in_bf16(net)
        fully_shard(net, mesh=mesh["dp"])
    elif copies > 1:
        sizes = copies, world.size // copies
        fully_shard(net, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=("copies", "shard")))
    elif world.size > 1:
        if in_bf16:
            fsdp.hold_in_bf16(net)
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
                parameter.grad = torch.full_like(parameter.grad, float("nan"))
        step(number)


def with_ours(net, fused):
    parameters = dict(net.named_parameters())
    optimizer = build_optimizer(parameters, AdamWConfig(fused=fused, **SETTINGS), None)

    def step(number):
        apply_gradients(optimizer, 0.02 / (number + 1), torch.tensor(number == SKIPPED))

    for parameter in net.parameters():
        # As FSDP2 does where it pads the shard of a new parameter, in the first forward.
        parameter._local_tensor = parameter._local_tensor.clone()
    train(net, step)
    return optimizer_tensors(optimizer, parameters)


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
        wrong += rounded_beside_alone(world, tp)
    return wrong


def rounded_beside_alone(world, tp):
    """Names of bf16 weights that differ, by a bit, from those of one process."""
    alone = Net()
    randomize(dict(alone.named_parameters()))
    fsdp.hold_in_bf16(alone)
    expected = with_given_gradients(alone)
    found = with_given_gradients(sharded(world, tp, in_bf16=True))
    assert found.keys() == expected.keys()
    return [name for name, values in expected.items() if not torch.equal(found[name], values)]


def with_given_gradients(net):
    """Weights, whole, after four steps, one of them bad."""
    parameters = dict(net.named_parameters())
    optimizer = build_optimizer(parameters, AdamWConfig(**SETTINGS), None, seed=7)
    for step in range(4):
        for name, parameter in parameters.items():
            assert parameter.dtype == torch.bfloat16
            generator = torch.Generator().manual_seed(step + len(name))
            parameter.grad = torch.zeros_like(parameter)
            put(parameter.grad, torch.randn(parameter.shape, generator=generator))
            if step == SKIPPED:
                shards_of([parameter.grad])[0].fill_(float("nan"))
        apply_gradients(optimizer, 0.02, torch.tensor(step == SKIPPED), step)
    states = optimizer_tensors(optimizer, parameters).values()
    assert {state["exp_avg"].dtype for state in states} == {torch.float32}
    return {name: whole(p) for name, p in parameters.items()}


@pytest.mark.parametrize(("num_ranks", "layouts"), [(3, [1]), (4, [1, 2])])
def test_adamw_on_shards_is_torchs_on_dtensors_to_the_bit(num_ranks, layouts):
    assert on_ranks(num_ranks, adamw_beside_torchs, layouts) == [[]] * num_ranks


def muon_of(net, **keys):
    """The weights and momentum of four steps with Muon, whole."""
    parameters = dict(net.named_parameters())
    config = MuonConfig(**MUON | keys)
    optimizer = build_optimizer(parameters, config, SPEC)

    def step(number):
        apply_gradients(optimizer, 0.02 / (number + 1), torch.tensor(number == SKIPPED))

    train(net, step)
    found = {name: whole(p) for name, p in parameters.items()}
    for name, state in optimizer_tensors(optimizer, parameters).items():
        found |= {f"{name}.{key}": whole(value) for key, value in state.items()}
    return found


def muon_in_layouts(world, layouts):
    return [muon_of(sharded(world, *layout)) for layout in layouts]


@pytest.fixture(scope="module")
def muon_alone():
    (found,) = on_ranks(1, muon_in_layouts, [(1,)])[0]
    return found


@pytest.mark.parametrize(("num_ranks", "layouts"), [(3, [(1,)]), (4, [(1,), (2,), (1, 2)])])
def test_muon_on_every_layout_is_that_of_one_process(num_ranks, layouts, muon_alone):
    for by_layout in on_ranks(num_ranks, muon_in_layouts, layouts):
        for layout, found in zip(layouts, by_layout, strict=True):
            assert found.keys() == muon_alone.keys()
            for name, values in found.items():
                torch.testing.assert_close(
                    values, muon_alone[name], rtol=0, atol=1e-5, msg=f"{layout} {name}"
                )
