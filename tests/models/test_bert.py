"""BERT: published sizes, parity with torch's encoder layer, padding, masked tokens alone."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from titan_dit.config.section import UserError
from titan_dit.models.bert import BERTConfig, Block
from titan_dit.parallel.init import initialize

SHAPE = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 100,
    "sequence_length": 12,
}


def built(config, num_scored=3, *, sentence_order=True):
    torch.manual_seed(0)
    model = config.masked_spec(num_scored, sentence_order=sentence_order).build()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def sample(config, lengths=(12, 7)):
    """Inputs and side inputs of samples with three masked tokens each."""
    size, n = len(lengths), config.sequence_length
    tokens = torch.randint(config.vocab_size, (size, n))
    labels = torch.full((size, n), -1)
    labels[:, 2:5] = torch.randint(config.vocab_size, (size, 3))
    order = torch.full((size, n), -1)
    order[:, 0] = torch.arange(size) % 2
    inputs = {"tokens": tokens, "types": (torch.arange(n) > 5).long().expand(size, n)}
    side = {"lengths": torch.tensor(lengths), "labels": labels, "order": order}
    return inputs, side | config.static(torch.device("cpu"))


@pytest.mark.parametrize(("size", "millions"), [("base", 110), ("large", 336), ("3.9B", 3900)])
def test_the_named_sizes_have_their_papers_parameters(size, millions):
    with torch.device("meta"):
        model = BERTConfig(size=size).masked_spec(77, sentence_order=True).build()
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.02)


@pytest.mark.parametrize("norm_place", ["post", "pre"])
def test_a_block_is_torchs_encoder_layer(norm_place):
    config = BERTConfig(**SHAPE, norm_place=norm_place)
    block = built(config).blocks["0"]
    hidden, _, heads = config.shape
    oracle = nn.TransformerEncoderLayer(
        hidden,
        heads,
        config.width,
        dropout=0,
        activation="gelu",
        layer_norm_eps=config.norm_eps,
        batch_first=True,
        norm_first=norm_place == "pre",
    )

    def in_order(packed):  # [heads, 3, d] to [3, heads, d]
        parts = packed.unflatten(0, (heads, 3, hidden // heads))
        return parts.transpose(0, 1).flatten(0, 2).detach()

    own = dict(block.named_parameters())
    oracle.self_attn.in_proj_weight.data = in_order(own["attn.qkv.weight"])
    oracle.self_attn.in_proj_bias.data = in_order(own["attn.qkv.bias"])
    names = {
        "self_attn.out_proj": "attn.out",
        "linear1": "mlp.up",
        "linear2": "mlp.down",
        "norm1": "attn_norm",
        "norm2": "mlp_norm",
    }
    for (theirs, ours), kind in itertools.product(names.items(), ("weight", "bias")):
        oracle.get_parameter(f"{theirs}.{kind}").data = own[f"{ours}.{kind}"].detach()
    x, lengths = torch.randn(2, 12, hidden), torch.tensor([12, 7])
    is_padding = torch.arange(12) >= lengths[:, None]
    (found,) = block((x,), {"lengths": lengths})
    # With a gradient torch takes the same plain operators as in training.
    expected = oracle(x.requires_grad_(), src_key_padding_mask=is_padding)
    torch.testing.assert_close(found[~is_padding], expected[~is_padding], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm_place", ["post", "pre"])
def test_norms_stand_where_the_paper_has_them(norm_place):
    config = BERTConfig(**SHAPE, norm_place=norm_place)
    model = built(config)
    names = {name for name, _ in model.named_parameters()}
    assert ("embed.norm.weight" in names) == (norm_place == "post")
    assert ("head.norm.weight" in names) == (norm_place == "pre")
    assert isinstance(model.blocks["0"], Block)


def test_padding_changes_no_loss():
    config = BERTConfig(**SHAPE)
    model, (inputs, side) = built(config), sample(config)
    expected = model(inputs, side)
    changed = inputs["tokens"].clone()
    changed[1, 7:] = (changed[1, 7:] + 1) % config.vocab_size
    assert torch.equal(model(inputs | {"tokens": changed}, side), expected)
    longer = side | {"lengths": torch.tensor([12, 12])}
    assert not torch.allclose(model(inputs, longer)[1], expected[1])


def test_the_head_scores_masked_tokens_and_the_order_at_token_0():
    config = BERTConfig(**SHAPE)
    model, (inputs, side) = built(config), sample(config)
    losses = model(inputs, side)
    logits = model(inputs, {k: v for k, v in side.items() if k not in ("labels", "order")})
    assert logits.shape == (2, 12, 100)
    is_masked = side["labels"] >= 0
    expected = F.cross_entropy(logits[is_masked], side["labels"][is_masked], reduction="none")
    torch.testing.assert_close(losses[is_masked], expected)
    assert (losses[:, 0] > 0).all()
    assert (losses[:, 1:][~is_masked[:, 1:]] == 0).all()
    all_scored = built(config, num_scored=12)
    torch.testing.assert_close(all_scored(inputs, side), losses)


def test_a_slice_without_token_0_has_no_loss_of_the_order():
    config = BERTConfig(**SHAPE)
    model, (inputs, side) = built(config), sample(config)
    nowhere = torch.full_like(side["order"], -1)
    losses = model(inputs, side | {"order": nowhere})
    assert (losses[:, 0] == 0).all()
    torch.testing.assert_close(losses[:, 1:], model(inputs, side)[:, 1:])


def test_the_decoder_is_the_token_embedding_and_its_bias_is_its_own():
    model = built(BERTConfig(**SHAPE))
    assert model.head.out.weight is model.embed.token.weight
    assert model.head.out.bias.shape == (128,)
    assert "head.out.weight" not in dict(model.named_parameters())


def test_flops_count_the_masked_tokens_of_the_head_only():
    config = BERTConfig(size="large")
    num, n = 77, 512
    with torch.device("meta"):
        model = config.masked_spec(num, sentence_order=False).build()
    matrices = 24 * 12 * 1024**2
    head = num * (1024**2 + 1024 * 30592)
    assert model.flops_per_sample(n) == 6 * (n * matrices + head) + 24 * 12 * n**2 * 1024


@pytest.mark.parametrize(("norm_place", "share"), [("post", 1), ("pre", 0.5)])
def test_only_a_pre_norm_makes_initial_matrices_that_write_to_the_stream_smaller(norm_place, share):
    config = BERTConfig(norm_place=norm_place, init_std=0.1, **SHAPE)
    model = built(config)
    initialize(model, model.initializers(), 0, torch.device("cpu"))
    for name, parameter in model.blocks.named_parameters():
        if parameter.ndim == 2:
            wanted = 0.1 * (share if name.endswith(("attn.out.weight", "mlp.down.weight")) else 1)
            assert parameter.std().item() == pytest.approx(wanted, rel=0.1), name


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"size": "huge"}, '[model] size="huge" is not one of base, large, 336M, 1.3B, 3.9B. '),
        ({"size": "base", "num_layers": 24}, "[model] num_layers=24 disagrees with size="),
        ({"hidden_size": 30, "num_layers": 2}, "[model] num_heads missing. "),
        ({"hidden_size": 30, "num_layers": 2, "num_heads": 4}, "Set hidden_size = 32."),
    ],
)
def test_a_size_that_does_not_fit_is_refused(keys, message):
    with pytest.raises(UserError) as error:
        BERTConfig(**keys)
    assert message in str(error.value)
