"""Kernels that a GPU would run of small optimizer states, bf16 weights and quantised bases."""

import re

import pytest
import torch
from generated_triton import generating
from harness import on_ranks
from torch.nn import functional

from titan_dit.models.quantized import weight_codes
from titan_dit.optim.fused import compiled
from titan_dit.optim.quantized_adamw import codes_of, pairs, step_in_place
from titan_dit.optim.stochastic_rounding import round_in_place
from titan_dit.parallel.quantized import product_of

pytestmark = pytest.mark.skipif(
    torch.__version__ >= "2.14", reason="replaces parts of Inductor as they are in 2.11 to 2.13"
)
CPU = torch.device("cpu")
GPU_BUFFER = "empty_strided_cuda("
BLOCKS = {"8": 192, "4": 96, "float8": 192}


def rounded(_):
    """What rounds two matrices of one width."""
    with generating() as found:
        for rows in (1152, 384):
            first = (torch.arange(rows) * 4608).view(-1, 1)
            weight = torch.zeros(rows, 4608, dtype=torch.bfloat16)
            inner = torch.arange(4608).view(1, -1)
            tensors = weight, torch.randn(rows, 4608), first
            compiled(round_in_place)(tensors, inner, torch.tensor(123))
    return found


def updated(_, bits):
    """What updates two matrices whose blocks have one size."""
    with generating() as found:
        codes = [codes_of(bits, is_signed, CPU) for is_signed in (True, False)]
        packed, block = codes[0].packed, BLOCKS[bits]
        for count in (24 * 64, 24 * 96):
            weight = torch.randn(count, block)
            tensors = [pairs(weight) if packed == 2 else weight, torch.randn(count, block)]
            for _ in codes:
                tensors.append(torch.zeros(count, block // packed, dtype=torch.uint8))
                tensors.append(torch.zeros(count, 1))
            compiled(step_in_place)(
                tensors,
                torch.tensor(3.0),
                torch.tensor(False),
                [torch.tensor(value) for value in (1e-3, 1e-8, 0.1)],
                codes=codes,
                betas=(0.9, 0.95),
            )
    return found


def multiplied(_, base):
    """Forward and backward of two quantised layers, and what forward saves for backward."""
    saved = []

    def save(tensor):
        saved.append((str(tensor.dtype), tuple(tensor.shape)))
        return tensor

    codes = weight_codes(base, CPU)
    up, down = (
        codes.encode(torch.randn(shape), codes.block(shape[1]))
        for shape in ((1536, 384), (384, 1536))
    )
    linear = product_of(codes)

    def mlp(x, up, down):
        return x + linear(functional.gelu(linear(x, up, None)), down, None)

    with generating() as found, torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
        x = torch.randn(2, 64, 384, dtype=torch.bfloat16, requires_grad=True)
        torch.compile(mlp, fullgraph=True)(x, up, down).sum().backward()
    return found, saved


def test_weights_are_rounded_in_one_kernel_whose_random_bits_are_never_in_memory():
    [[generated]] = on_ranks(1, rounded)
    assert GPU_BUFFER not in generated.code
    [kernel] = generated.kernels.values()
    # By a width that is only known at run time it would be a 64-bit division.
    assert "xindex // 4608" in kernel
    assert "'i64'" not in kernel
    assert len(re.findall(r"tl\.store", kernel)) == 1


@pytest.mark.parametrize("bits", ["8", "4", "float8"])
def test_a_matrix_and_its_quantised_moments_are_updated_in_one_kernel(bits):
    [[generated]] = on_ranks(1, updated, bits)
    assert GPU_BUFFER not in generated.code
    [kernel] = generated.kernels.values()
    # Weight, and codes and scales of both moments.
    assert len(re.findall(r"tl\.store", kernel)) == 5
    assert "fp64" not in kernel
    assert "float64" not in kernel
    words = re.findall(r"tl\.full\(.*tl\.int64\)", kernel)
    # With 4 bits: the shifts and the mask that join two weights.
    assert len(set(words)) <= (2 if bits == "4" else 0)
    searches = 0 if bits == "float8" else 2 * (2 if bits == "4" else 1)
    assert kernel.count("bucketize_binary_search") == searches


@pytest.mark.parametrize("base", ["int8", "float8", "nf4"])
def test_a_quantised_weight_is_decoded_again_in_backward(base):
    [((forward, backward), saved)] = on_ranks(1, multiplied, base)
    held = [shape for dtype, shape in saved if dtype == "torch.uint8"]
    assert len(held) == 2
    assert not {(384, 1536), (1536, 384)} & {shape for _, shape in saved}
    decoded = r"empty_strided_cuda\(\((?:384, 1536|1536, 384)\).*bfloat16"
    for part in (forward, backward):
        assert re.search(decoded, part.code)
        # Two products of two layers, and nothing beside them that is as large as a weight.
        assert part.code.count("extern_kernels.mm(") == 2
    # Codes and scale in one kernel, of both weights if nothing lies between.
    assert len(forward.kernels) <= 4
