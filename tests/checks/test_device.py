"""Settings that this machine does not support are refused before the build."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from plans import planned
from tiny import tiny_config

from titan_dit.checks import device, validate
from titan_dit.checks.device import (
    GIB,
    NEEDED,
    attention_hint,
    attention_shape,
    check_base,
    check_kernels,
    check_matmuls,
    check_memory,
    check_profiled,
    check_writers,
    format_hint,
    rank_memory,
    replayable_precision,
    state_bytes,
)
from titan_dit.config.operation import MetricsConfig, ProfileConfig
from titan_dit.config.section import UserError
from titan_dit.config.training import EMAConfig
from titan_dit.optim.sections import AdamWConfig

CPU = torch.device("cpu")
TE = ("te_delayed", "te_current", "te_mxfp8")
TORCHAO = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


@pytest.mark.parametrize("float8", NEEDED)
def test_a_cpu_is_refused_with_the_way_to_emulate_if_there_is_one(float8):
    precision = tiny_config(precision={"float8": float8}).precision
    with pytest.raises(UserError, match=rf'\[precision\] float8="{float8}".* Set .*"off"') as error:
        check_matmuls(precision, False, CPU)
    assert ("float8_emulate = true" in str(error.value)) == (float8 in TORCHAO)


@pytest.mark.parametrize("found", [(7, 0), (7, 5), (8, 0), (9, 0)])
def test_a_gpu_without_bf16_is_told_of_fp16(found, monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.version, "hip", None)
    hint = format_hint(tiny_config(precision={"dtype": "bf16"}).precision, gpu)
    assert (hint is not None) == (found < (8, 0))
    if hint:
        assert f"Tesla T4 (compute capability {found[0]}.{found[1]}) has no bf16 units" in hint
    for dtype, on in (("fp16", gpu), ("fp32", gpu), ("bf16", CPU)):
        assert format_hint(tiny_config(precision={"dtype": dtype}).precision, on) is None


def test_emulation_and_off_run_anywhere():
    for keys in ({"float8": "off"}, {"float8": "rowwise", "float8_emulate": True}):
        check_matmuls(tiny_config(precision=keys).precision, False, CPU)


@pytest.mark.parametrize(
    ("float8", "played"),
    [("off", ("off", False)), ("rowwise", ("rowwise", True))]
    + [(name, ("off", False)) for name in TE],
)
def test_a_step_is_played_again_on_a_cpu_as_near_as_it_can_be(float8, played):
    precision = tiny_config(precision={"float8": float8}).precision
    found = replayable_precision(precision, CPU)
    assert (found.float8, found.float8_emulate) == played
    check_matmuls(found, False, CPU)


@pytest.mark.parametrize(
    ("float8", "found", "able"),
    [
        ("tensorwise", (8, 0), '"off"'),
        ("rowwise", (8, 9), '"off", "tensorwise", "te_delayed", "te_current"'),
        ("te_mxfp8", (9, 0), '"rowwise_with_gw_hp", "te_delayed", "te_current"'),
    ],
)
def test_an_older_gpu_is_refused_with_what_it_can_do(monkeypatch, float8, found, able):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")
    precision = tiny_config(precision={"float8": float8}).precision
    with pytest.raises(UserError, match="Old GPU has") as error:
        check_matmuls(precision, False, torch.device("cuda", 0))
    assert str(error.value).endswith(f"{able}.")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: NEEDED[float8])
    check_matmuls(precision, False, torch.device("cuda", 0))


def test_async_tp_needs_cuda():
    with pytest.raises(UserError, match=r"needs CUDA .* Set async_tp = false"):
        check_matmuls(tiny_config().precision, True, CPU)


@pytest.mark.parametrize(
    ("sizes", "method", "expected"),
    [
        ({}, "ring", (4, 16, False)),
        ({"tp": 2}, "ring", (2, 16, False)),
        ({"tp": 2, "cp": 2}, "ring", (2, 8, True)),
        ({"tp": 2, "cp": 2}, "ulysses", (1, 16, False)),
    ],
)
def test_what_is_tried_has_the_shape_of_a_rank(sizes, method, expected):
    _, plan = planned(sizes, parallel={"cp_method": method})
    found = attention_shape(plan, CPU)
    assert (found.heads, found.tokens, found.ring) == expected
    assert (found.head_dim, found.dtype) == (8, torch.float32)


def test_a_run_is_refused_before_it_is_built():
    with pytest.raises(UserError, match=r'\[precision\] attention="cudnn" cannot run 4 heads'):
        check_kernels(planned(precision={"attention": "cudnn"})[1], CPU)


def test_a_head_dim_that_is_padded_is_told_with_its_cost():
    # DiT-XL/2 at 1024 tokens: 3147.191 GFLOP a sample, attention's 12 n^2 h l of it 12.9%.
    _, plan = planned(
        model={"size": "XL/2", "latent_size": 64, "in_channels": 4}
        | dict.fromkeys(("hidden_size", "num_layers", "num_heads", "patch_size"))
    )
    line = attention_hint(plan, torch.device("cuda"), 3147191000000, "flash")
    assert "72 is none of 32, 64, 96, 128, 192, 256: flash kernels pad it to 96, +33% F" in line
    assert "+4.3% in the model at 1024 tokens" in line
    assert "bench attention --heads 16 --head-dim 72 --tokens 1024" in line
    assert attention_hint(plan, CPU, 3147191000000, "flash") is None
    # Of the kernel that runs.
    line = attention_hint(plan, torch.device("cuda"), 3147191000000, "cudnn")
    assert "72 is none of 64, 128: cuDNN's kernels pad it to 128, +78% FLOPs in attention" in line
    assert "+10.0% in the model at 1024 tokens" in line
    assert attention_hint(plan, torch.device("cuda"), 3147191000000, "efficient") is None


@pytest.mark.parametrize("mask", ["causal", "lengths"])
def test_what_is_tried_has_the_mask_of_the_model(mask):
    _, plan = planned()
    masked = replace(plan, spec=replace(plan.spec, mask=mask))
    assert attention_shape(masked, CPU).mask == mask
    check_kernels(masked, CPU)


def test_wandb_without_wandb_says_what_to_install(monkeypatch):
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=rf"Run {sys.executable} -m pip install wandb torch==.*, or set"
    ):
        check_writers(MetricsConfig(wandb=True))
    check_writers(MetricsConfig(wandb=False))


@pytest.mark.parametrize(
    ("ranks", "words"), [(1, "1 rank was started. Name rank 0"), (2, "2 ranks were started. Name")]
)
def test_ranks_that_were_not_started_are_refused(ranks, words):
    profile = ProfileConfig(enabled=True, ranks=(0, 2))
    with pytest.raises(UserError, match=rf"\[profile\] ranks=\[0, 2\], but {words}"):
        check_profiled(profile, planned({"dp_shard": ranks})[1])
    check_profiled(profile, planned({"dp_shard": 3})[1])
    check_profiled(ProfileConfig(ranks=(0, 2)), planned({"dp_shard": ranks})[1])
    # A run resumed on fewer ranks continues without the profile.
    check_profiled(profile, planned({"dp_shard": ranks}, resuming=True)[1])


def test_with_a_device_all_of_it_is_asked():
    validate(*planned(), CPU)
    for words, sections in (
        (r"\[profile\] ranks", {"profile": {"enabled": True, "ranks": [3]}}),
        (r'\[precision\] float8="rowwise" needs', {"precision": {"float8": "rowwise"}}),
        (r'\[precision\] attention="cudnn"', {"precision": {"attention": "cudnn"}}),
    ):
        sections = {"precision": {"dtype": "bf16"} | sections.pop("precision", {})} | sections
        validate(*planned(**sections))
        with pytest.raises(UserError, match=words):
            validate(*planned(**sections), CPU)


def test_a_state_larger_than_the_memory_is_refused_with_what_would_hold_it():
    _, plan = planned({"dp_shard": 2})
    with torch.device("meta"):
        count = sum(p.numel() for p in plan.spec.build().parameters())
    needed = state_bytes({"w": torch.Size([count])}, {"w"}, AdamWConfig(), 2, 1)
    assert needed == count * 4 * 5 // 2
    check_memory(plan, AdamWConfig(), EMAConfig(decays=(0.9,)), needed, "a GPU")
    check_memory(plan, AdamWConfig(), EMAConfig(decays=(0.9,)), None, "a GPU")
    with pytest.raises(UserError, match=rf"{count:,} parameters .* 2 shard.*a GPU has .*--dry-run"):
        check_memory(plan, AdamWConfig(), EMAConfig(decays=(0.9,)), needed - 1, "a GPU")


def test_weights_in_bf16_take_half_and_a_state_on_the_host_is_compared_with_its_memory(monkeypatch):
    _, plan = planned(precision={"dtype": "bf16", "weights": "bf16"})
    with torch.device("meta"):
        count = sum(p.numel() for p in plan.spec.build().parameters())
    # Weights and gradients, two moments, no average.
    needed = count * (2 + 2 + 4 + 4)
    check_memory(plan, AdamWConfig(), EMAConfig(decays=()), needed, "a GPU")
    with pytest.raises(UserError, match="a GPU has"):
        check_memory(plan, AdamWConfig(), EMAConfig(decays=()), needed - 1, "a GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    properties = SimpleNamespace(total_memory=24 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert rank_memory() == (24 * GIB, "the GPU")
    assert rank_memory(on_host=True)[1] == "this machine's free memory"


def test_a_float8_base_in_compiled_blocks_needs_a_gpu_with_e4m3(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    _, plan = planned(lora={"rank": 2, "base": "float8"}, compile={"enabled": True})
    with pytest.raises(UserError, match=r'base="float8" .* 8\.9, but an A100 has 8\.0.*"int8"'):
        check_base(plan, gpu)
    check_base(plan, CPU)
    check_base(replace(plan, compile=replace(plan.compile, enabled=False)), gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    check_base(plan, gpu)
