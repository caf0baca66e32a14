"""The composed memory against dry runs of whole steps."""

import pytest
from whole_steps import comparing

DIT = {
    "model": {
        "name": "dit",
        "hidden_size": 128,
        "num_layers": 4,
        "num_heads": 8,
        "patch_size": 2,
        "latent_size": 32,
        "in_channels": 1,
        "num_classes": 10,
    },
    "objective": {"name": "rectified_flow", "condition_dropout": 0.25},
    "data": {"name": "digits"},
    "training": {"steps": 4, "global_batch_size": 16, "microbatch_size": 4},
    "ema": {"decays": [0.9, 0.99]},
}
GPT = {
    "model": {
        "name": "gpt",
        "hidden_size": 128,
        "num_layers": 4,
        "num_heads": 4,
        "vocab_size": 2000,
        "sequence_length": 256,
    },
    "objective": {"name": "next_token"},
    "data": {"name": "tokens", "paths": [], "vocab_size": 2000, "sequence_length": 256},
    "training": {"steps": 4, "global_batch_size": 16, "microbatch_size": 4},
    "ema": {"decays": []},
}

TEXT = {"in_channels": 16, "latent_size": [16, 16], "text_tokens": 64, "text_dim": 96}
FLUX2 = {
    "model": {
        "name": "flux2",
        "hidden_size": 384,
        "num_heads": 3,
        "num_double_layers": 2,
        "num_single_layers": 4,
        **TEXT,
    },
    "objective": {"name": "rectified_flow"},
    "data": {"name": "latents", "path": "nowhere"},
    "training": {"steps": 4, "global_batch_size": 16, "microbatch_size": 2},
    "precision": {"dtype": "bf16"},
}
SIZES = {"hidden_size": 384, "num_heads": 3, "num_layers": 4, "num_refiner_layers": 2}
Z_IMAGE = FLUX2 | {"model": {"name": "z_image", **SIZES, **TEXT}}
WAN = FLUX2 | {
    "model": {
        "name": "wan",
        "hidden_size": 384,
        "num_heads": 4,
        "num_layers": 4,
        "intermediate_size": 1024,
        "latent_frames": 3,
        **TEXT,
    },
}


def tables(model, /, **sections):
    """A model's tables with keys of some sections replaced."""
    found = {name: dict(table) for name, table in model.items()}
    for name, table in sections.items():
        found.setdefault(name, {}).update(table)
    return found


@pytest.fixture(scope="module")
def compare():
    with comparing() as run:
        yield run


def parallel(**sizes):
    return {"parallel": sizes}


def pipeline(pp, schedule, stages=1, **sizes):
    table = {"schedule": schedule, "virtual_stages": stages}
    return parallel(pp=pp, **sizes) | {"pipeline": table}


def remat(mode):
    return {"activation_checkpoint": {"mode": mode}}


def offload(ahead=1):
    return {"offload": {"activations": True, "ahead": ahead}}


ON_HOST = {"offload": {"parameters": True}}
SHORT = {
    "recomputed": (GPT, 4, remat("full") | parallel(blocks_per_fsdp_unit=1, prefetch=1)),
    "tp": (GPT, 4, parallel(tp=2)),
    "1f1b": (DIT, 2, pipeline(2, "1f1b")),
    "zero bubble": (GPT, 2, pipeline(2, "zbv_zero_bubble")),
    "blocks of three kinds": (Z_IMAGE, 2, pipeline(2, "1f1b")),
    "cross-attention": (WAN, 2, parallel(tp=2)),
    "activations on the host": (DIT, 2, offload()),
    "parameters on the host": (GPT, 2, ON_HOST),
}
LONG = {
    "one rank": (DIT, 1, {}),
    "fsdp": (DIT, 4, {}),
    "muon": (DIT, 4, {"optimizer": {"name": "muon"}} | remat("full")),
    "hsdp, kept": (GPT, 4, parallel(dp_replicate=2, reshard_after_forward="never")),
    "tp, whole tokens": (DIT, 2, parallel(tp=2, sequence_parallel=False)),
    "ring": (GPT, 2, parallel(cp=2) | remat("selective")),
    "interleaved": (GPT, 4, pipeline(2, "interleaved_1f1b", 2)),
    "kinds, one rank": (FLUX2, 1, {}),
    "kinds, fsdp": (Z_IMAGE, 4, {}),
    "kinds, muon": (FLUX2, 4, {"optimizer": {"name": "muon"}}),
    "kinds, recomputed": (
        FLUX2,
        4,
        remat("full") | parallel(blocks_per_fsdp_unit=1, prefetch=1),
    ),
    "kinds, ring": (FLUX2, 2, parallel(cp=2) | remat("selective")),
    "kinds, tp": (FLUX2, 2, parallel(tp=2) | {"model": {"num_heads": 4}}),
    "kinds, interleaved": (Z_IMAGE, 4, pipeline(2, "interleaved_1f1b", 2)),
    "kinds, zero bubble": (FLUX2, 2, pipeline(2, "zbv_zero_bubble")),
    "cross-attention, one rank": (WAN, 1, {}),
    "cross-attention, fsdp": (WAN, 4, {}),
    "cross-attention, recomputed": (WAN, 4, remat("full") | parallel(blocks_per_fsdp_unit=1)),
    "cross-attention, ring": (WAN, 2, parallel(cp=2) | remat("selective")),
    "cross-attention, interleaved": (WAN, 4, pipeline(2, "interleaved_1f1b", 2)),
    "on the host, one rank": (DIT, 1, offload(2)),
    "on the host, recomputed": (DIT, 4, offload() | remat("full")),
    "on the host, 1f1b": (DIT, 2, offload() | pipeline(2, "1f1b")),
    "on the host, kinds": (Z_IMAGE, 4, offload()),
    "parameters on the host, one rank": (DIT, 1, ON_HOST),
    "parameters on the host, bf16": (Z_IMAGE, 4, ON_HOST),
    "parameters on the host, 1f1b": (DIT, 4, ON_HOST | pipeline(2, "1f1b")),
    "cross-attention, ulysses": (WAN, 4, parallel(cp=4, cp_method="ulysses")),
}


@pytest.mark.parametrize("name", [*SHORT, *(pytest.param(n, marks=pytest.mark.long) for n in LONG)])
def test_the_composed_peak_is_that_of_a_whole_step(compare, name):
    model, world, sections = (SHORT | LONG)[name]
    found = compare(tables(model, **sections), world)
    assert abs(found.error) < 0.03, found
    assert max(map(abs, found.errors)) < 0.03, found
    if sections.get("offload", {}).get("parameters"):
        for composed, measured in found.on_host:
            assert composed == pytest.approx(measured, rel=0.03)
