"""benchmarks/gpu.py's search for the most tokens, and the attention that it tries them with."""

import sys

import pytest
import torch
import torch.nn.functional as F
from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_tokens
from gpu_contenders import Cell, Place
from gpu_tokens import Limits, along_rows, next_side
from shapes import config_of


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
    """Bytes of the storages that backward waits for, by address, and what keeps them alive."""
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
    # No copies: the projection that q, k and v are views of would be kept besides.
    assert {x.untyped_storage().data_ptr() for x in inputs} <= whole.keys() & rows.keys()


@pytest.mark.parametrize("per_token", [1.05e-3, 1.3e-3, 2.4e-3, 8e-3])
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
    if guess == 342:
        assert len(tried) <= 4


def test_a_size_that_did_not_fit_is_not_passed_again():
    limits = Limits(100.0, 1e9)
    side = next_side([(100, 50.0), (200, None)], 200, 40.0, limits)
    assert 100 < side < 200
    # Nothing fits: half of it, then nothing.
    assert next_side([(200, None)], 400, 40.0, limits) == 100
    assert next_side([(4, None)], 400, 40.0, limits) is None


@pytest.fixture
def cell():
    return Cell(config_of("XL/2", 64), 1, model="XL/2")


def test_what_is_expected_of_a_gpu_of_139_gib(cell):
    sides = {mode: gpu_tokens.guessed(cell, mode, Limits(139.0, 1)) for mode in ("none", "full")}
    assert 100_000 < sides["none"] ** 2 < 140_000
    assert 900_000 < sides["full"] ** 2 < 1_400_000


def test_whole_attention_is_tried_as_far_as_the_time_allows(cell, monkeypatch):
    monkeypatch.setattr(gpu_tokens, "peak_tflops", lambda *_: 989.0)
    gpu = Place(torch.device("cuda"), None, None)
    assert gpu_tokens.largest_in_time(cell, "none", 336, 1e9, 8, gpu) == 336
    side = gpu_tokens.largest_in_time(cell, "full", 1048, 60, 8, gpu)
    assert gpu_tokens.step_s(cell, "full", side, gpu, whole=True) <= 60
    assert gpu_tokens.step_s(cell, "full", side + 8, gpu, whole=True) > 60
    assert gpu_tokens.largest_in_time(cell, "none", 336, 5, 8, gpu) is None


def test_a_search_writes_down_all_it_tried_and_takes_whole_attention_before_the_last(
    cell, monkeypatch
):
    tried = []

    def trial(cell, mode, place, side, *, whole):
        tried.append((side, whole))
        fits = 13 + 1.1e-3 * side**2 <= 139
        row = {"peak_gib": 13 + 1.1e-3 * side**2, "step_s": 2.0} if fits else {}
        kind = "whole" if whole else "along rows"
        result = "measured" if fits else "out of memory"
        return {"tokens": side**2, "attention": kind, "result": result, **row}

    monkeypatch.setattr(gpu_tokens, "trial", trial)
    place = Place(torch.device("cpu"), None, None)
    found = gpu_tokens.result(list(gpu_tokens.trials(cell, "none", place, Limits(139.0, 1e3))))
    assert [whole for _, whole in tried] == [False, False, True, False]
    assert tried[2][0] == tried[1][0]
    assert found["fits"]["tokens"] == max(side for side, _ in tried) ** 2 > 110_000
    assert len(found["tried"]) == 4
    [line] = gpu_tokens.table(
        [{"max tokens of": "XL/2", "remat": "none", "result": "measured"} | found]
    )
    assert line["tokens of a whole step"] == tried[2][0] ** 2
    assert line["largest tried"] == f"{tried[3][0] ** 2} (measured)"
    [line] = gpu_tokens.table([{"max tokens of": "XL/2", "remat": "none", "result": "failed: X"}])
    assert line["tokens that fit"] == "failed: X"


def test_the_time_of_a_search_is_bounded(cell, monkeypatch):
    monkeypatch.setattr(gpu_tokens, "trial", lambda *_, **__: pytest.fail("too late"))
    place = Place(torch.device("cpu"), None, None)
    assert list(gpu_tokens.trials(cell, "full", place, Limits(139.0, 0.5))) == []
    with pytest.raises(RuntimeError, match="no size could be measured"):
        gpu_tokens.result([])
