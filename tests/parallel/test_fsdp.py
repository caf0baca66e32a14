"""The arguments of torch's fully_shard, without ranks."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from titan_dit.config.layout import ParallelConfig, PrecisionConfig
from titan_dit.parallel import fsdp


class Sharded:
    """Records method calls."""

    def __init__(self):
        self.told = {}

    def __getattr__(self, name):
        return lambda value: self.told.__setitem__(name, value)


def asked(monkeypatch, ranks, precision="bf16", **parallel):
    """The keywords that every part is sharded with, and the calls that follow."""
    calls, told = [], []

    def fully_shard(part, **kwargs):
        sharded = Sharded()
        calls.append(kwargs)
        told.append(sharded.told)
        return [sharded]

    monkeypatch.setattr(fsdp, "fully_shard", fully_shard)
    model = nn.Module()
    model.blocks = nn.ModuleDict({"0": nn.Linear(2, 2), "1": nn.Linear(2, 2)})
    mesh = SimpleNamespace(ndim=1, size=lambda dim=0: ranks)
    settings = ParallelConfig(**parallel), PrecisionConfig(dtype=precision)
    fsdp.shard(model, mesh, *settings)
    assert len(calls) == 3  # Two blocks and the model itself.
    assert all(call == calls[0] for call in calls)
    return calls[0], told[0]


@pytest.mark.parametrize(
    ("ranks", "parallel", "expected"),
    [
        (2, {}, None),
        (2, {"reshard_after_forward": "always"}, True),
        (2, {"reshard_after_forward": "never"}, False),
        # With a split backward torch loses gradients of parameters that are gathered again.
        (2, {"pp": 2}, False),
        # A single shard.
        (1, {}, False),
        (1, {"reshard_after_forward": "always"}, True),
    ],
)
def test_parameters_stay_gathered_where_a_pipeline_needs_them(
    monkeypatch, ranks, parallel, expected
):
    assert asked(monkeypatch, ranks, **parallel)[0]["reshard_after_forward"] is expected


def test_gradients_are_summed_in_fp32_and_timesteps_are_not_cast(monkeypatch):
    call, told = asked(monkeypatch, 2)
    policy = call["mp_policy"]
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert not policy.cast_forward_inputs
    assert told["set_gradient_divide_factor"] == 1.0
    assert told["set_force_sum_reduction_for_comms"] is True


def blocks_of(count, parameters):
    with torch.device("meta"):
        return [nn.Linear(parameters, 1, bias=False) for _ in range(count)]


@pytest.mark.parametrize(
    ("size", "parameters", "expected"),
    [
        (1, 10, [1] * 11),
        (4, 10, [4, 4, 3]),
        (20, 10, [11]),
        (0, 10, [1, 2, 4, 4]),
        (0, 24_000_000, [1, 2, 4, 4]),  # DiT-XL/2
        (0, 40_000_000, [1, 2, 3, 3, 2]),
        (0, 75_000_000, [1] * 11),  # 3B
        (0, 300_000_000, [1] * 11),  # 7B
    ],
)
def test_units_hold_what_is_asked_for_or_a_few_small_blocks(size, parameters, expected):
    blocks = blocks_of(11, parameters)
    found = fsdp.units(blocks, size)
    assert [len(unit) for unit in found] == expected
    assert [block for unit in found for block in unit] == blocks


def test_a_stage_without_blocks_has_no_units():
    assert fsdp.units([], 0) == fsdp.units([], 3) == []
