"""[repa]: its loss and gradients by the formula, its FLOPs, and what it refuses."""

import math
from dataclasses import replace

import pytest
import torch
from refusals import refused
from torch.nn.functional import normalize
from torch.utils.flop_counter import FlopCounterMode

from titan_dit.config.training import RepaConfig
from titan_dit.models.base import Model
from titan_dit.models.dit_config import DiTConfig
from titan_dit.models.joint_dit_config import JointDiTConfig
from titan_dit.models.lora import adapted_layers
from titan_dit.objectives.base import Prepared
from titan_dit.objectives.repa import (
    FACTOR,
    FEATURES,
    WEIGHT,
    Alignment,
    normalized,
    readings,
    weighted,
    with_alignment,
)

ROWS, GRID, WIDTH, DIM = 3, (2, 3), 4, 5


def inputs(seed=0):
    """Tokens and features of three samples."""
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randn(ROWS, 6, WIDTH, generator=rng, dtype=torch.float64)
    return tokens, torch.randn(ROWS, 6, DIM, generator=rng)


def batch_of(features, weight, total=12.0):
    return Prepared(
        inputs={}, targets={}, weight=weight, total_tokens=total, context={FEATURES: features}
    )


def module_of(**keys):
    torch.manual_seed(0)
    config = RepaConfig(block=1, dim=DIM, hidden_size=7, **keys)
    return config, Alignment(config, WIDTH, 1, GRID).double()


def read(module):
    """The reading of a run of one rank with this module."""
    part = Model()
    part.objective["0"] = module
    return readings([part], torch.device("cpu"), lambda sums: sums)


@pytest.mark.parametrize("has_masks", [False, True])
@pytest.mark.parametrize("projector", ["mlp", "conv"])
def test_the_gradient_is_that_of_the_network_s_loss_and_of_the_weighted_cosine(
    projector, has_masks
):
    config, module = module_of(projector=projector, weight=0.7)
    tokens, features = inputs()
    tokens.requires_grad_()
    # The last sample fills the batch up. The step has 12 tokens on all ranks.
    weight = torch.tensor([1.0, 1, 0])
    # 0.5, 1.5, ... of a sample's tokens: 1 on average.
    masks = torch.tensor([0.5, 1.5] * 3).expand(ROWS, -1) if has_masks else torch.ones(ROWS, 6)
    given = batch_of(features, weight[:, None] * masks if has_masks else weight)
    side = weighted(config, given, None).side_inputs
    condition = torch.ones(ROWS, 2)
    out_condition, out, *none = module((condition, tokens), side)
    assert not none
    assert out_condition is condition
    assert torch.equal(out, tokens)
    (out**2).sum().backward()
    found = {name: p.grad for name, p in module.named_parameters()} | {"tokens": tokens.grad}

    module.zero_grad()
    tokens.grad = None
    pictures = tokens.transpose(1, 2).unflatten(2, GRID)
    given = module.projector(tokens if projector == "mlp" else pictures)
    given = given if projector == "mlp" else given.flatten(2).transpose(1, 2)
    cosine = (normalize(given, dim=-1) * normalize(features.double(), dim=-1)).sum(-1)
    loss = -(cosine * masks)[:2].sum() / 12
    ((tokens**2).sum() + 0.7 * loss).backward()
    for name, p in module.named_parameters():
        torch.testing.assert_close(found[name], p.grad, msg=name)
    torch.testing.assert_close(found["tokens"], tokens.grad)
    # 12 of 12 tokens' weights are here: the mean is the loss itself.
    assert read(module)["repa_loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert read(module) == {}


class Block(torch.nn.Module):
    def forward(self, stream, side):
        return stream


def test_without_gradients_or_features_the_module_is_not_called():
    config, module = module_of()
    part, calls = Model(), []
    part.embed = part.head = None
    part.blocks = torch.nn.ModuleDict({"0": Block()})
    part.objective["0"] = module
    module.register_forward_pre_hook(lambda *_: calls.append(1))  # As FSDP's all-gather.
    tokens, features = inputs()
    side = weighted(config, batch_of(features, torch.ones(ROWS)), None).side_inputs
    stream = torch.ones(ROWS, 2), tokens
    with torch.no_grad():
        assert part(stream, side) is stream
    assert part(stream, {}) is stream
    assert not calls
    part(stream, side)
    assert len(calls) == 1
    empty = replace(batch_of(features, torch.ones(ROWS)), context={})
    assert weighted(config, empty, None) is empty


def test_the_loss_scale_is_a_factor_of_the_gradient_alone():
    config, module = module_of()
    tokens, features = inputs()
    found = []
    for scale in (None, torch.tensor(8.0)):
        own = tokens.clone().requires_grad_()
        side = weighted(config, batch_of(features, torch.ones(ROWS)), scale).side_inputs
        assert side[FACTOR].item() == 0.5 * (1 if scale is None else 8)
        _, out = module((own, own), side)
        (0 * out).sum().backward()
        found.append((own.grad, module.take_sums()))
    torch.testing.assert_close(found[1][0], 8 * found[0][0])
    assert torch.equal(found[0][1], found[1][1])


def test_a_loss_that_is_not_finite_spoils_the_gradients_and_is_shown_as_none():
    config, module = module_of()
    tokens, features = inputs()
    features[0, 0, 0] = math.inf
    tokens.requires_grad_()
    side = weighted(config, batch_of(features, torch.ones(ROWS)), None).side_inputs
    _, out = module((tokens, tokens), side)
    out.sum().backward()
    assert all(p.grad.isnan().any() for p in module.parameters())
    assert read(module) == {"repa_loss": None}


def test_spatial_normalisation_takes_a_share_of_the_mean_and_the_std_over_tokens():
    _, features = inputs()
    assert normalized(features, None) is features
    found = normalized(features, 1.0)
    torch.testing.assert_close(found.mean(1), torch.zeros(ROWS, DIM), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.std(1), torch.ones(ROWS, DIM), atol=1e-4, rtol=0)
    mean, std = features.mean(1, keepdim=True), features.std(1, keepdim=True)
    torch.testing.assert_close(normalized(features, 0.6), (features - 0.6 * mean) / (std + 1e-6))
    # An element that is equal in all tokens, as on a picture of one colour.
    features[..., 0] = 3.0
    assert normalized(features.half(), 0.6).isfinite().all()


LAYERS = 28
STAGES = (range(7), range(7, 8), range(8, LAYERS))
"""The layers before the block, the block, and those after it."""


def counted(model, given, side):
    """FLOPs of forward and backward of a stage, on the meta device."""
    with FlopCounterMode(display=False) as counter:
        out = model(given, side)
        sum(part.sum() for part in (out if isinstance(out, tuple) else (out,))).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("projector", ["mlp", "conv"])
def test_on_xl_2_its_flops_are_below_four_percent_of_a_step_and_all_behind_its_block(projector):
    model = DiTConfig(size="XL/2", latent_size=32, in_channels=4, num_classes=1000)
    config = RepaConfig(block=8, dim=768, projector=projector)
    spec, found = with_alignment(model.spec(8), config, (16, 16)), []
    with torch.device("meta"):
        whole = spec.build().flops_per_sample(256)
        side = {name: torch.empty(each.shape) for name, each in spec.static.items()}
        own = {
            FEATURES: torch.empty(1, 256, 768),
            WEIGHT: torch.empty(1, 256),
            FACTOR: torch.empty(()),
        }
        for layers in STAGES:
            part = spec.build()
            part.cut(layers, is_first=0 in layers, is_last=LAYERS - 1 in layers)
            given = tuple(
                torch.empty(1, *each.shape, requires_grad=True) for each in spec.stream.values()
            )
            if 0 in layers:
                given = {
                    "tokens": torch.empty(1, *spec.inputs["tokens"].shape),
                    "timestep": torch.empty(1),
                    "labels": torch.empty(1, dtype=torch.int64),
                }
            with_it, without = (counted(part, given, each) for each in (side | own, side))
            found.append(with_it - without)
    products = {"mlp": 1152 * 2048 + 2048 * 2048 + 2048 * 768, "conv": 9 * 1152 * 768}
    assert found == [0, 6 * 256 * products[projector], 0]
    share = sum(found) / whole
    print(f"{projector}: {sum(found) / 1e9:.2f} of {whole / 1e9:.2f} GFLOP, {share:.2%}")
    assert share < 0.04


DIT = DiTConfig(
    hidden_size=8,
    num_layers=2,
    num_heads=2,
    patch_size=2,
    latent_size=4,
    in_channels=1,
    num_classes=2,
)


JOINT = JointDiTConfig(
    hidden_size=12,
    num_layers=2,
    num_heads=2,
    patch_size=2,
    latent_size=(4, 4),
    in_channels=1,
    text_tokens=4,
    text_dim=3,
    reference_tokens=True,
)


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        (
            {"block": 3, "dim": 4},
            "[repa] block=3, but [model] has 2 blocks. Set a number from 1 to 2.",
        ),
        (
            {"block": 2},
            "[repa] block=2 without dim. Set dim, the elements of a token's features, as `data "
            "encode --features` prints them.",
        ),
    ],
)
def test_a_block_that_is_not_there_or_no_dim_is_one_line(keys, wanted):
    assert refused(lambda: with_alignment(DIT.spec(), RepaConfig(**keys), (2, 2))) == wanted


def test_a_network_without_a_picture_s_tokens_is_one_line():
    spec, config = DIT.spec(), RepaConfig(block=1, dim=4)
    message = refused(lambda: with_alignment(spec, config, (2, 1)))
    assert message.startswith("[repa] block=1: [model] has 4 tokens for 2 x 1 of the picture")
    message = refused(lambda: with_alignment(JOINT.spec(), config, (2, 2)))
    assert message.startswith("[repa] block=1 with [model] reference_tokens=true: blocks hold the")
    other = replace(spec, stream={"x": spec.stream["tokens"]})
    message = refused(lambda: with_alignment(other, config, (2, 2)))
    assert message.startswith("[repa] block=1: the stream of [model] is x, without tokens.")


def test_the_projector_has_no_adapters():
    with torch.device("meta"):
        network = with_alignment(DIT.spec(), RepaConfig(block=1, dim=4), (2, 2)).build()
    names = adapted_layers(network, ["*"])
    assert "blocks.0.attn.qkv" in names
    assert not [name for name in names if name.startswith("objective.")]


def test_keys_without_a_block_are_one_line():
    message = refused(lambda: RepaConfig(weight=1.0))
    assert message == "[repa] block is not set: nothing is aligned. Set it, such as block = 8."
