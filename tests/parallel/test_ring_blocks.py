"""Joining a ring's results: compiled as eager, and in how many launches."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from titan_dit.parallel import ring_attention
from titan_dit.parallel.ring_attention import EAGER, joining

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


class Launches(TorchDispatchMode):
    """Counts operators that write a tensor: on a GPU, a launch each."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.count += not function.is_view
        return result


def blocks(dtype):
    """out, lse, new_out, new_lse, and dq, more, dk, dv, arrived, as a ring has them."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size, of=dtype):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(of)

    exact = torch.promote_types(dtype, torch.float32)
    size = 2, 3, 5, 8
    forward = (
        draw(*size, of=exact),
        draw(*size[:3], of=exact),
        draw(*size),
        draw(*size[:3], of=exact),
    )
    backward = (
        draw(*size, of=exact),
        draw(*size),
        draw(*size),
        draw(*size),
        draw(2, *size, of=exact),
    )
    return forward, backward


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_joins_are_the_eager_ones(dtype):
    forward, backward = blocks(dtype)
    torch.compiler.set_stance(force_backend="aot_eager")  # Traced, not generated.
    try:
        compiled = joining(True)
        pairs = [
            (compiled.merge(*forward), EAGER.merge(*forward)),
            (compiled.add(*backward), EAGER.add(*backward)),
            (compiled.add(*backward[:4], None), EAGER.add(*backward[:4], None)),
        ]
    finally:
        torch.compiler.set_stance("default")
    for found, expected in pairs:
        for x, y in zip(found, expected, strict=True):
            assert x.dtype == y.dtype == torch.promote_types(dtype, torch.float32)
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


def test_bf16_gradients_are_summed_in_fp32_in_three_launches():
    forward, backward = blocks(torch.bfloat16)
    dq, more, dk, dv, arrived = backward
    with Launches() as counted:
        found = ring_attention.add(*backward)
    assert counted.count == 3
    assert torch.equal(found[0], dq + more.float())
    assert torch.equal(found[1], torch.stack((dk, dv)).float() + arrived)
    with Launches() as counted:
        ring_attention.merge(*forward)
    assert counted.count == 8


def test_the_joins_are_compiled_with_the_blocks():
    assert joining(False) is EAGER
    assert joining(True) is joining(True)
