"""Z-Image, FLUX.2 and Wan by themselves; tests/interop compares them with diffusers."""

import re
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from titan_dit.config.section import UserError
from titan_dit.models.base import kind_of
from titan_dit.models.flux2_config import Flux2Config
from titan_dit.models.layers import rotate
from titan_dit.models.wan_config import WanConfig
from titan_dit.models.z_image_config import ZImageConfig
from titan_dit.parallel.init import initialize

CPU = torch.device("cpu")
Z_IMAGE = {
    "hidden_size": 36,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "num_heads": 3,
    "latent_size": [6, 10],
    "in_channels": 3,
    "text_tokens": 32,
    "text_dim": 10,
}
FLUX2 = {
    "hidden_size": 48,
    "num_double_layers": 2,
    "num_single_layers": 2,
    "num_heads": 3,
    "latent_size": [3, 5],
    "in_channels": 12,
    "text_tokens": 7,
    "text_dim": 10,
}


WAN = {
    "hidden_size": 48,
    "num_layers": 2,
    "num_heads": 3,
    "intermediate_size": 60,
    "latent_frames": 3,
    "latent_size": [4, 10],
    "in_channels": 3,
    "text_tokens": 7,
    "text_dim": 10,
}


def z_image(**changes):
    return ZImageConfig(**{**Z_IMAGE, **changes})


def flux2(**changes):
    return Flux2Config(**{**FLUX2, **changes})


def wan(**changes):
    return WanConfig(**{**WAN, **changes})


NETWORKS = pytest.mark.parametrize(
    "config",
    [z_image(), flux2(), flux2(guidance=4.0), wan()],
    ids=["z_image", "flux2", "guided", "wan"],
)


def on_meta(config):
    with torch.device("meta"):
        return config.build(config.in_channels)


def scrambled(config, output_channels=None):
    """A network with random weights, so that every part matters."""
    torch.manual_seed(0)
    model = config.build(output_channels or config.in_channels)
    for name, parameter in model.named_parameters():
        is_norm = name.endswith(("norm.weight", "norm.q", "norm.k"))
        mean, std = float(is_norm), parameter.shape[-1] ** -0.5
        torch.nn.init.normal_(parameter, mean, std if parameter.ndim > 1 else 0.3)
    return model


def inputs_for(config, batch=3):
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(batch, *config.sample_shape, generator=generator)
    return {
        "tokens": config.tokenize(latents),
        "timestep": 1000 * torch.rand(batch, generator=generator),
        "text": torch.randn(batch, config.text_tokens, config.text_dim, generator=generator),
        "text_length": torch.tensor([2, config.text_tokens, 0])[:batch],
    }


def predict(model, inputs, config=None):
    return model(inputs, (config or model.config).static(CPU))


def test_sizes_have_the_parameters_that_their_key_names():
    z = ZImageConfig(size="6B", latent_size=128, text_tokens=512)
    f = Flux2Config(size="klein-4B", latent_size=64)
    clips = {"latent_frames": 21, "latent_size": [60, 104]}
    small, large = (WanConfig(size=size, **clips) for size in ("1.3B", "14B"))
    counted = [
        sum(p.numel() for p in on_meta(config).parameters()) for config in (z, f, small, large)
    ]
    assert counted == [6_154_908_736, 3_875_544_576, 1_418_996_800, 14_288_491_584]
    assert (z.axes, z.ffn, z.kinds[:5]) == (
        (32, 48, 48),
        10240,
        ("refine_text",) * 2 + ("refine_image",) * 2 + ("joint",),
    )
    assert (f.axes, f.ffn, f.kinds) == (
        (32, 32, 32, 32),
        9216,
        ("double",) * 5 + ("single",) * 20,
    )
    assert (small.axes, large.axes, large.token_shape) == ((44, 42, 42),) * 2 + ((32760, 64),)


def counted(part, *given):
    """FLOPs of the forward and backward of a part of a network, and its output."""
    # Only the plain attention is made of matmuls that torch counts on a CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        out = part(*given)
        sum(tensor.sum() for tensor in (out if isinstance(out, tuple) else (out,))).backward()
    return counter.get_total_flops(), out


@NETWORKS
def test_flops_of_every_part_are_what_torch_counts(config):
    # fp64: fp32 goes through an operator of oneDNN that torch does not count.
    model, static, batch = scrambled(config).double(), config.static(CPU), 3
    spec = config.spec()
    parts = config.flops(config.in_channels, config.text_tokens, spec.num_tokens)
    flops, stream = counted(model.embed, inputs_for(config, batch), static)
    assert flops == batch * parts["embed"]
    stream = tuple(tensor.detach().requires_grad_() for tensor in stream)
    for block in model.blocks.values():
        kind = kind_of(block) or "block"
        assert counted(block, stream, static)[0] == batch * parts[kind], kind
    assert counted(model.head, stream, static)[0] == batch * parts["head"]
    flops, _ = counted(model, inputs_for(config, batch), static)
    assert flops == batch * model.flops_per_sample(spec.num_attended_tokens)


@NETWORKS
def test_costs_of_kinds_and_ends_are_in_one_unit(config):
    spec, model = config.spec(), on_meta(config)
    kinds = [kind_of(block) for block in model.blocks.values()]
    assert tuple(kinds) == spec.kinds
    assert set(spec.kind_costs) == set(spec.layer_kinds)
    flops = config.flops(config.in_channels, config.text_tokens, spec.num_tokens)
    unit = flops[kinds[-1] or "block"]
    total = spec.cost(range(len(kinds)))
    assert total * unit == pytest.approx(model.flops_per_sample(spec.num_attended_tokens))


@NETWORKS
def test_at_the_start_the_prediction_is_zero_and_modulated_blocks_are_the_identity(config):
    model = on_meta(config)
    initialize(model, model.initializers(), 0, CPU)
    assert predict(model, inputs_for(config)).abs().max() == 0
    stream = model.embed(inputs_for(config), config.static(CPU))
    for block in model.blocks.values():
        found = block(stream, config.static(CPU))
        is_same = [torch.equal(a, b) for a, b in zip(found, stream, strict=True)]
        # Cross-attention and refiners of the caption are not gated.
        kind = kind_of(block)
        assert is_same == [bool(kind), kind != "refine_text", True]


@NETWORKS
def test_every_parameter_has_a_gradient(config):
    model = scrambled(config)
    predict(model, inputs_for(config)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, name


@NETWORKS
def test_samples_do_not_depend_on_each_other(config):
    model, inputs = scrambled(config), inputs_for(config)
    whole = predict(model, inputs)
    assert whole.shape == (3, *config.token_shape)
    for i in range(3):
        alone = predict(model, {name: tensor[[i]] for name, tensor in inputs.items()})
        torch.testing.assert_close(alone[0], whole[i])


@NETWORKS
def test_the_condition_stays_in_fp32_in_bf16(config):
    model = scrambled(config).to(torch.bfloat16)
    stream = model.embed(inputs_for(config), config.static(CPU))
    text = torch.float32 if config.name == "wan" else torch.bfloat16
    assert [tensor.dtype for tensor in stream] == [torch.bfloat16, text, torch.float32]
    specs = config.spec().stream.values()
    assert [spec.dtype_under(torch.bfloat16) for spec in specs] == [t.dtype for t in stream]
    assert predict(model, inputs_for(config)).dtype == torch.bfloat16


@NETWORKS
def test_specs_name_what_the_network_takes_and_makes(config):
    spec, model = config.spec(), scrambled(config)
    static, inputs = config.static(CPU), inputs_for(config)
    stream = model.embed(inputs, static)
    found = {name: (tuple(t.shape), t.dtype) for name, t in static.items()}
    assert {name: (each.shape, each.dtype) for name, each in spec.static.items()} == found
    assert [each.shape for each in spec.stream.values()] == [tuple(t.shape[1:]) for t in stream]
    assert spec.inputs["tokens"].shape == tuple(inputs["tokens"].shape[1:])


def test_wans_text_beyond_its_length_is_zero_and_attended_to():
    config = wan()
    model, inputs = scrambled(config), inputs_for(config)
    whole = predict(model, inputs)
    beyond = torch.arange(config.text_tokens) >= inputs["text_length"][:, None]
    noisy = dict(inputs, text=inputs["text"] + 7 * beyond[..., None])
    assert torch.equal(predict(model, noisy), whole)
    zeros = dict(inputs, text=inputs["text"] * ~beyond[..., None])
    longer = dict(zeros, text_length=torch.full((3,), config.text_tokens))
    assert torch.equal(predict(model, longer), whole)
    # Two tokens alone, without the five zeros behind them.
    trimmed = {name: tensor[:1] for name, tensor in inputs.items()}
    trimmed["text"] = trimmed["text"][:, :2]
    assert (predict(model, trimmed) - whole[:1]).abs().max() > 1e-2


def test_a_time_of_every_token_may_be_the_same_one():
    config = wan()
    model, inputs = scrambled(config), inputs_for(config)
    whole = predict(model, inputs)
    each = dict(inputs, timestep=inputs["timestep"][:, None].expand(-1, config.token_shape[0]))
    torch.testing.assert_close(predict(model, each), whole)
    each["timestep"] = each["timestep"].clone()
    each["timestep"][:, -1] += 100
    assert (predict(model, each) - whole)[:, -1].abs().max() > 1e-3


def test_tokens_of_a_clip_go_frame_by_frame_and_row_by_row():
    config = wan()
    latents = torch.randn(2, 3, 3, 4, 10)
    tokens = config.tokenize(latents)
    assert torch.equal(config.detokenize(tokens), latents)
    # A token of frame 1, row 1, column 3 holds the patch as (row, column, channel).
    patch = latents[0, :, 1, 2:4, 6:8].permute(1, 2, 0)
    assert torch.equal(tokens[0, 10 + 5 + 3], patch.flatten())
    assert config.positions(CPU)[10 + 5 + 3].tolist() == [1, 1, 3]
    picture = config.at_size(1, 4, 10)
    assert picture.sample_shape == (3, 1, 4, 10)
    assert torch.equal(picture.tokenize(latents[:, :, :1]), tokens[:, :10])


def test_z_images_text_beyond_its_length_does_not_matter_but_the_padding_token_does():
    config = z_image()
    model, inputs = scrambled(config), inputs_for(config)
    whole = predict(model, inputs)
    beyond = torch.arange(config.text_tokens) >= inputs["text_length"][:, None]
    noisy = dict(inputs, text=inputs["text"] + 7 * beyond[..., None])
    assert torch.equal(predict(model, noisy), whole)
    with torch.no_grad():
        model.embed.text.padding.normal_()
    changed = (predict(model, inputs) - whole).abs().amax((1, 2))
    assert changed[1] == 0  # Its caption has no padding.
    assert changed[[0, 2]].min() > 1e-2


def test_all_of_flux2s_text_is_attended_to():
    model, inputs = scrambled(flux2()), inputs_for(flux2())
    whole = predict(model, inputs)
    longer = dict(inputs, text_length=torch.full((3,), 7))
    assert torch.equal(predict(model, longer), whole)
    last = dict(inputs, text=inputs["text"].clone())
    last["text"][:, -1] += 1
    assert (predict(model, last) - whole).abs().amax((1, 2)).min() > 1e-2


def test_z_images_pictures_are_padded_with_a_learned_token_at_the_origin():
    config = z_image()  # 3 x 5 tokens.
    assert (config.num_real_tokens, config.token_shape) == (15, (32, 12))
    latents = torch.randn(2, 3, 6, 10)
    tokens = config.tokenize(latents)
    assert tokens.shape == (2, 32, 12)
    assert tokens[:, 15:].abs().max() == 0
    assert torch.equal(config.detokenize(tokens), latents)
    model, inputs = scrambled(config), inputs_for(config)
    whole = predict(model, inputs)[:, :15]
    noisy = dict(inputs, tokens=inputs["tokens"].clone())
    noisy["tokens"][:, 15:] = 5
    assert torch.equal(predict(model, noisy)[:, :15], whole)
    with torch.no_grad():
        model.embed.patch.padding.normal_()
    assert (predict(model, inputs)[:, :15] - whole).abs().max() > 1e-2
    _, image = config.positions(CPU)
    assert image[15:].abs().max() == 0


def test_z_images_positions_count_words_from_one_then_rows_and_columns():
    config = z_image(latent_size=[4, 6])
    text, image = config.positions(CPU)
    assert text.tolist() == [[i, 0, 0] for i in range(1, 33)]
    assert image[:6].tolist() == [[33, row, column] for row in range(2) for column in range(3)]
    longer, _ = config.with_text_tokens(64).positions(CPU)
    assert longer[-1].tolist() == [64, 0, 0]
    assert config.static(CPU)["text_positions"].tolist() == list(range(32))


def test_flux2s_positions_count_words_on_an_axis_of_their_own():
    text, image, reference = flux2(latent_size=[2, 3], text_tokens=4).positions(CPU)
    assert (reference - image).tolist() == [[10, 0, 0, 0]] * 6
    assert text.tolist() == [[0, 0, 0, i] for i in range(4)]
    assert image.tolist() == [[0, row, column, 0] for row in range(2) for column in range(3)]


def test_other_sizes_and_captions_have_the_same_parameters():
    shapes = {name: p.shape for name, p in on_meta(z_image()).named_parameters()}
    for other in (z_image().at_size(8, 4), z_image().with_text_tokens(96)):
        assert {name: p.shape for name, p in on_meta(other).named_parameters()} == shapes
        model = scrambled(z_image())
        assert predict(model, inputs_for(other), other).shape == (3, *other.token_shape)


def test_neighbouring_channels_turn_as_a_complex_number():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 5, 8, generator=generator)
    angles = torch.randn(5, 4, generator=generator)
    found = rotate(x, (angles.cos(), angles.sin()), "neighbours")
    numbers = torch.view_as_complex(x.reshape(2, 3, 5, 4, 2))
    turned = numbers * torch.polar(torch.ones(5, 4), angles)
    torch.testing.assert_close(found, torch.view_as_real(turned).flatten(3))
    # The other pairs are the same turn of channels in another order.
    halves = torch.cat((x[..., ::2], x[..., 1::2]), -1)
    other = rotate(halves, (angles.cos(), angles.sin()))
    torch.testing.assert_close(torch.stack(other.chunk(2, -1), -1).flatten(3), found)


def test_guidance_is_a_value_of_the_run():
    model, inputs = scrambled(flux2(guidance=4.0)), inputs_for(flux2())
    whole = predict(model, inputs)
    other = flux2(guidance=1.0).build(12)
    other.load_state_dict(model.state_dict())
    assert (predict(other, inputs) - whole).abs().max() > 1e-3
    names = {name for name, _ in flux2().build(12).named_parameters()}
    assert set(model.state_dict()) - names == {
        "embed.guidance.up.weight",
        "embed.guidance.down.weight",
    }


IMPOSSIBLE = [
    (z_image, {"text_tokens": 40}, ["text_tokens=40", "text_tokens = 64"]),
    (z_image, {"latent_size": [5, 4]}, ["latent_size=[5, 4]", "latent_size = [6, 4]"]),
    (z_image, {"rope_axes": [4, 4]}, ["rope_axes=[4, 4]", "3 even numbers"]),
    (z_image, {"num_heads": 5}, ["num_heads=5", "add up"]),
    (z_image, {"num_layers": None}, ["num_layers missing", 'size = "6B"']),
    (z_image, {"size": "7B"}, ['size="7B"', "6B", "num_refiner_layers"]),
    (flux2, {"rope_axes": [2, 2, 2, 10, 2]}, ["rope_axes=[2, 2, 2, 10, 2]", "4 even numbers"]),
    (
        flux2,
        {"rope_axes": [3, 5, 4, 4]},
        ["rope_axes=[3, 5, 4, 4]", "Set rope_axes = [4, 4, 4, 4]."],
    ),
    (flux2, {"num_heads": 8}, ["num_heads=8", "hidden_size = 64", "rope_axes = [2, 2, 2, 2]"]),
    (flux2, {"size": "klein-4B"}, ["hidden_size=48", "disagrees"]),
    (wan, {"latent_frames": 0}, ["latent_frames=0", "at least 1"]),
    (wan, {"latent_size": [5, 4]}, ["latent_size=[5, 4]", "latent_size = [6, 4]"]),
    (wan, {"rope_axes": [8, 8]}, ["rope_axes=[8, 8]", "3 even numbers"]),
    (wan, {"num_heads": 5}, ["num_heads=5", "add up"]),
    (wan, {"intermediate_size": None}, ["intermediate_size missing", 'size = "1.3B"']),
    (wan, {"size": "1.3B"}, ["hidden_size=48", "disagrees"]),
    (flux2, {"guidance": -1.0}, ["guidance=-1.0", "at least 0"]),
    (flux2, {"mlp_ratio": 0.0}, ["mlp_ratio=0.0", "above 0"]),
]


@pytest.mark.parametrize(("build", "values", "words"), IMPOSSIBLE)
def test_impossible_shapes_name_section_values_and_fix(build, values, words):
    with pytest.raises(UserError) as caught:
        build(**values)
    message = str(caught.value)
    assert message.startswith("[model] ")
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("build", "values"),
    [
        (z_image, {"num_heads": 5}),
        (flux2, {"num_heads": 8}),
        (flux2, {"num_heads": 5}),
        (wan, {"num_heads": 5}),
        (wan, {"rope_axes": [44, 42]}),
        (z_image, {"rope_axes": [3, 5, 8]}),
    ],
)
def test_every_fix_that_a_message_names_works(build, values):
    with pytest.raises(UserError) as caught:
        build(**values)
    text = str(caught.value)
    hidden = int(re.search(r".*hidden_size ?= ?(\d+)", text)[1])
    axes = [int(n) for n in re.search(r"rope_axes = \[([\d, ]+)\]", text)[1].split(",")]
    fixed = build(**{**values, "hidden_size": hidden, "rope_axes": axes})
    assert replace(fixed).axes == tuple(axes)
