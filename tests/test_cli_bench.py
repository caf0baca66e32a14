"""`python -m titan_dit bench attention`."""

import json

import pytest

from titan_dit.commands import bench_attention
from titan_dit.commands.flags import NAMES, BenchAttentionFlags
from titan_dit.config.section import UserError
from titan_dit.kernels.attention_choice import AttentionShape

TINY = {"heads": 2, "head_dim": 8, "tokens": (16, 32), "batch": 2, "laps": 2, "dtype": "fp32"}


def test_every_kernel_of_this_machine_is_timed_and_the_others_say_why_not(tmp_path, capsys):
    out = tmp_path / "deep" / "attention.json"
    keys = ("auto", "flash", "cudnn", "math")
    bench_attention.main(BenchAttentionFlags(**TINY, backends=keys, out=str(out)))
    found = json.loads(out.read_text())
    assert [(r["backend"], r["kernel"], r["tokens"]) for r in found["rows"]] == [
        (key, "flash" if key == "auto" else key, tokens)
        for tokens in (16, 32)
        for key in ("auto", "flash", "math")
    ]
    for row in found["rows"]:
        flops = 4 * 2 * 2 * row["tokens"] ** 2 * 8
        assert row["forward TFLOP/s"] == pytest.approx(flops / row["forward ms"] / 1e9)
        assert row["backward TFLOP/s"] == pytest.approx(2 * flops / row["backward ms"] / 1e9)
        assert row["error"] < 1e-5
    assert found["refused"] == {"cudnn": "a CPU has flash and math only"}
    printed = capsys.readouterr().out
    assert "cudnn: a CPU has flash and math only" in printed
    assert "forward ms" in printed


def test_a_ring_is_timed_by_the_work_of_one_rank(tmp_path):
    out = tmp_path / "ring.json"
    settings = TINY | {"tokens": (32,), "ring": 4}
    bench_attention.main(BenchAttentionFlags(**settings, backends=("auto", "math"), out=str(out)))
    found = json.loads(out.read_text())
    assert found["ring"] == 4
    for row in found["rows"]:
        flops = 4 * 2 * 2 * 8 * 32 * 8  # 8 queries of this rank, 32 keys.
        assert row["forward TFLOP/s"] == pytest.approx(flops / row["forward ms"] / 1e9)
        assert row["error"] < 1e-5
    with pytest.raises(UserError, match="--ring 5 does not divide 32 tokens"):
        BenchAttentionFlags(**settings | {"ring": 5})


@pytest.mark.parametrize("ring", [1, 4])
def test_a_causal_mask_halves_the_work(tmp_path, ring):
    out = tmp_path / "causal.json"
    settings = TINY | {"tokens": (32,), "ring": ring, "causal": True}
    bench_attention.main(BenchAttentionFlags(**settings, backends=("auto", "math"), out=str(out)))
    found = json.loads(out.read_text())
    assert found["causal"]
    for row in found["rows"]:
        flops = 2 * 2 * 2 * 32 // ring * 32 * 8
        assert row["forward TFLOP/s"] == pytest.approx(flops / row["forward ms"] / 1e9)
        assert row["error"] < 1e-5
    with pytest.raises(UserError, match="--ring 32 --causal makes 64 chunks, which do not divide"):
        BenchAttentionFlags(**settings | {"ring": 32})


def test_the_error_shows_a_kernel_that_is_wrong(monkeypatch):
    def wrong(q, k, v, causal):
        return 1.01 * bench_attention.attention.by_products(q, k, v)

    monkeypatch.setattr(bench_attention.attention, "attend_by", lambda *_: wrong)
    shape = AttentionShape(
        2, 16, 8, bench_attention.DTYPES["fp32"], bench_attention.torch.device("cpu")
    )
    assert bench_attention.row("flash", shape, 2, 1)["error"] == pytest.approx(0.01, rel=1e-3)


def test_every_kernel_is_measured():
    assert ("auto", *bench_attention.attention.KEYS) == NAMES


def test_a_named_size_gives_the_shape_and_flags_win():
    assert BenchAttentionFlags(size="XL/2").shape == (16, 72)
    assert BenchAttentionFlags(size="7B", heads=4).shape == (4, 128)
    for flags in ({}, {"heads": 4}, {"size": "XXL/2"}, {"size": "XL/2", "backends": ("fast",)}):
        with pytest.raises(UserError):
            BenchAttentionFlags(**flags)
