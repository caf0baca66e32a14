import math
import re

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from titan_dit.config.section import UserError
from titan_dit.models.dit_config import DiTConfig
from titan_dit.parallel.init import initialize

CPU = torch.device("cpu")
IMAGENET = {"latent_size": 32, "in_channels": 4, "num_classes": 1000}
TINY = {"latent_size": 8, "in_channels": 3, "num_classes": 5}
TINY_SHAPE = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "patch_size": 2}


def tiny(**changes):
    return DiTConfig(**{**TINY, **TINY_SHAPE, **changes})


def on_meta(config, output_channels):
    with torch.device("meta"):
        return config.build(output_channels)


def initial(config, output_channels, seed=0):
    model = on_meta(config, output_channels)
    initialize(model, model.initializers(), seed, CPU)
    return model


def scrambled(config, output_channels):
    """A network with random non-zero weights, so that every part matters."""
    torch.manual_seed(0)
    model = config.build(output_channels)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.15)
    return model


def inputs_for(config, batch=3):
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(batch, *config.sample_shape, generator=generator)
    timestep = 1000 * torch.rand(batch, generator=generator)
    labels = torch.tensor([2, -1, 4])[:batch]
    return latents, timestep, labels


def predict(model, latents, timestep, labels):
    config = model.config
    inputs = {"tokens": config.tokenize(latents), "timestep": timestep, "labels": labels}
    return config.detokenize(model(inputs, config.static(CPU)))


@pytest.mark.parametrize(
    ("size", "millions"),
    [
        ("S/2", 32.865),
        ("B/2", 130.316),
        ("L/2", 457.841),
        ("XL/2", 674.835),
        ("3B/2", 3036),
        ("7B/2", 7305),
    ],
)
def test_sizes_have_the_published_number_of_parameters(size, millions):
    model = on_meta(DiTConfig(size=size, **IMAGENET), 8)
    counted = sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6
    assert counted == pytest.approx(millions, abs=0.5 if millions > 1000 else 5e-4)


@pytest.mark.parametrize(("tokens", "gigaflops"), [(256, 711.719), (1024, 3147.191)])
def test_xl_2_takes_the_flops_that_the_design_names(tokens, gigaflops):
    model = on_meta(DiTConfig(size="XL/2", **IMAGENET), 8)
    assert model.flops_per_sample(tokens) / 1e9 == pytest.approx(gigaflops, abs=5e-4)


@pytest.mark.parametrize(
    "changes", [{}, {"mlp_ratio": 2.5, "num_layers": 3}, {"patch_size": 4, "num_heads": 2}]
)
@pytest.mark.parametrize("learned_sigma", [False, True])
def test_flops_are_what_torch_counts(learned_sigma, changes):
    config = tiny(**changes)
    # fp64: fp32 goes through an operator of oneDNN that torch does not count.
    model = scrambled(config, config.in_channels * (2 if learned_sigma else 1)).double()
    latents, timestep, labels = inputs_for(config)
    # Only the plain attention is made of matmuls that torch counts on a CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        predict(model, latents, timestep, labels).sum().backward()
    assert counter.get_total_flops() == 3 * model.flops_per_sample(config.token_shape[0])


def test_at_the_start_the_prediction_is_zero_and_every_block_the_identity():
    config = tiny(qk_norm=True)
    model = initial(config, 3)
    latents, timestep, labels = inputs_for(config)
    assert predict(model, latents, timestep, labels).abs().max() == 0
    stream = torch.randn(3, 16, 32), torch.randn(3, 32)
    for block in model.blocks.values():
        x, condition = block(stream, {})
        assert torch.equal(x, stream[0])
        assert torch.equal(condition, stream[1])


def test_every_weight_starts_as_in_the_original():
    config = tiny(hidden_size=128, qk_norm=True)
    state = {name: p.detach() for name, p in initial(config, 3).named_parameters()}
    for name, values in state.items():
        if name.endswith(".bias") or "modulation" in name or name.startswith("head.out"):
            assert values.abs().max() == 0, name
        elif "_norm" in name:
            assert (values == 1).all(), name
        elif name.startswith(("embed.timestep", "embed.label")):
            assert values.std().item() == pytest.approx(0.02, rel=0.1), name
            assert abs(values.mean().item()) < 0.004, name
        else:
            bound = math.sqrt(6 / sum(values.shape))
            assert 0.95 * bound < values.abs().max() <= bound, name
            assert values.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05), name


def test_initial_weights_depend_on_seed_and_name_alone():
    first, again, other = (initial(tiny(), 3, seed=seed) for seed in (0, 0, 1))
    deeper = initial(tiny(num_layers=3), 3)
    for name, values in first.state_dict().items():
        assert torch.equal(values, again.state_dict()[name])
        # Another block, as on another pipeline stage, does not change the others.
        assert torch.equal(values, deeper.state_dict()[name])
        if values.abs().max() > 0:
            assert not torch.equal(values, other.state_dict()[name])
    weights = first.blocks["0"].mlp.up.weight, first.blocks["1"].mlp.up.weight
    assert not torch.equal(*weights)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_there_is_a_law_for_every_parameter_and_buffer(qk_norm):
    model = on_meta(tiny(qk_norm=qk_norm), 3)
    assert set(model.initializers()) == set(model.state_dict())


@pytest.mark.parametrize("changes", [{}, {"patch_size": 4, "num_heads": 2}, {"in_channels": 1}])
def test_the_token_shape_is_that_of_its_tokens(changes):
    config = tiny(**changes)
    tokens = config.tokenize(torch.zeros(2, *config.sample_shape))
    assert tuple(tokens.shape[1:]) == config.token_shape


def test_a_negative_label_is_the_null_class():
    config = tiny()
    model = scrambled(config, 3)
    latents, timestep, _ = inputs_for(config)
    null, zero = (predict(model, latents, timestep, torch.full((3,), v)) for v in (-1, 0))
    assert torch.equal(predict(model, latents, timestep, torch.full((3,), -5)), null)
    assert (null - zero).abs().max() > 1e-3


def test_timestep_label_and_every_token_reach_every_token():
    config = tiny()
    model = scrambled(config, 3)
    latents, timestep, labels = inputs_for(config)
    latents.requires_grad_()
    predict(model, latents, timestep, labels)[0, :, 0, 0].sum().backward()
    assert (latents.grad[0].abs().sum(0) > 0).all()
    # Samples of a batch are independent.
    assert latents.grad[1:].abs().max() == 0


def test_a_sample_does_not_depend_on_its_batch():
    config = tiny()
    model = scrambled(config, 3)
    latents, timestep, labels = inputs_for(config)
    whole = predict(model, latents, timestep, labels)
    for i in range(3):
        alone = predict(model, latents[i : i + 1], timestep[i : i + 1], labels[i : i + 1])
        torch.testing.assert_close(alone[0], whole[i], rtol=1e-5, atol=1e-5)


def test_qk_norm_adds_its_weights_and_is_used():
    config = tiny(qk_norm=True)
    model = scrambled(config, 3)
    latents, timestep, labels = inputs_for(config)
    predict(model, latents, timestep, labels).square().sum().backward()
    for block in model.blocks.values():
        assert block.attn.q_norm.weight.shape == (8,)
        assert block.attn.q_norm.weight.grad.abs().max() > 0
        assert block.attn.k_norm.weight.grad.abs().max() > 0


def test_a_learned_sigma_comes_as_channels_behind_the_first():
    config = tiny()
    tokens = torch.randn(2, (config.latent_size // config.patch_size) ** 2, 4 * 6)
    latents = config.detokenize(tokens)
    assert latents.shape == (2, 6, 8, 8)
    mean, sigma = (part.flatten(-2) for part in tokens.unflatten(-1, (4, 6)).split(3, -1))
    assert torch.equal(config.detokenize(mean), latents[:, :3])
    assert torch.equal(config.detokenize(sigma), latents[:, 3:])


def test_a_size_is_short_for_its_numbers():
    named = DiTConfig(size="B/4", **IMAGENET)
    explicit = DiTConfig(hidden_size=768, num_layers=12, num_heads=12, patch_size=4, **IMAGENET)
    assert named.shape == explicit.shape == (768, 12, 12, 4)
    assert named.sample_shape == explicit.sample_shape
    assert named == DiTConfig(size="B/4", hidden_size=768, patch_size=4, **IMAGENET)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {**TINY_SHAPE, "num_heads": 5},
            ["hidden_size=32", "num_heads=5", "num_heads = 4", "hidden_size = 40"],
        ),
        (
            {**TINY_SHAPE, "hidden_size": 30, "num_heads": 5},
            ["hidden_size=30", "multiple of 4", "hidden_size = 32"],
        ),
        ({**TINY_SHAPE, "patch_size": 3}, ["latent_size=8", "patch_size=3", "latent_size = 9"]),
        ({"size": "XXL/2"}, ['size="XXL/2"', "XL", "3B", "patch of 2, 4, 8"]),
        ({"size": "XL/3"}, ['size="XL/3"', "2, 4, 8"]),
        ({"size": "XL"}, ['size="XL"', "XL/2"]),
        ({"size": "S/2", "hidden_size": 64}, ["hidden_size=64", 'size="S/2"', "hidden_size=384"]),
        ({"size": "S/2", "patch_size": 4}, ["patch_size=4", 'size="S/2"', "patch_size=2"]),
        ({"hidden_size": 32, "num_heads": 4}, ["num_layers, patch_size missing", "size"]),
        ({}, ["hidden_size, num_layers, num_heads, patch_size missing", "size"]),
        ({**TINY_SHAPE, "num_layers": 0}, ["num_layers=0", "at least 1"]),
        ({**TINY_SHAPE, "mlp_ratio": 0}, ["mlp_ratio=0", "above 0"]),
    ],
)
def test_impossible_shapes_name_section_values_and_fix(values, words):
    with pytest.raises(UserError) as caught:
        DiTConfig(**TINY, **values)
    message = str(caught.value)
    assert message.startswith("[model] ")
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "changes",
    [
        {"num_heads": 5},
        {"num_heads": 30},
        {"num_heads": 7, "hidden_size": 100},
        {"patch_size": 3},
        {"patch_size": 16},
    ],
)
def test_every_fix_that_a_message_names_works(changes):
    with pytest.raises(UserError) as caught:
        tiny(**changes)
    fixes = re.findall(r"(\w+) = (\d+)", str(caught.value))
    assert fixes
    for key, value in fixes:
        assert tiny(**{**changes, key: int(value)}).ffn > 0
