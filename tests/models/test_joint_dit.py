import re

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from titan_dit.config.section import UserError
from titan_dit.models.joint_dit_config import JointDiTConfig
from titan_dit.models.layers import JoinedRotary, joined, parted, rotary_on_axes, rotate
from titan_dit.parallel.init import initialize

CPU = torch.device("cpu")
LATENTS = {"latent_size": 32, "in_channels": 16, "text_tokens": 128, "text_dim": 4096}
TINY = {"latent_size": [8, 12], "in_channels": 3, "text_tokens": 6, "text_dim": 10}
TINY_SHAPE = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "patch_size": 2}


def tiny(**changes):
    return JointDiTConfig(**{**TINY, **TINY_SHAPE, **changes})


def on_meta(config, output_channels=None):
    with torch.device("meta"):
        return config.build(output_channels or config.in_channels)


def initial(config, seed=0):
    model = on_meta(config)
    initialize(model, model.initializers(), seed, CPU)
    return model


def scrambled(config, output_channels=None):
    """A network with random non-zero weights, so that every part matters."""
    torch.manual_seed(0)
    model = config.build(output_channels or config.in_channels)
    for name, parameter in model.named_parameters():
        mean, std = float(name.endswith("norm.weight")), parameter.shape[-1] ** -0.5
        nn.init.normal_(parameter, mean, std if parameter.ndim > 1 else 0.3)
    return model


def inputs_for(config, batch=3):
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(batch, *config.sample_shape, generator=generator)
    lengths = torch.tensor([2, config.text_tokens, 0])[:batch]
    text = torch.randn(batch, config.text_tokens, config.text_dim, generator=generator)
    is_real = torch.arange(config.text_tokens) < lengths[:, None]
    return {
        "tokens": config.tokenize(latents),
        "timestep": 1000 * torch.rand(batch, generator=generator),
        "text": text * is_real[..., None],
        "text_length": lengths,
    }


def predict(model, inputs):
    return model(inputs, model.config.static(CPU))


def only(inputs, rows):
    return {name: tensor[rows] for name, tensor in inputs.items()}


@pytest.mark.parametrize(
    ("size", "millions"),
    [("S/2", 24.3), ("B/2", 93.8), ("L/2", 317.8), ("XL/2", 707.8), ("2B/2", 2071.2)],
)
def test_sizes_have_the_parameters_that_their_key_names(size, millions):
    config = JointDiTConfig(size=size, **LATENTS)
    counted = sum(p.numel() for p in on_meta(config).parameters()) / 1e6
    assert counted == pytest.approx(millions, abs=0.05)
    assert config.spec().head_dim in (64, 128)


@pytest.mark.parametrize(
    "changes",
    [{}, {"intermediate_size": 40, "num_layers": 3}, {"patch_size": 4, "latent_size": 8}],
)
@pytest.mark.parametrize("learned_sigma", [False, True])
def test_flops_are_what_torch_counts(learned_sigma, changes):
    config = tiny(**changes)
    # fp64: fp32 goes through an operator of oneDNN that torch does not count.
    model = scrambled(config, config.in_channels * (2 if learned_sigma else 1)).double()
    # Only the plain attention is made of matmuls that torch counts on a CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        predict(model, inputs_for(config)).sum().backward()
    spec = config.spec()
    assert spec.num_attended_tokens == spec.num_tokens + config.text_tokens
    assert counter.get_total_flops() == 3 * model.flops_per_sample(spec.num_attended_tokens)


def test_the_costs_of_the_ends_are_relative_to_a_block():
    config = tiny()
    spec, model = config.spec(), on_meta(config)
    flops = model.flops_per_sample(spec.num_attended_tokens)
    block = config.flops(3, config.text_tokens, spec.num_tokens)["block"]
    assert (spec.embed_cost + spec.head_cost + 2) * block == pytest.approx(flops)


def test_at_the_start_the_prediction_is_zero_and_every_block_the_identity():
    config = tiny()
    model = initial(config)
    assert predict(model, inputs_for(config)).abs().max() == 0
    stream = torch.randn(3, 24, 32), torch.randn(3, 6, 32), torch.zeros(3, 8 * 32)
    for block in model.blocks.values():
        for found, given in zip(block(stream, config.static(CPU)), stream, strict=True):
            assert torch.equal(found, given)


def test_every_weight_starts_as_in_a_dit():
    config = tiny(hidden_size=128)
    for name, values in initial(config).named_parameters():
        if name.endswith("norm.weight"):
            assert (values == 1).all(), name
        elif name.endswith(".bias") or ".modulation." in name or name.startswith("head.out"):
            assert values.abs().max() == 0, name
        elif name.startswith("embed.timestep") or name.endswith("padding"):
            assert values.std().item() == pytest.approx(0.02, rel=0.15), name
        else:
            fan_out, fan_in = values.shape
            bound = (6 / (fan_in + fan_out)) ** 0.5
            assert 0.95 * bound < values.abs().max() <= bound, name


def test_every_parameter_has_a_gradient():
    model = scrambled(tiny())
    predict(model, inputs_for(model.config)).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, name


def test_samples_do_not_depend_on_each_other_nor_on_their_order():
    config = tiny()
    model, inputs = scrambled(config), inputs_for(config)
    whole = predict(model, inputs)
    assert whole.shape == (3, *config.token_shape)
    order = torch.tensor([2, 0, 1])
    torch.testing.assert_close(predict(model, only(inputs, order)), whole[order])
    for i in range(3):
        torch.testing.assert_close(predict(model, only(inputs, [i]))[0], whole[i])
    other = dict(inputs, text=inputs["text"].clone())
    other["text"][1] += 1
    changed = predict(model, other)
    torch.testing.assert_close(changed[[0, 2]], whole[[0, 2]])
    assert (changed[1] - whole[1]).abs().max() > 1e-2


def test_rows_of_text_beyond_its_length_do_not_matter_but_the_padding_token_does():
    config = tiny()
    model, inputs = scrambled(config), inputs_for(config)
    whole = predict(model, inputs)
    beyond = torch.arange(config.text_tokens) >= inputs["text_length"][:, None]
    noisy = dict(inputs, text=inputs["text"] + 7 * beyond[..., None])
    assert torch.equal(predict(model, noisy), whole)
    with torch.no_grad():
        model.embed.text.padding.normal_()
    changed = (predict(model, inputs) - whole).abs().amax((1, 2))
    assert changed[1] == 0  # Its caption has no padding.
    assert changed[0] > 1e-2
    assert changed[2] > 1e-2


def test_padding_is_a_token_like_any_other():
    """A caption padded by the model is one whose embeddings equal the learned token."""
    config = tiny()
    model, inputs = scrambled(config), inputs_for(config)
    side = config.static(CPU)
    tokens, text, modulation = model.embed(inputs, side)
    assert torch.equal(text[2], model.embed.text.padding.expand(6, -1))
    stream = tokens, text[[1, 1, 1]], modulation
    stream[1][2] = model.embed.text.padding
    for block in model.blocks.values():
        stream = block(stream, side)
    torch.testing.assert_close(model.head(stream, side)[2], predict(model, inputs)[2])


def test_the_place_of_a_word_matters():
    config = tiny()
    model, inputs = scrambled(config), inputs_for(config)
    turned = dict(inputs, text=inputs["text"].flip(1), text_length=torch.full((3,), 6))
    straight = dict(inputs, text_length=torch.full((3,), 6))
    assert (predict(model, turned) - predict(model, straight)).abs().max() > 1e-2


def test_positions_count_words_rows_and_columns():
    config = tiny(latent_size=[4, 6], text_tokens=3)
    text, image, reference = config.positions(CPU)
    assert (reference - image).tolist() == [[1, 0, 0]] * len(image)
    assert text.tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 0]]
    assert image.tolist() == [[3, row, column] for row in range(2) for column in range(3)]
    # In the order of the tokens: the second token is the second column of the first row.
    latents = torch.zeros(1, 3, 4, 6)
    latents[:, :, 0, 2] = 1
    assert config.tokenize(latents)[0].abs().sum(1).tolist() == [0, 3, 0, 0, 0, 0]
    assert config.static(CPU)["text_positions"].tolist() == [0, 1, 2]


def test_wide_and_tall_latents_return_from_tokens():
    for size in ([4, 10], [10, 4]):
        config = tiny(latent_size=size)
        latents = torch.randn(2, 3, *size)
        assert config.token_shape == (10, 12)
        assert torch.equal(config.detokenize(config.tokenize(latents)), latents)


def test_scores_depend_on_distances_on_every_axis():
    positions = torch.randint(50, (5, 3), generator=torch.Generator().manual_seed(0))
    shifted = positions + torch.tensor([4, 9, 2])
    channels = tiny(hidden_size=64).axes
    assert sum(channels) == 32

    def scores(positions):
        cos, sin = rotary_on_axes(positions, channels, 256.0).unbind(1)
        generator = torch.Generator().manual_seed(0)
        q, k = torch.randn(2, 1, 1, 5, 32, generator=generator)
        return rotate(q, (cos, sin)) @ rotate(k, (cos, sin)).mT

    torch.testing.assert_close(scores(shifted), scores(positions), rtol=1e-4, atol=1e-4)
    for axis in range(3):
        moved = positions.clone()
        moved[0, axis] += 3
        assert (scores(moved) - scores(positions)).abs().max() > 0.05


@pytest.mark.parametrize(
    ("head_dim", "axes"), [(6, (2, 2, 2)), (16, (4, 6, 6)), (64, (16, 24, 24)), (128, (32, 48, 48))]
)
def test_a_head_is_shared_out_among_three_axes(head_dim, axes):
    assert tiny(hidden_size=2 * head_dim).axes == axes


def test_joined_tokens_keep_their_memory_order_and_part_again():
    text, image = torch.randn(3, 2, 5), torch.randn(3, 4, 5)
    for first, second in ((text, image), (token_first(text), token_first(image))):
        x = joined(first, second)
        assert torch.equal(x, torch.cat((text, image), 1))
        assert x.stride() == ((30, 5, 1) if first is text else (5, 15, 1))
        for found, given in zip(parted(x, (2, 4)), (text, image), strict=True):
            assert torch.equal(found, given)


def token_first(x):
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def test_angles_follow_tokens_that_ranks_have_joined():
    text, image = torch.arange(4.0), 10 + torch.arange(6.0)
    rotary = JoinedRotary()
    angles = [x[:, None, None].expand(-1, 2, 1) for x in (text, image)]
    assert rotary(*angles)[0].flatten().tolist() == [*text, *image]
    rotary.shards = 2
    gathered = torch.cat(
        [joined_of for r in (0, 1) for joined_of in (text.chunk(2)[r], image.chunk(2)[r])]
    )
    assert rotary(*angles)[1].flatten().tolist() == gathered.tolist()


def test_modulation_stays_in_fp32_in_bf16():
    config = tiny()
    model, inputs = scrambled(config).to(torch.bfloat16), inputs_for(config)
    stream = model.embed(inputs, config.static(CPU))
    assert [tensor.dtype for tensor in stream] == [torch.bfloat16, torch.bfloat16, torch.float32]
    specs = config.spec().stream.values()
    assert [spec.dtype_under(torch.bfloat16) for spec in specs] == [t.dtype for t in stream]
    assert {spec.dtype_under(torch.float64) for spec in specs} == {torch.float64}
    assert predict(model, inputs).dtype == torch.bfloat16


def test_a_square_may_be_one_number():
    assert tiny(latent_size=8) == tiny(latent_size=[8]) == tiny(latent_size=(8, 8))
    assert tiny(latent_size=8).spec().num_tokens == 16
    assert JointDiTConfig(size="S/4", **LATENTS).grid == (8, 8)


def test_a_spec_tells_predicted_from_attended_tokens():
    spec = tiny().spec()
    assert (spec.num_tokens, spec.num_text_tokens, spec.num_attended_tokens) == (24, 6, 30)
    assert spec.tokens_shown == "24 tokens and 6 of text"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_heads": 3}, ["hidden_size=32", "num_heads=3", "hidden_size = 36"]),
        ({"num_heads": 8}, ["hidden_size=32", "at least 6", "hidden_size = 48"]),
        ({"patch_size": 5}, ["latent_size=[8, 12]", "patch_size=5", "latent_size = [10, 15]"]),
        ({"latent_size": [8, 8, 8]}, ["latent_size=[8, 8, 8]", "must be 2 numbers, or one"]),
        ({"latent_size": []}, ["latent_size=[]", "must be 2 numbers, or one"]),
        ({"latent_size": 0}, ["latent_size", "at least 1"]),
        ({"latent_size": True}, ["latent_size=true must be a list"]),
        ({"size": "XXL/2"}, ['size="XXL/2"', "2B", "patch of 1, 2, 4, 8"]),
        ({"text_tokens": 0}, ["text_tokens=0", "at least 1"]),
    ],
)
def test_impossible_shapes_name_section_values_and_fix(values, words):
    with pytest.raises(UserError) as caught:
        tiny(**values)
    message = str(caught.value)
    assert message.startswith("[model] ")
    for word in words:
        assert word in message


@pytest.mark.parametrize("changes", [{"num_heads": 3}, {"num_heads": 8}, {"num_heads": 30}])
def test_every_fix_that_a_message_names_works(changes):
    with pytest.raises(UserError) as caught:
        tiny(**changes)
    ((key, value),) = re.findall(r"(\w+) = (\d+)", str(caught.value))
    assert tiny(**{**changes, key: int(value)}).ffn > 0
