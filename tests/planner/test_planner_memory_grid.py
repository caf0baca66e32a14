"""The composed memory against dry runs of whole steps, at the widths of real models."""

import pytest
from test_planner_memory_steps import DIT, GPT, parallel, pipeline, remat, tables
from whole_steps import comparing

XL = {
    **DIT,
    "model": {
        **DIT["model"],
        "hidden_size": 1152,
        "num_layers": 8,
        "num_heads": 16,
        "latent_size": 64,
    },
}
WIDE = {
    **GPT,
    "model": {
        **GPT["model"],
        "hidden_size": 1536,
        "num_layers": 8,
        "num_heads": 16,
        "vocab_size": 50257,
        "sequence_length": 2048,
    },
    "data": {**GPT["data"], "vocab_size": 50257, "sequence_length": 2048},
}


def batch(samples, microbatch):
    return {"training": {"global_batch_size": samples, "microbatch_size": microbatch}}


def precision(dtype):
    return {"precision": {"dtype": dtype}}


def float8(recipe):
    return {"precision": {"float8": recipe, "float8_layers": "all"}}


MUON = {"optimizer": {"name": "muon"}}
NO_EMA, EMA = {"ema": {"decays": []}}, {"ema": {"decays": [0.999]}}
LAYOUTS = {
    "one": (XL, 1, batch(4, 4)),
    "one, accumulated": (XL, 1, batch(6, 2)),
    "one, fp32": (XL, 1, batch(4, 2), precision("fp32")),
    "one, recomputed": (XL, 1, batch(1, 1), remat("full")),
    "fsdp 8": (XL, 8, batch(32, 4)),
    "fsdp 8, accumulated": (XL, 8, batch(64, 4), NO_EMA),
    "fsdp 8, always": (XL, 8, batch(32, 4), parallel(reshard_after_forward="always")),
    "fsdp 8, never": (XL, 8, batch(32, 4), parallel(reshard_after_forward="never")),
    "fsdp 8, units of 3": (
        XL,
        8,
        batch(16, 2),
        parallel(blocks_per_fsdp_unit=3, prefetch=2),
        remat("full"),
    ),
    "fsdp 8, selective": (XL, 8, batch(32, 4), remat("selective"), parallel(prefetch=1)),
    "fsdp 8, attention": (XL, 8, batch(32, 4), remat("attention"), precision("fp16")),
    "hsdp 2 x 4": (XL, 8, batch(32, 4), parallel(dp_replicate=2)),
    "replicas 4": (XL, 4, batch(16, 4), parallel(dp_replicate=4)),
    "fsdp 16, muon": (XL, 16, batch(32, 2), MUON),
    "fsdp 4, muon, recomputed": (XL, 4, batch(8, 2), MUON, remat("full")),
    "one, float8": (XL, 1, batch(4, 4), float8("tensorwise")),
    "fsdp 8, float8": (XL, 8, batch(32, 4), float8("tensorwise")),
    "fsdp 8, float8, never": (
        XL,
        8,
        batch(32, 4),
        float8("tensorwise"),
        parallel(reshard_after_forward="never"),
        remat("selective"),
    ),
    "fsdp 8, float8 by row": (XL, 8, batch(32, 4), float8("rowwise_with_gw_hp")),
    "1f1b 2, float8": (XL, 2, batch(12, 2), pipeline(2, "1f1b"), float8("tensorwise")),
    "tp 4 x dp 2": (XL, 8, batch(32, 8), parallel(tp=4)),
    "tp 4, whole tokens": (XL, 4, batch(8, 8), parallel(tp=4, sequence_parallel=False)),
    "tp 2, recomputed": (XL, 8, batch(16, 4), parallel(tp=2), remat("full")),
    "ring 4": (XL, 4, batch(8, 8), parallel(cp=4)),
    "ulysses 2 x dp 4": (XL, 8, batch(32, 8), parallel(cp=2, cp_method="ulysses")),
    "1f1b 4": (XL, 4, batch(12, 2), pipeline(4, "1f1b")),
    "gpipe 4 x dp 2": (XL, 8, batch(24, 2), pipeline(4, "gpipe")),
    "interleaved 2": (XL, 2, batch(12, 2), pipeline(2, "interleaved_1f1b", 2)),
    "interleaved zero bubble 2": (XL, 2, batch(8, 2), pipeline(2, "interleaved_zero_bubble", 2)),
    "zbv 2": (XL, 2, batch(10, 2), pipeline(2, "zbv_zero_bubble")),
    "1f1b 2 x tp 2 x dp 2": (XL, 8, batch(24, 4), pipeline(2, "1f1b", tp=2), remat("full")),
    "gpt, one": (WIDE, 1, batch(2, 2)),
    "gpt, one, accumulated": (WIDE, 1, batch(4, 2), precision("fp16"), remat("full")),
    "gpt, one, fp32": (WIDE, 1, batch(2, 1), precision("fp32")),
    "gpt, fsdp 8": (WIDE, 8, batch(16, 2)),
    "gpt, fsdp 8, accumulated": (WIDE, 8, batch(32, 2), EMA),
    "gpt, fsdp 8, recomputed": (WIDE, 8, batch(16, 2), remat("full"), EMA),
    "gpt, fsdp 8, selective, fp32": (WIDE, 8, batch(8, 1), remat("selective"), precision("fp32")),
    "gpt, hsdp, never": (
        WIDE,
        8,
        batch(16, 2),
        parallel(dp_replicate=2, reshard_after_forward="never"),
    ),
    "gpt, fsdp 8, muon": (WIDE, 8, batch(16, 2), MUON),
    "gpt, tp 8": (WIDE, 8, batch(4, 4), parallel(tp=8)),
    "gpt, tp 8, whole tokens": (
        WIDE,
        8,
        batch(8, 8),
        parallel(tp=8, sequence_parallel=False),
        remat("full"),
    ),
    "gpt, tp 4 x dp 4": (WIDE, 16, batch(32, 4), parallel(tp=4), remat("selective")),
    "gpt, tp 2 x dp 4": (WIDE, 8, batch(16, 4), parallel(tp=2), remat("attention")),
    "gpt, ring 4": (WIDE, 4, batch(4, 4), parallel(cp=4), remat("full")),
    "gpt, ulysses 4 x dp 2": (WIDE, 8, batch(8, 4), parallel(cp=4, cp_method="ulysses")),
    "gpt, ring 2 x tp 2 x dp 2": (WIDE, 8, batch(8, 4), parallel(cp=2, tp=2)),
    "gpt, 1f1b 4": (WIDE, 4, batch(6, 1), pipeline(4, "1f1b")),
    "gpt, fsdp 8, float8, accumulated": (
        WIDE,
        8,
        batch(32, 2),
        float8("tensorwise"),
        remat("full"),
    ),
    "gpt, tp 2 x dp 2, float8": (WIDE, 4, batch(8, 2), float8("tensorwise"), parallel(tp=2)),
    "gpt, 1f1b 4 x dp 8, fp16, recomputed": (
        {**WIDE, "model": {**WIDE["model"], "num_layers": 16}},
        32,
        batch(512, 2),
        pipeline(4, "1f1b"),
        remat("full"),
        precision("fp16"),
    ),
    "gpt, 1f1b 2, recomputed": (WIDE, 4, batch(12, 2), pipeline(2, "1f1b"), remat("full")),
    "gpt, gpipe 2 x tp 2, fp16": (
        WIDE,
        4,
        batch(8, 2),
        pipeline(2, "gpipe", tp=2),
        remat("full"),
        precision("fp16"),
    ),
    "gpt, interleaved 2": (
        WIDE,
        2,
        batch(6, 1),
        pipeline(2, "interleaved_1f1b", 4),
        remat("selective"),
    ),
    "gpt, interleaved zero bubble 2 x tp 2": (
        WIDE,
        4,
        batch(6, 1),
        pipeline(2, "interleaved_zero_bubble", 1, tp=2),
    ),
    "gpt, zbv 2": (WIDE, 2, batch(5, 1), pipeline(2, "zbv_zero_bubble")),
    "gpt, 1f1b 2 x ulysses 2 x dp 2": (
        WIDE,
        8,
        batch(12, 2),
        pipeline(2, "1f1b", cp=2, cp_method="ulysses"),
    ),
}


@pytest.fixture(scope="module")
def compare():
    with comparing() as run:
        yield run


@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_at_real_widths_are_within_three_percent(compare, name):
    model, world, *sections = LAYOUTS[name]
    merged = {}
    for some in sections:
        for section, table in some.items():
            merged[section] = {**merged.get(section, {}), **table}
    found = compare(tables(model, **merged), world)
    print(f"{name}: {max(sum(r.values()) for r in found.measured) / 2**20:.0f} MiB", end=" ")
    print(f"{found.error:+.2%}, ranks", *(f"{error:+.2%}" for error in found.errors))
    assert abs(found.error) < 0.03, found
    assert max(map(abs, found.errors)) < 0.03, found
