import math
import re

import pytest
import torch
import torch.nn.functional as F
from test_layers import original_positions
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from titan_dit.config import UserError
from titan_dit.models import dit, layers
from titan_dit.models.dit import DiTConfig
from titan_dit.parallel.init import initialize

CPU = torch.device("cpu")
IMAGENET = {"latent_size": 32, "channels": 4, "num_classes": 1000}
TINY = {"latent_size": 8, "channels": 3, "num_classes": 5}
TINY_SHAPE = {"hidden": 32, "layers": 2, "heads": 4, "patch": 2}


def tiny(**changes):
    return DiTConfig(**{**TINY, **TINY_SHAPE, **changes})


def on_meta(config, output_channels):
    with torch.device("meta"):
        return config.build(output_channels)


def initial(config, output_channels, seed=0):
    model = on_meta(config, output_channels)
    initialize(model, model.init_laws(), seed, CPU)
    return model


def scrambled(config, output_channels):
    """A network with weights that let every part of it have its say."""
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


@pytest.mark.parametrize("changes", [{}, {"mlp_ratio": 2.5, "layers": 3}, {"patch": 4, "heads": 2}])
@pytest.mark.parametrize("learned_sigma", [False, True])
def test_flops_are_what_torch_counts(learned_sigma, changes):
    config = tiny(**changes)
    # fp64: fp32 goes through an operator of oneDNN that torch does not count.
    model = scrambled(config, config.channels * (2 if learned_sigma else 1)).double()
    latents, timestep, labels = inputs_for(config)
    # Only the plain attention is made of matmuls that torch counts on a CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        predict(model, latents, timestep, labels).sum().backward()
    assert counter.get_total_flops() == 3 * model.flops_per_sample(
        (config.latent_size // config.patch) ** 2
    )


class OriginalBlock(nn.Module):
    """DiTBlock of facebookresearch/DiT with timm's attention, written from its description."""

    def __init__(self, hidden, heads, ffn):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.fc1, self.fc2 = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 6 * hidden))

    def attention(self, x):
        b, n, d = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        weights = (q * (d // self.heads) ** -0.5 @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, d))

    def forward(self, x, c):
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(
            c
        ).chunk(6, dim=1)
        x = x + gate_msa.unsqueeze(1) * self.attention(original_modulate(x, shift_msa, scale_msa))
        y = self.fc1(original_modulate(x, shift_mlp, scale_mlp))
        return x + gate_mlp.unsqueeze(1) * self.fc2(F.gelu(y, approximate="tanh"))


def original_modulate(x, shift, scale):
    normed = (x - x.mean(-1, keepdim=True)) / (
        x.var(-1, keepdim=True, unbiased=False) + 1e-6
    ).sqrt()
    return normed * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class OriginalDiT(nn.Module):
    """The network as the paper's code lays it out: latents in, latents out."""

    def __init__(self, size, patch, channels, out_channels, hidden, depth, heads, classes):
        super().__init__()
        self.patch, self.out_channels = patch, out_channels
        self.x_embedder = nn.Conv2d(channels, hidden, kernel_size=patch, stride=patch)
        self.t_mlp = nn.Sequential(nn.Linear(256, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.y_embedding = nn.Embedding(classes + 1, hidden)
        self.register_buffer("pos_embed", original_positions(size // patch, hidden).float())
        self.blocks = nn.ModuleList(OriginalBlock(hidden, heads, 4 * hidden) for _ in range(depth))
        self.final_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 2 * hidden))
        self.final_linear = nn.Linear(hidden, patch * patch * out_channels)

    def timestep_embedding(self, t):
        freqs = torch.exp(-math.log(10000) * torch.arange(128, dtype=torch.float32) / 128)
        args = t[:, None].float() * freqs[None]
        return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)

    def forward(self, x, t, y):
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        y = torch.where(y < 0, torch.full_like(y, self.y_embedding.num_embeddings - 1), y)
        c = self.t_mlp(self.timestep_embedding(t)) + self.y_embedding(y)
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.final_modulation(c).chunk(2, dim=1)
        x = self.final_linear(original_modulate(x, shift, scale))
        side, p = math.isqrt(x.shape[1]), self.patch
        x = x.reshape(x.shape[0], side, side, p, p, self.out_channels)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(x.shape[0], -1, side * p, side * p)


def as_ours(original, pick):
    """{our name: the original's tensor in our layout}; `pick` takes a weight or its gradient."""
    conv = pick(original.x_embedder.weight)
    ours = {
        # [out, c, p, p] to [out, (p, p, c)]
        "embed.patch.weight": conv.permute(0, 2, 3, 1).flatten(1),
        "embed.patch.bias": pick(original.x_embedder.bias),
        "embed.timestep.up.weight": pick(original.t_mlp[0].weight),
        "embed.timestep.up.bias": pick(original.t_mlp[0].bias),
        "embed.timestep.down.weight": pick(original.t_mlp[2].weight),
        "embed.timestep.down.bias": pick(original.t_mlp[2].bias),
        "embed.label.table.weight": pick(original.y_embedding.weight),
        "head.modulation.weight": pick(original.final_modulation[1].weight),
        "head.modulation.bias": pick(original.final_modulation[1].bias),
        "head.out.weight": pick(original.final_linear.weight),
        "head.out.bias": pick(original.final_linear.bias),
    }
    for i, block in enumerate(original.blocks):
        for kind in ("weight", "bias"):
            # Rows [3, heads, head_dim] to [heads, 3, head_dim].
            rows = pick(getattr(block.qkv, kind)).unflatten(0, (3, block.heads, -1))
            ours[f"blocks.{i}.attn.qkv.{kind}"] = rows.transpose(0, 1).flatten(0, 2)
            ours[f"blocks.{i}.attn.out.{kind}"] = pick(getattr(block.proj, kind))
            ours[f"blocks.{i}.mlp.up.{kind}"] = pick(getattr(block.fc1, kind))
            ours[f"blocks.{i}.mlp.down.{kind}"] = pick(getattr(block.fc2, kind))
            modulation = block.adaLN_modulation[1]
            ours[f"blocks.{i}.modulation.{kind}"] = pick(getattr(modulation, kind))
    return ours


def compare_with_the_original(learned_sigma):
    """The largest difference of the predictions, and of the gradients."""
    config = tiny()
    out_channels = config.channels * (2 if learned_sigma else 1)
    torch.manual_seed(0)
    original = OriginalDiT(8, 2, 3, out_channels, hidden=32, depth=2, heads=4, classes=5)
    for parameter in original.parameters():
        nn.init.normal_(parameter, std=0.15)
    model = config.build(out_channels)
    model.load_state_dict(as_ours(original, lambda p: p.detach()))
    latents, timestep, labels = inputs_for(config)
    expected = original(latents, timestep, labels)
    prediction = predict(model, latents, timestep, labels)
    assert prediction.shape == expected.shape == (3, out_channels, 8, 8)
    direction = torch.randn_like(expected) / expected.numel() ** 0.5
    (expected * direction).sum().backward()
    (prediction * direction).sum().backward()
    gradients = as_ours(original, lambda p: p.grad)
    assert all(gradient.abs().max() > 1e-4 for gradient in gradients.values())
    return (
        (prediction - expected).abs().max().item(),
        max((p.grad - gradients[name]).abs().max().item() for name, p in model.named_parameters()),
    )


@pytest.mark.parametrize("learned_sigma", [False, True])
def test_predictions_and_gradients_are_those_of_the_original(learned_sigma):
    forward, backward = compare_with_the_original(learned_sigma)
    assert forward < 1e-5
    assert backward < 1e-5


def swapped_positions(positions, dim):
    return layers.sincos_positions(positions.flip(1), dim)


def shift_and_scale_exchanged(x, shift, scale):
    return layers.modulate(x, scale, shift)


def scale_without_one(x, shift, scale):
    return layers.modulate(x, shift, scale - 1)


def eps_of_torch(x, shift, scale):
    return torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=1e-2), 1 + scale)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("sincos_positions", swapped_positions),
        ("modulate", shift_and_scale_exchanged),
        ("modulate", scale_without_one),
        ("modulate", eps_of_torch),
    ],
)
def test_the_comparison_with_the_original_sees_a_planted_mistake(monkeypatch, name, wrong):
    monkeypatch.setattr(dit, name, wrong)
    assert compare_with_the_original(learned_sigma=False)[0] > 1e-4


def test_the_comparison_with_the_original_sees_another_order_of_qkv(monkeypatch):
    def unflatten_as_timm(self, dim, sizes):
        *_, size = sizes
        return real(self, dim, (3, -1, size)).transpose(-3, -2)

    real = torch.Tensor.unflatten
    monkeypatch.setattr(
        dit.Attention,
        "forward",
        lambda self, x: self.out(attend(unflatten_as_timm(self.qkv(x), -1, (self.head_dim,)))),
    )

    def attend(heads):
        q, k, v = heads.transpose(1, 2).unbind(3)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    assert compare_with_the_original(learned_sigma=False)[0] > 1e-4


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
    config = tiny(hidden=128, qk_norm=True)
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
    deeper = initial(tiny(layers=3), 3)
    for name, values in first.state_dict().items():
        assert torch.equal(values, again.state_dict()[name])
        # A block more, as on another pipeline stage, leaves the others as they are.
        assert torch.equal(values, deeper.state_dict()[name])
        if values.abs().max() > 0:
            assert not torch.equal(values, other.state_dict()[name])
    weights = first.blocks["0"].mlp.up.weight, first.blocks["1"].mlp.up.weight
    assert not torch.equal(*weights)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_there_is_a_law_for_every_parameter_and_buffer(qk_norm):
    model = on_meta(tiny(qk_norm=qk_norm), 3)
    assert set(model.init_laws()) == set(model.state_dict())


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
    # Samples of a batch know nothing of each other.
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
    tokens = torch.randn(2, (config.latent_size // config.patch) ** 2, 4 * 6)
    latents = config.detokenize(tokens)
    assert latents.shape == (2, 6, 8, 8)
    mean, sigma = (part.flatten(-2) for part in tokens.unflatten(-1, (4, 6)).split(3, -1))
    assert torch.equal(config.detokenize(mean), latents[:, :3])
    assert torch.equal(config.detokenize(sigma), latents[:, 3:])


def test_a_size_is_short_for_its_numbers():
    named = DiTConfig(size="B/4", **IMAGENET)
    explicit = DiTConfig(hidden=768, layers=12, heads=12, patch=4, **IMAGENET)
    assert named.shape == explicit.shape == (768, 12, 12, 4)
    assert named.sample_shape == explicit.sample_shape
    assert named == DiTConfig(size="B/4", hidden=768, patch=4, **IMAGENET)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({**TINY_SHAPE, "heads": 5}, ["hidden=32", "heads=5", "heads = 4", "hidden = 40"]),
        ({**TINY_SHAPE, "hidden": 30, "heads": 5}, ["hidden=30", "multiple of 4", "hidden = 32"]),
        ({**TINY_SHAPE, "patch": 3}, ["latent_size=8", "patch=3", "latent_size = 9"]),
        ({"size": "XXL/2"}, ['size="XXL/2"', "XL", "3B", "patch of 2, 4, 8"]),
        ({"size": "XL/3"}, ['size="XL/3"', "2, 4, 8"]),
        ({"size": "XL"}, ['size="XL"', "XL/2"]),
        ({"size": "S/2", "hidden": 64}, ["hidden=64", 'size="S/2"', "hidden=384"]),
        ({"size": "S/2", "patch": 4}, ["patch=4", 'size="S/2"', "patch=2"]),
        ({"hidden": 32, "heads": 4}, ["layers, patch missing", "size"]),
        ({}, ["hidden, layers, heads, patch missing", "size"]),
        ({**TINY_SHAPE, "layers": 0}, ["layers=0", "at least 1"]),
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
    [{"heads": 5}, {"heads": 30}, {"heads": 7, "hidden": 100}, {"patch": 3}, {"patch": 16}],
)
def test_every_fix_that_a_message_names_works(changes):
    with pytest.raises(UserError) as caught:
        tiny(**changes)
    fixes = re.findall(r"(\w+) = (\d+)", str(caught.value))
    assert fixes
    for key, value in fixes:
        assert tiny(**{**changes, key: int(value)}).ffn > 0
