"""Search for the most tokens in benchmarks/gpu.py, and its attention along rows."""

import sys

import pytest
import torch
import torch.nn.functional as F
from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from gpu_tokens import Limits, along_rows, next_side


def drawn(b, heads, side, d):
    """q, k, v as the layers make them, and leaves of their own."""
    projected = torch.randn(b, side * side, heads, 3, d)
    return [part.transpose(1, 2).detach().requires_grad_() for part in projected.unbind(3)]


def test_every_row_of_the_grid_attends_to_itself():
    q, k, v = drawn(2, 3, 5, 8)
    out = along_rows(q, k, v, 5)
    assert out.shape == q.shape
    for row in range(5):
        here = slice(5 * row, 5 * row + 5)
        alone = F.scaled_dot_product_attention(q[:, :, here], k[:, :, here], v[:, :, here])
        assert torch.allclose(out[:, :, here], alone, atol=1e-6)


def kept(attend, inputs):
    """Bytes of the storages saved for backward by address, and their owners."""
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = attend(*inputs)
    return found, out


def test_attention_along_rows_keeps_as_much_as_the_whole():
    inputs = drawn(1, 2, 8, 16)
    whole, _out = kept(F.scaled_dot_product_attention, inputs)
    rows, _rows = kept(lambda *qkv: along_rows(*qkv, side=8), inputs)
    # q, k, v, the output, and one number per query and head.
    assert sum(whole.values()) == sum(rows.values()) == 4 * 2 * 64 * (4 * 16 + 1)
    # No copies: else the projection under the views q, k and v would be kept as well.
    assert {x.untyped_storage().data_ptr() for x in inputs} <= whole.keys() & rows.keys()


@pytest.mark.parametrize("per_token", [1.05e-3, 8e-3])
@pytest.mark.parametrize("guess", [100, 342, 700])
def test_the_search_ends_close_below_what_fits(per_token, guess):
    limits, state = Limits(139.0, 1e9), 12.6
    tried = []
    while side := next_side(tried, guess, state, limits):
        peak = state + 0.4 + per_token * side**2
        tried.append((side, peak if peak <= 139 else None))
        assert len(tried) <= 8
    best = max(side for side, peak in tried if peak is not None)
    assert best % 4 == 0
    assert state + 0.4 + per_token * (best + 4) ** 2 > 0.93 * 139
