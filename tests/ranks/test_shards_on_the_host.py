"""Shards in host memory under the mesh of another device, as with [offload] parameters on a GPU."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_dit.checkpoint import saved_weights
from titan_dit.models.quantized import weight_codes
from titan_dit.optim.optimizer import apply_gradients, build_optimizer, optimizer_tensors
from titan_dit.optim.sections import AdamW8bitConfig, AdamWConfig
from titan_dit.ranks.shards import as_shard, own_indices

# Stands for a GPU: DTensor.from_local moves a CPU's tensor there, and its values are lost.
ELSEWHERE = "meta"


@pytest.fixture
def parameter(request):
    """A weight [5, 64], of which rank 1 of 2 holds the last two rows on the host."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    mesh = DeviceMesh(getattr(request, "param", ELSEWHERE), [0, 1])
    placed = DTensor.from_local(
        torch.empty(2, 64, device=mesh.device_type),
        mesh,
        [Shard(0)],
        run_check=False,
        shape=torch.Size([5, 64]),
        stride=(64, 1),
    )
    yield nn.Parameter(as_shard(torch.ones(2, 64), placed))
    dist.destroy_process_group()


@pytest.mark.parametrize("config", [AdamWConfig(), AdamW8bitConfig()])
def test_what_a_checkpoint_saves_of_the_moments_is_what_a_step_changes(parameter, config):
    optimizer = build_optimizer({"blocks.0.weight": parameter}, config, None)
    parameter.grad = as_shard(torch.full((2, 64), 0.5), parameter)
    apply_gradients(optimizer, 0.1, torch.tensor(False))
    saved = optimizer_tensors(optimizer, {"blocks.0.weight": parameter})["blocks.0.weight"]
    for name, held in optimizer.shards[parameter].items():
        own = saved[name].to_local() if isinstance(saved[name], DTensor) else saved[name]
        assert own.device.type == "cpu"
        assert own.data_ptr() == held.data_ptr()
        assert own.any()
    assert saved["exp_avg"].shape == (5, 64)
    assert saved["exp_avg"].placements == parameter.placements


@pytest.mark.parametrize("parameter", ["cpu"], indirect=True)
def test_indices_are_on_the_device_of_the_shard(parameter):
    assert own_indices(parameter, 0).flatten().tolist() == [3 * 64, 4 * 64]
    assert own_indices(parameter, 1).flatten().tolist() == list(range(64))
    elsewhere = as_shard(torch.empty(2, 64, device=ELSEWHERE), parameter)
    assert own_indices(elsewhere, 0).device.type == ELSEWHERE


def test_bytes_and_values_of_a_quantised_weight_stay_with_the_shard(parameter):
    codes = weight_codes("int8", torch.device("cpu"))
    held = saved_weights.like(parameter, codes.shape(parameter.shape), torch.uint8)
    values = saved_weights.like(held, codes.shape_of(held.shape), torch.float32)
    assert values.shape == (5, 64)
    values.to_local().copy_(torch.randn(2, 64))
    saved_weights.encode_into(held.to_local(), values.to_local(), codes)
    decoded = codes.decode(held.to_local())
    torch.testing.assert_close(decoded, values.to_local(), rtol=0, atol=0.03)


def test_plain_tensors_have_plain_shards_and_copies_keep_the_strides(parameter):
    plain = torch.ones(3)
    assert as_shard(plain, torch.ones(7)) is plain
    other = as_shard(torch.ones(2, 64), parameter)
    assert (other.dtype, other.shape, other.stride()) == (torch.float32, (5, 64), (64, 1))
    assert other.placements == parameter.placements
