"""GPT: published sizes, causality, FLOPs, tied weights."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from titan_dit.config.section import UserError
from titan_dit.models.gpt_config import GPTConfig
from titan_dit.parallel.init import initialize

# Parameters in millions, with tables of 50,304 rows where the publication has 50,257.
PUBLISHED = {"124M": 124.476, "355M": 354.871, "774M": 774.090, "1.5B": 1557.686}
TINY = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 200,
    "sequence_length": 16,
}
LLAMA = {"norm": "rmsnorm", "mlp": "swiglu", "bias": False, "tie_word_embeddings": False}


def built(**keys):
    with torch.device("meta"):
        model = GPTConfig(**(TINY | keys)).build()
    initialize(model, model.initializers(), 0, torch.device("cpu"))
    return model


def run(model, tokens, next_tokens=None):
    side = {**model.config.static(tokens.device)}
    if next_tokens is not None:
        side["next_tokens"] = next_tokens
    return model({"tokens": tokens}, side)


@pytest.mark.parametrize("size", PUBLISHED)
def test_named_sizes_have_the_published_parameters(size):
    with torch.device("meta"):
        model = GPTConfig(size=size).build()
    count = sum(parameter.numel() for parameter in model.parameters())
    assert round(count / 1e6, 3) == PUBLISHED[size]


def test_175b_has_175_billion_parameters():
    with torch.device("meta"):
        model = GPTConfig(size="175B", sequence_length=2048).build()
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(
        175, 0.005
    )


@pytest.mark.parametrize("keys", [{}, LLAMA])
def test_a_token_changes_no_logit_before_it(keys):
    model = built(**keys)
    tokens = torch.randint(200, (3, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 200
    with torch.no_grad():
        one, other = run(model, tokens), run(model, changed)
    assert one.shape == (3, 16, 200)
    assert torch.equal(one[:, :9], other[:, :9])
    assert (one[:, 9:] != other[:, 9:]).any(-1).all()


@pytest.mark.parametrize("keys", [{}, LLAMA])
def test_the_loss_is_the_cross_entropy_of_the_logits(keys):
    model = built(**keys).double()
    tokens = torch.randint(200, (3, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = run(model, tokens[:, :-1])
        loss = run(model, tokens[:, :-1], tokens[:, 1:])
    wanted = -logits.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    assert (loss - wanted).abs().max() < 1e-12
    assert loss.mean() == pytest.approx(math.log(200), rel=0.01)


def test_tied_weights_are_one_parameter_with_both_gradients():
    model = built()
    assert model.head.out.weight is model.embed.token.weight
    assert "head.out.weight" not in dict(model.named_parameters())
    tokens = torch.randint(100, (2, 17))
    run(model, tokens[:, :-1], tokens[:, 1:]).sum().backward()
    gradient = model.embed.token.weight.grad
    assert gradient[100:200].abs().sum() > 0  # Of the output layer: all ids compete.
    assert not gradient[200:].any()


@pytest.mark.parametrize("keys", [{}, LLAMA])
def test_flops_are_those_of_the_products(keys):
    model = built(**keys)
    tokens = torch.randint(200, (1, 17))
    with FlopCounterMode(display=False) as counter:
        run(model, tokens[:, :-1], tokens[:, 1:]).sum().backward()
    hidden, layers, _ = model.config.shape
    attention = layers * 12 * 16**2 * hidden
    counts = counter.get_flop_counts()["Global"]  # On a CPU of attention only from torch 2.15 on.
    counted = sum(n for operator, n in counts.items() if "attention" not in str(operator))
    assert model.flops_per_sample(16) - attention == counted
    # By which pipelines are balanced.
    blocks = layers + model.config.spec().head_cost
    assert blocks * model.config.block_flops(16) == pytest.approx(model.flops_per_sample(16))


@pytest.mark.parametrize("keys", [{}, LLAMA])
def test_initial_matrices_that_write_to_the_stream_are_smaller(keys):
    model = built(init_std=0.1, **keys)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            writes = name.endswith(("attn.out.weight", "mlp.down.weight"))
            wanted = 0.1 / math.sqrt(4) if writes else 0.1
            assert parameter.std().item() == pytest.approx(wanted, rel=0.1), name


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"size": "7B"}, 'size="7B" is not one of 124M'),
        ({"size": "124M", "hidden_size": 8}, "hidden_size=8 disagrees"),
        ({"hidden_size": 32, "num_layers": 2}, "num_heads missing"),
        ({"hidden_size": 33, "num_layers": 2, "num_heads": 4}, "Set hidden_size = 36"),
        (
            {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_key_value_heads": 3},
            "does not divide num_heads=4",
        ),
        (
            {
                "hidden_size": 12,
                "num_layers": 2,
                "num_heads": 4,
                "position_embedding_type": "rotary",
            },
            "rotates pairs",
        ),
    ],
)
def test_sizes_that_cannot_be_built_are_refused(keys, words):
    with pytest.raises(UserError, match=words):
        GPTConfig(**keys)
