"""Z-Image, FLUX.2 and Wan against diffusers' own classes: predictions and gradients, both ways."""

import pytest
import torch
import torch.nn.functional as F

from titan_dit.interop import diffusers_flux2, diffusers_wan, diffusers_z_image, tensor_layouts
from titan_dit.models.flux2_config import Flux2Config
from titan_dit.models.wan_config import WanConfig
from titan_dit.models.z_image_config import ZImageConfig
from titan_dit.pictures.library import diffusers

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def library():
    return diffusers("the test")


def scrambled(module, std=0.2):
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator) * std
        parameter.data = noise + (1.0 if "norm" in name and parameter.ndim == 1 else 0.0)
    return module


def imported(config, layouts, theirs):
    """Our network with the weights of theirs."""
    model = config.build(config.in_channels)
    ours = tensor_layouts.to_ours(layouts, theirs.state_dict(), dict(model.named_parameters()))
    model.load_state_dict(dict(ours))
    return model


def assert_same_gradients(model, layouts, theirs):
    """The gradients of their weights, in our layouts, are ours."""
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    expected = tensor_layouts.to_ours(layouts, gradients, dict(model.named_parameters()))
    for name, parameter in model.named_parameters():
        assert largest_difference(parameter.grad, expected[name]) <= 1e-5, name


def largest_difference(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


def z_image(library):
    """Three heads of 16 channels, whose axes rotate by 8, 4 and 4; pictures of 5 x 3 tokens."""
    sizes = {"n_layers": 3, "n_refiner_layers": 2, "axes_dims": [8, 4, 4]}
    heads = {"dim": 48, "n_heads": 3, "n_kv_heads": 3, "cap_feat_dim": 20, "in_channels": 4}
    theirs = scrambled(library.ZImageTransformer2DModel(**sizes, **heads, axes_lens=[256, 32, 32]))
    config = ZImageConfig(
        hidden_size=48,
        num_layers=3,
        num_refiner_layers=2,
        num_heads=3,
        rope_axes=[8, 4, 4],
        in_channels=4,
        latent_size=[10, 6],
        text_dim=20,
        text_tokens=32,
    )
    return theirs, config


def flux2(library, guidance=None):
    """Three heads of 16 channels, whose axes rotate by 4 each, or of unequal ones."""
    axes = [4, 4, 4, 4] if guidance is None else [2, 6, 6, 2]
    theirs = scrambled(
        library.Flux2Transformer2DModel(
            num_layers=2,
            num_single_layers=3,
            attention_head_dim=16,
            num_attention_heads=3,
            in_channels=12,
            joint_attention_dim=20,
            axes_dims_rope=axes,
            guidance_embeds=guidance is not None,
        )
    )
    config = Flux2Config(
        hidden_size=48,
        num_double_layers=2,
        num_single_layers=3,
        num_heads=3,
        rope_axes=axes,
        in_channels=12,
        latent_size=[5, 3],
        text_dim=20,
        text_tokens=11,
        guidance=guidance,
    )
    return theirs, config


def wan(library):
    """Three heads of 16 channels, whose axes rotate by 8, 4 and 4; clips of 3 x 2 x 5 tokens."""
    # With larger weights attention saturates: its gradients are then differences of rounding.
    theirs = scrambled(
        library.WanTransformer3DModel(
            num_layers=3,
            num_attention_heads=3,
            attention_head_dim=16,
            in_channels=4,
            out_channels=4,
            text_dim=20,
            ffn_dim=60,
        ),
        std=0.15,
    )
    config = WanConfig(
        hidden_size=48,
        num_layers=3,
        num_heads=3,
        intermediate_size=60,
        in_channels=4,
        latent_frames=3,
        latent_size=[4, 10],
        text_dim=20,
        text_tokens=24,
    )
    return theirs, config


def drawn(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_z_image_in_groups_of_captions_is_diffusers_masked_batch(library):
    theirs, config = z_image(library)
    layouts = diffusers_z_image.layouts(config)
    model = imported(config, layouts, theirs)
    lengths, t = [9, 30, 40], torch.tensor([0.5, 0.037, 0.9])
    latents, captions = drawn(3, 4, 10, 6), [drawn(n, 20, seed=n) for n in lengths]
    found, weight = torch.empty_like(latents), drawn(3, 4, 10, 6, seed=2)
    expected = torch.stack(theirs(list(latents[:, :, None]), t, captions).sample)[:, :, 0]
    (expected * weight).sum().backward()
    for rows, tokens in (([0, 1], 32), ([2], 64)):
        group = config.with_text_tokens(tokens)
        inputs = {
            "tokens": group.tokenize(latents[rows]),
            "timestep": 1000 * t[rows],
            "text": torch.stack([F.pad(captions[r], (0, 0, 0, tokens - lengths[r])) for r in rows]),
            "text_length": torch.tensor([lengths[r] for r in rows]),
        }
        prediction = group.detokenize(model(inputs, group.static(CPU)))
        (prediction * weight[rows]).sum().backward()
        found[rows] = prediction.detach()
    assert largest_difference(found, expected) <= 1e-5
    assert_same_gradients(model, layouts, theirs)


@pytest.mark.parametrize("guidance", [None, 3.5])
def test_flux2_is_that_of_diffusers(library, guidance):
    theirs, config = flux2(library, guidance)
    layouts = diffusers_flux2.layouts(config)
    model = imported(config, layouts, theirs)
    latents, text, t = drawn(2, 12, 5, 3), drawn(2, 11, 20, seed=2), torch.tensor([0.3, 0.8])
    pipeline, weight = library.Flux2KleinPipeline, drawn(2, 15, 12, seed=3)
    expected = theirs(
        hidden_states=config.tokenize(latents),
        encoder_hidden_states=text,
        timestep=t,
        img_ids=pipeline._prepare_latent_ids(latents),
        txt_ids=pipeline._prepare_text_ids(text),
        guidance=None if guidance is None else torch.full((2,), guidance),
    ).sample
    (expected * weight).sum().backward()
    inputs = {"tokens": config.tokenize(latents), "timestep": 1000 * t, "text": text}
    found = model(inputs, config.static(CPU))
    (found * weight).sum().backward()
    assert largest_difference(found, expected) <= 1e-5
    assert_same_gradients(model, layouts, theirs)


@pytest.mark.parametrize("times", [(2,), (2, 30)], ids=["per sample", "per token"])
def test_wan_is_that_of_diffusers(library, times):
    theirs, config = wan(library)
    layouts = diffusers_wan.layouts(config)
    model = imported(config, layouts, theirs)
    latents, weight = drawn(2, 4, 3, 4, 10), drawn(2, 4, 3, 4, 10, seed=3)
    text, lengths = drawn(2, 24, 20, seed=2), torch.tensor([9, 4])
    timestep = 1000 * torch.rand(times, generator=torch.Generator().manual_seed(4))
    is_given = torch.arange(24) < lengths[:, None]
    expected = theirs(latents, timestep, text * is_given[..., None]).sample
    (expected * weight).sum().backward()
    inputs = {
        "tokens": config.tokenize(latents),
        "timestep": timestep,
        "text": text,
        "text_length": lengths,
    }
    found = config.detokenize(model(inputs, config.static(CPU)))
    (found * weight).sum().backward()
    assert largest_difference(found, expected) <= 1e-5
    assert_same_gradients(model, layouts, theirs)


def test_wans_text_is_attended_to_with_its_padding(library):
    theirs, config = wan(library)
    latents, time, text = drawn(2, 4, 3, 4, 10), torch.tensor([500.0, 37.0]), drawn(2, 9, 20)
    padded = F.pad(text, (0, 0, 0, 15))
    with torch.no_grad():
        whole, trimmed = (theirs(latents, time, given).sample for given in (padded, text))
        model = imported(config, diffusers_wan.layouts(config), theirs)
        inputs = {"tokens": config.tokenize(latents), "timestep": time, "text": padded}
        inputs["text_length"] = torch.tensor([9, 9])
        found = config.detokenize(model(inputs, config.static(CPU)))
    assert largest_difference(found, whole) <= 1e-5
    assert largest_difference(trimmed, whole) >= 1e-2


NETWORKS = pytest.mark.parametrize(
    ("build", "layouts_of"),
    [
        (z_image, diffusers_z_image.layouts),
        (flux2, diffusers_flux2.layouts),
        (lambda library: flux2(library, 3.5), diffusers_flux2.layouts),
        (wan, diffusers_wan.layouts),
    ],
    ids=["z_image", "flux2", "guided", "wan"],
)


@NETWORKS
def test_tensors_return_bit_by_bit(library, build, layouts_of):
    theirs, config = build(library)
    layouts = layouts_of(config)
    model = imported(config, layouts, theirs)
    back = dict(tensor_layouts.to_theirs(layouts, model.state_dict()))
    assert back.keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(back[name], tensor), name
    # And the other way round, from weights that are not theirs.
    scrambled(model)
    theirs.load_state_dict(dict(tensor_layouts.to_theirs(layouts, model.state_dict())))
    again = imported(config, layouts, theirs).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(again[name], tensor), name
