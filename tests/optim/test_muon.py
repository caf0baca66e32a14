"""Muon on one process, beside torch's."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim import _muon

from titan_dit.config.parameter_groups import GroupConfig
from titan_dit.config.section import UserError
from titan_dit.models.dit_config import DiTConfig
from titan_dit.optim.muon import balanced, orthogonalized, places
from titan_dit.optim.optimizer import apply_gradients, build_optimizer
from titan_dit.optim.sections import MuonConfig

SPEC = DiTConfig(size="S/2", latent_size=32, in_channels=4, num_classes=10).spec()
GO, SKIP = torch.tensor(False), torch.tensor(True)
SHAPES = {
    "blocks.0.a": (8, 6),
    "blocks.0.b": (4, 12),
    "blocks.1.a": (8, 6),
    "blocks.0.bias": (8,),
    "head.weight": (4, 6),
}


def weights():
    generator = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in SHAPES.items()
    }


def give_gradients(parameters, step):
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def build(**keys):
    parameters = weights()
    config = MuonConfig(**{"lr": 0.02, "weight_decay": 0.1, "ns_dtype": "fp32"} | keys)
    return parameters, build_optimizer(parameters, config, SPEC)


def in_fp32(grad, ns_coefficients, ns_steps, eps):
    """torch's iteration without its cast to bf16."""
    a, b, c = ns_coefficients
    x = grad.T if grad.size(0) > grad.size(1) else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(ns_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if grad.size(0) > grad.size(1) else x


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-5), ("bf16", 2e-2)])
def test_matrices_of_blocks_step_as_torchs_muon_and_the_rest_as_adamw(
    nesterov, adjust, dtype, tolerance, monkeypatch
):
    if dtype == "fp32":
        monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", in_fp32)
    parameters, optimizer = build(
        nesterov=nesterov, adjust_lr=adjust, adamw_lr=0.01, ns_dtype=dtype
    )
    expected = weights()
    own = [p for name, p in expected.items() if p.ndim == 2 and name.startswith("blocks")]
    others = [p for name, p in expected.items() if p.ndim == 1 or name.startswith("head")]
    muon = torch.optim.Muon(own, lr=0.02, nesterov=nesterov, adjust_lr_fn=adjust)
    adamw = torch.optim.AdamW(others, lr=0.01, weight_decay=0.1)
    for step in range(4):
        for each in (parameters, expected):
            give_gradients(each, step)
        apply_gradients(optimizer, 0.02, GO)
        muon.step()
        adamw.step()
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter, expected[name], rtol=0, atol=tolerance, msg=name)
    for parameter, reference in zip(own, own, strict=True):
        assert muon.state[parameter]["momentum_buffer"].shape == reference.shape
    name = "blocks.0.b"
    torch.testing.assert_close(
        optimizer.state[parameters[name]]["momentum_buffer"],
        muon.state[expected[name]]["momentum_buffer"],
    )


def snapshot(optimizer, parameters):
    tensors = {name: p.detach().clone() for name, p in parameters.items()}
    for name, p in parameters.items():
        for key, value in optimizer.state[p].items():
            tensors[f"{name}.{key}"] = value.clone()
    return tensors


def test_a_bad_step_leaves_weights_momentum_and_counts_to_the_bit():
    parameters, optimizer = build()
    for step in range(2):
        give_gradients(parameters, step)
        apply_gradients(optimizer, 0.02, GO)
    before = snapshot(optimizer, parameters)
    for bad in (float("nan"), float("inf"), 1.0):
        for parameter in parameters.values():
            parameter.grad = torch.full_like(parameter, bad)
        apply_gradients(optimizer, 0.02, SKIP)
    after = snapshot(optimizer, parameters)
    assert before["head.weight.step"] == 2
    for name, values in before.items():
        assert torch.equal(after[name].view(torch.int32), values.view(torch.int32)), name


def test_fused_projections_are_orthogonalised_one_by_one():
    heads, head_dim, width = 2, SPEC.head_dim, 4
    generator = torch.Generator().manual_seed(0)
    apart = torch.randn(3, heads * head_dim, width, generator=generator)
    fused = apart.view(3, heads, head_dim, width).transpose(0, 1).reshape(-1, width)
    weight = nn.Parameter(torch.zeros_like(fused))
    config = MuonConfig(lr=1.0, ns_dtype="fp32", nesterov=False)
    optimizer = build_optimizer({"blocks.0.qkv.weight": weight}, config, SPEC)
    weight.grad = fused.clone()
    apply_gradients(optimizer, 1.0, GO)
    found = -weight.detach() / (0.2 * (heads * head_dim) ** 0.5)
    expected = orthogonalized(apart, 5).view(3, heads, head_dim, width).transpose(0, 1)
    torch.testing.assert_close(found, expected.reshape(-1, width), rtol=1e-4, atol=1e-5)


def test_singular_values_come_near_one():
    matrices = torch.randn(3, 20, 32, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalized(matrices, 5))
    assert 0.5 < values.min() < values.max() < 1.3
    assert torch.equal(orthogonalized(matrices.mT, 5), orthogonalized(matrices, 5).mT)


def test_owners_share_the_work_evenly():
    owners = balanced([4.0] * 8 + [1.0] * 8, 4)
    assert [sum(4.0 if n < 8 else 1.0 for n in range(16) if owners[n] == o) for o in range(4)] == [
        10.0
    ] * 4
    assert [places(number, [2, 3]) for number in range(6)] == [
        *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2))
    ]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"matrices": ["head.nothing"]}, "matches no parameter with two dims"),
        ({"fused_qkv": ["blocks.*"]}, "which are not [heads, 3, 64]"),
    ],
)
def test_what_muon_cannot_train_is_refused(keys, message):
    shapes = {name: torch.Size(shape) for name, shape in SHAPES.items()}
    with pytest.raises(UserError, match="optimizer") as caught:
        MuonConfig(**keys).check(shapes, SPEC)
    assert message in str(caught.value)


def test_grouped_queries_are_no_fused_projections_even_if_the_rows_divide():
    """3 groups of 4 heads: 3 x (4 + 2) head_dim rows would pass as 6 heads of q, k and v."""
    shapes = {"blocks.0.attn.qkv.weight": torch.Size((18 * SPEC.head_dim, 768))}
    MuonConfig().check(shapes, SPEC)
    grouped = replace(SPEC, num_heads=12, num_key_value_heads=3)
    with pytest.raises(UserError, match=r"not \[heads, 3, 64\]"):
        MuonConfig().check(shapes, grouped)
    MuonConfig(fused_qkv=()).check(shapes, grouped)


def test_large_rates_need_one_for_adamw():
    with pytest.raises(UserError, match="Set adamw_lr"):
        MuonConfig(adjust_lr="original")


def test_a_groups_rate_is_absolute_for_muon_and_adamw():
    groups = (GroupConfig(pattern="head.*", lr=1e-5), GroupConfig(pattern="*.bias", lr_factor=0.5))
    keys = {"lr": 0.02, "adjust_lr": "original", "adamw_lr": 3e-4, "groups": groups}
    _, optimizer = build(**keys)
    apply_gradients(optimizer, 0.02, GO)
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group["names"]}
    assert rates == {
        **dict.fromkeys(("blocks.0.a", "blocks.0.b", "blocks.1.a"), 0.02),
        "blocks.0.bias": pytest.approx(1.5e-4),
        "head.weight": pytest.approx(1e-5),
    }


@pytest.mark.parametrize("key", ["matrices", "fused_qkv"])
def test_each_pattern_must_match(key):
    patterns = ("blocks.*", "block.*") if key == "matrices" else ("*.q.weight",)
    shapes = {name: torch.Size(shape) for name, shape in SHAPES.items()}
    with pytest.raises(UserError, match=rf"{key}: the pattern .*{re.escape(patterns[-1])}"):
        MuonConfig(**{key: patterns}).check(shapes, SPEC)
    MuonConfig().check(shapes, SPEC)
    assert list(MuonConfig().lines(shapes)) == [
        "muon    3 matrices, 0 of them as queries, keys and values; AdamW for 2 tensors"
    ]
