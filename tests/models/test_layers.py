import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from titan_dit.models.layers import (
    MLP,
    Attention,
    GatedMLP,
    LabelEmbedder,
    TimestepEmbedder,
    attend,
    gelu,
    grid_positions,
    modulate,
    patchify,
    scaled_add,
    sincos_positions,
    unpatchify,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(("c", "h", "w", "patch"), [(3, 4, 4, 2), (4, 8, 4, 2), (1, 6, 9, 3)])
def test_a_token_holds_its_patch_row_by_row_with_the_channel_fastest(c, h, w, patch):
    latents = torch.arange(2 * c * h * w, dtype=torch.float32).view(2, c, h, w)
    tokens = patchify(latents, patch)
    assert tokens.shape == (2, h * w // patch**2, patch * patch * c)
    for b in range(2):
        for y in range(h):
            for x in range(w):
                token = y // patch * (w // patch) + x // patch
                first = (y % patch * patch + x % patch) * c
                expected = latents[b, :, y, x]
                assert torch.equal(tokens[b, token, first : first + c], expected)


@pytest.mark.parametrize(("c", "h", "w", "patch"), [(3, 4, 4, 2), (4, 8, 4, 2), (1, 6, 9, 3)])
def test_unpatchify_undoes_patchify(c, h, w, patch):
    latents = torch.randn(2, c, h, w)
    assert torch.equal(unpatchify(patchify(latents, patch), patch, h), latents)


def test_positions_come_in_the_order_of_the_tokens():
    rows, columns = 3, 5
    # Latents hold their own coordinates, which show the position of each token.
    y, x = torch.meshgrid(torch.arange(6.0), torch.arange(10.0), indexing="ij")
    corners = patchify(torch.stack((y, x))[None], 2)[0, :, :2] / 2
    assert torch.equal(grid_positions(rows, columns, CPU), corners)


def original_positions(side, dim):
    """get_2d_sincos_pos_embed of facebookresearch/DiT, in float64."""

    def one_axis(position):
        omega = 1 / 10000 ** (np.arange(dim // 4, dtype=np.float64) / (dim / 4))
        angles = np.outer(position.reshape(-1), omega)
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)

    rows, columns = np.arange(side, dtype=np.float64), np.arange(side, dtype=np.float64)
    grid = np.meshgrid(columns, rows)  # the original's comment: "here w goes first"
    return torch.from_numpy(np.concatenate([one_axis(grid[0]), one_axis(grid[1])], axis=1))


@pytest.mark.parametrize(("side", "dim"), [(4, 64), (16, 1152), (32, 384)])
def test_positions_are_those_of_the_original(side, dim):
    ours = sincos_positions(grid_positions(side, side, CPU), dim).double()
    expected = original_positions(side, dim)
    # fp32 angles of up to 31 have an error of about 2e-6.
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    swapped = torch.cat(expected.chunk(2, -1)[::-1], -1)
    assert (ours - swapped).abs().max() > 0.5


def test_modulate_normalises_then_scales_by_one_plus_scale_and_shifts():
    x = 3 * torch.randn(2, 5, 8, dtype=torch.float64) + 7
    shift, scale = torch.randn(2, 2, 1, 8, dtype=torch.float64)
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    expected = (x - mean) / (variance + 1e-6).sqrt() * (1 + scale) + shift
    torch.testing.assert_close(modulate(x, shift, scale), expected)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("shared", [True, False])
def test_scaled_add_has_the_gradients_of_the_plain_expression(tokens, shared):
    torch.manual_seed(0)
    shapes = (2, 1 if shared else tokens, 3), (2, 1, 3), (2, tokens, 3)
    base, scale, x = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    torch.testing.assert_close(scaled_add(base, scale, x), base + scale * x)
    assert torch.autograd.gradcheck(scaled_add, (base, scale, x))
    direction = torch.randn(shapes[2], dtype=torch.float64)
    ours = torch.autograd.grad(scaled_add(base, scale, x), (base, scale, x), direction)
    plain = torch.autograd.grad(base + scale * x, (base, scale, x), direction)
    torch.testing.assert_close(ours, plain)


def test_timesteps_are_embedded_as_in_the_original():
    torch.manual_seed(0)
    embedder = TimestepEmbedder(16)
    t = torch.tensor([0.0, 0.37, 500.0, 999.5])
    angles = t[:, None] * torch.exp(-math.log(10000) * torch.arange(128) / 128)
    features = torch.cat([angles.cos(), angles.sin()], -1)
    hidden = features @ embedder.up.weight.T + embedder.up.bias
    expected = hidden * hidden.sigmoid() @ embedder.down.weight.T + embedder.down.bias
    torch.testing.assert_close(embedder(t), expected)


def test_a_bf16_network_still_tells_neighbouring_timesteps_apart():
    torch.manual_seed(0)
    t = torch.tensor([997.0, 998.0, 999.0, 1000.0])  # equal in bf16
    exact = TimestepEmbedder(64)
    expected = exact(t)
    embedded = exact.bfloat16()(t).float()
    error = (embedded - expected).norm(dim=1)
    difference = (expected[1:] - expected[:-1]).norm(dim=1)
    assert error.max() < 0.1 * difference.min()


def test_any_negative_label_takes_the_last_row():
    embedder = LabelEmbedder(4, 6)
    labels = torch.tensor([-1, 0, 3, -7])
    assert torch.equal(embedder(labels), embedder.table.weight[torch.tensor([4, 0, 3, 4])])


def naive_attention(layer, x, normalise):
    """Head by head in float64; rows of qkv are [heads, 3, head_dim]."""
    d = x.shape[-1]
    size = layer.head_dim
    out = torch.zeros_like(x)
    for head in range(d // size):
        first = head * 3 * size
        q, k, v = (
            x @ layer.qkv.weight[first + i * size :][:size].T
            + layer.qkv.bias[first + i * size :][:size]
            for i in range(3)
        )
        scores = normalise(q) @ normalise(k).transpose(1, 2) / math.sqrt(size)
        scores = (scores - scores.amax(-1, keepdim=True)).exp()
        out[:, :, head * size :][:, :, :size] = scores / scores.sum(-1, keepdim=True) @ v
    return out @ layer.out.weight.T + layer.out.bias


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("heads", [1, 4])
def test_attention_is_softmax_attention(heads, qk_norm):
    torch.manual_seed(0)
    layer = Attention(16, heads, qk_norm).double()
    x = 3 * torch.randn(2, 9, 16, dtype=torch.float64)

    def normalise(y):
        return y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() if qk_norm else y

    torch.testing.assert_close(
        layer(x), naive_attention(layer, x, normalise), rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("qk_norm", [False, True])
def test_only_normalised_queries_and_keys_forget_their_length(qk_norm):
    torch.manual_seed(0)
    layer = Attention(16, 4, qk_norm).double()
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    before = layer(x)
    with torch.no_grad():
        rows = layer.qkv.weight.view(4, 3, 4, 16)
        rows[:, :2] *= 30
        layer.qkv.bias.view(4, 3, 4)[:, :2] *= 30
    assert ((layer(x) - before).abs().max() < 1e-4) == qk_norm


def test_a_shard_of_the_heads_gives_its_part_of_the_sum():
    # Tensor parallelism relies on this: the number of heads follows from the outputs of qkv.
    torch.manual_seed(0)
    whole = Attention(16, 4, False).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    total = whole.out.bias.detach().clone()
    for part in (slice(0, 8), slice(8, 16)):
        shard = Attention(16, 4, False).double()
        shard.qkv.weight.data = whole.qkv.weight.data.view(2, 24, 16)[part.start // 8]
        shard.qkv.bias.data = whole.qkv.bias.data.view(2, 24)[part.start // 8]
        shard.out.weight.data = whole.out.weight.data[:, part]
        shard.out.bias.data = torch.zeros(16, dtype=torch.float64)
        total = total + shard(x)
    torch.testing.assert_close(total, whole(x))


def test_the_mlp_uses_the_tanh_form_of_gelu():
    torch.manual_seed(0)
    layer = MLP(8, 12).double()
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    y = x @ layer.up.weight.T + layer.up.bias
    y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
    torch.testing.assert_close(layer(x), y @ layer.down.weight.T + layer.down.bias)


def test_gelu_for_compilers_is_the_same_function(monkeypatch):
    x = torch.linspace(-30, 30, 10001, dtype=torch.float64, requires_grad=True)
    exact = gelu(x)
    [slope] = torch.autograd.grad(exact.sum(), x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    found = gelu(x)
    assert torch.allclose(found, exact, rtol=0, atol=1e-14)
    assert torch.allclose(torch.autograd.grad(found.sum(), x)[0], slope, rtol=0, atol=1e-14)
    assert gelu(x.bfloat16()).dtype == torch.bfloat16
    assert torch.equal(gelu(x.bfloat16()), gelu(x.bfloat16().float()).bfloat16())


def projections(tokens=6, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 2, 3, tokens, 4, generator=generator, dtype=dtype).unbind(0)


def written_out(q, k, v, seen):
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf)
    return scores.softmax(-1) @ v


def test_a_causal_query_sees_the_keys_up_to_its_own():
    q, k, v = projections()
    seen = torch.tensor([[j <= i for j in range(6)] for i in range(6)])
    found = attend(q, k, v, causal=True)
    torch.testing.assert_close(found, written_out(q, k, v, seen))
    torch.testing.assert_close(found[:, :, 0], v[:, :, 0])


def test_by_lengths_a_query_sees_the_first_keys_of_its_sample():
    q, k, v = projections()
    lengths = torch.tensor([2, 6])
    seen = torch.tensor([[j < n for j in range(6)] for n in lengths])[:, None, None]
    found = attend(q, k, v, lengths=lengths)
    torch.testing.assert_close(found, written_out(q, k, v, seen))
    torch.testing.assert_close(found[1], attend(q, k, v)[1])
    torch.testing.assert_close(found[:1, :, :2], attend(*(x[:1, :, :2] for x in (q, k, v))))


@pytest.mark.parametrize("mask", ["none", "causal", "lengths"])
def test_the_layer_tells_its_mask_to_what_attends(mask):
    torch.manual_seed(0)
    layer, x = Attention(12, 3, mask=mask), torch.randn(2, 6, 12)
    told, lengths = [], torch.tensor([2, 6])

    def watched(*args, **kwargs):
        told.append(kwargs)
        return attend(*args, **kwargs)

    layer.attend = watched
    given = {"lengths": lengths} if mask == "lengths" else {}
    found = layer(x, **given)
    assert told == [{"none": {}, "causal": {"causal": True}, "lengths": given}[mask]]
    changed = x.clone()
    changed[:, -1] += 1
    moved = (layer(changed, **given) - found).abs().amax(-1) > 1e-6
    # Tokens that the last one attends to: everything in its own.
    expected = {
        "none": [[True] * 6] * 2,
        "causal": [[False] * 5 + [True]] * 2,
        "lengths": [[False] * 5 + [True], [True] * 6],
    }
    assert moved.tolist() == expected[mask]


def test_a_gated_mlp_has_each_channels_gate_before_its_value():
    mlp, x = GatedMLP(8, 5), torch.randn(2, 3, 8)
    rows = mlp.up(x)
    gated = F.silu(rows[..., ::2]) * rows[..., 1::2]
    torch.testing.assert_close(mlp(x), mlp.down(gated))
