"""Codes of frozen weights: their rounding and tables, and blocks that every layout cuts alike."""

import pytest
import torch
from torch import nn

from titan_dit.config.section import UserError
from titan_dit.config.training import LoRAConfig
from titan_dit.models import quantized
from titan_dit.models.quantized import normal_float, weight_codes
from titan_dit.system.quiet_torchao import load_torchao

CPU = torch.device("cpu")
BASES = ["int8", "float8", "nf4"]
STEP = {"int8": 0.5 / 127, "float8": 16 / 448, "nf4": 0.1520}
"""Half of the largest distance of two codes, as a share of the largest element of a block."""


def random_weight(rows=24, columns=1152):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("base", BASES)
def test_no_element_moves_by_more_than_half_a_step_and_the_scales_rounding(base):
    codes, weight = weight_codes(base, CPU), random_weight()
    size = codes.block(weight.shape[1])
    held = codes.encode(weight, size)
    assert held.shape == codes.shape(weight.shape)
    assert held.dtype == torch.uint8
    blocks = weight.unflatten(1, (-1, size))
    error = (codes.decode(held).unflatten(1, (-1, size)) - blocks).abs()
    # bf16 has 8 bits: a scale is off by up to 1 / 256 of itself.
    assert (error <= (STEP[base] + 1 / 256) * blocks.abs().amax(-1, keepdim=True)).all()


@pytest.mark.parametrize("base", BASES)
def test_zeros_stay_zeros_and_small_numbers_are_finite(base):
    codes = weight_codes(base, CPU)
    weight = torch.zeros(3, 64)
    weight[1] = 1e-42
    weight[2] = 1e30
    found = codes.decode(codes.encode(weight, codes.block(64)))
    assert not found[0].any()
    assert found.isfinite().all()
    torch.testing.assert_close(found[2], weight[2], rtol=0.01, atol=0)


@pytest.mark.parametrize("base", BASES)
def test_numbers_in_a_compute_dtype_decode_as_the_bytes_do(base):
    # torch 2.11 gathers integers so.
    codes, weight = weight_codes(base, CPU), random_weight()
    held = codes.encode(weight, codes.block(weight.shape[1]))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert torch.equal(codes.decode(held.to(dtype)), codes.decode(held))


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("columns", [384, 1152, 3072, 3840, 5120, 13824])
def test_a_part_of_any_tp_is_whole_blocks_with_the_same_codes(base, columns):
    codes, weight = weight_codes(base, CPU), random_weight(4, columns)
    size = codes.block(columns)
    held = codes.encode(weight, size)
    assert codes.shape_of(held.shape) == weight.shape
    assert 16 <= size <= codes.largest_block
    for tp in (size for size in range(1, 9) if columns % size == 0):
        parts = zip(weight.chunk(tp, 1), held.chunk(tp, 1), strict=True)
        assert all(torch.equal(codes.encode(part, size), own) for part, own in parts)


def test_the_values_of_nf4_are_those_of_torchao():
    load_torchao("quantization")
    from torchao.quantization import NF4Tensor

    theirs = NF4Tensor.from_tensor(torch.zeros(64 * 256), 64, 256).nf4
    torch.testing.assert_close(normal_float(), theirs.float(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 2), (3, 4, 5, 6)])
def test_other_shapes_are_no_bytes_of_a_weight(shape):
    with pytest.raises(ValueError, match="is no shape of int8 blocks"):
        weight_codes("int8", CPU).shape_of(shape)


def test_a_network_without_linears_over_tokens_is_refused():
    with pytest.raises(UserError, match=r"base=.nf4. finds no linear layer in the blocks"):
        quantized.check(nn.Linear(8, 8), LoRAConfig(rank=2, base="nf4"))
