"""Sequence parallelism copies no tokens around its collectives."""

from collections import Counter

import pytest
import torch
from tiny import tiny_config
from tiny_joint import joint_config
from torch.utils._python_dispatch import TorchDispatchMode
from unchecked import unchecked

from titan_dit.build import build
from titan_dit.data.base import Batch
from titan_dit.dry_run.fake_step import fake_world
from titan_dit.models.layers import Attention, is_token_first, modulate
from titan_dit.parallel.mesh import Mesh
from titan_dit.parallel.tensor import batch_first, token_first
from titan_dit.plan import resolve
from titan_dit.rng import SampleRNG

COPIES = ("clone", "cat", "stack", "select_scatter")


class Copies(TorchDispatchMode):
    """Counts copies of at least `least` elements, by operator and elements."""

    def __init__(self, least):
        super().__init__()
        self.least, self.count = least, Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # A DTensor dispatches its local tensor here.
        out = op(*args, **(kwargs or {}))
        name = op.__name__.split(".")[0]
        if name in COPIES and out.numel() >= self.least:
            self.count[name, out.numel()] += 1
        return out


TOKENS, HIDDEN, MICROBATCH, TP = 256, 16, 4, 2
LOCAL = MICROBATCH * TOKENS // TP * HIDDEN


def copies_of_a_step(layers, **sections):
    """Copies as large as a rank's tokens, in two microbatches on one of two fake ranks."""
    model = {"hidden_size": HIDDEN, "num_layers": layers, "num_heads": 2, "latent_size": 32}
    training = {"global_batch_size": 2 * MICROBATCH, "microbatch_size": MICROBATCH}
    return copies_of(tiny_config(model=model, parallel={"tp": TP}, training=training, **sections))


def copies_of(config):
    """Copies of at least LOCAL elements in a step of a config."""
    with fake_world(0, TP), unchecked():
        plan = resolve(config, TP)
        facts, fields = config.objective.example(config.model)
        objective = config.objective.build(config.model, facts)
        built = build(plan, objective, Mesh(plan.sizes, "cpu"), torch.device("cpu"))
        rows = 2 * MICROBATCH
        batch = Batch(
            fields={k: torch.zeros(rows, *f.shape, dtype=f.dtype) for k, f in fields.items()},
            sample_numbers=torch.arange(rows),
            weight=torch.ones(rows),
            total_weight=float(rows),
        )
        prepared = objective.prepare(batch, SampleRNG(0, batch.sample_numbers))
        with Copies(LOCAL) as copies:
            built.executor.step(prepared)
    return copies.count


@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_layer_copies_no_tokens_around_its_gathers(mode):
    one, two = (copies_of_a_step(layers, activation_checkpoint={"mode": mode}) for layers in (1, 2))
    # Backward joins the gradients of q, k and v; each has the heads of one rank.
    assert two - one == {("stack", 3 * LOCAL): 2}
    # At the ends of the network, a rank's tokens and their gradients leave the whole ones.
    assert one - (two - one) == {("clone", LOCAL): 4}


def joint_copies(layers):
    """Of a text-to-image DiT with 192 tokens of text and 64 of the picture."""
    sizes = {"latent_size": [16, 16], "text_tokens": 192, "intermediate_size": HIDDEN}
    model = {"hidden_size": HIDDEN, "num_layers": layers, "num_heads": 2, **sizes}
    training = {"global_batch_size": 2 * MICROBATCH, "microbatch_size": MICROBATCH}
    return copies_of(joint_config(model=model, parallel={"tp": TP}, training=training))


def test_a_layer_of_two_kinds_of_tokens_copies_them_to_join_them():
    own = joint_copies(2) - joint_copies(1)
    assert own == {
        # Both microbatches join the tokens, and the gradients of the parts; 4 are rotary halves.
        ("cat", LOCAL): 2 * 6,
        # The norms of q and k.
        ("clone", LOCAL): 2 * 2,
        # Gradients: of q, k and v, and of gate and value.
        ("stack", 3 * LOCAL): 2,
        ("stack", 2 * LOCAL): 2,
    }


@pytest.mark.parametrize("mask", ["none", "causal", "lengths"])
def test_attention_takes_tokens_in_either_order(mask):
    torch.manual_seed(0)
    attention = Attention(16, 2, qk_norm=True, mask=mask)
    told = {"lengths": torch.tensor([3, 5, 2])} if mask == "lengths" else {}
    x = torch.randn(3, 5, 16)
    found = []
    for tokens in (x, batch_first(token_first(x))):
        tokens = tokens.detach().requires_grad_()
        out = attention(tokens, **told)
        (out * torch.arange(16)).square().sum().backward()
        found.append((out, tokens.grad, attention.qkv.weight.grad.clone()))
        attention.zero_grad()
    for value, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)


def test_what_works_token_by_token_keeps_the_order_in_memory():
    x = torch.randn(3, 5, 16)
    shift, scale = torch.randn(3, 1, 16), torch.randn(3, 1, 16)
    ordered = batch_first(token_first(x))
    assert is_token_first(ordered)
    assert not is_token_first(x)
    out = modulate(ordered, shift, scale)
    assert is_token_first(out)
    torch.testing.assert_close(out, modulate(x, shift, scale))
    # One sample has no order.
    assert not is_token_first(batch_first(token_first(x[:1])))


def test_gradients_reach_collectives_in_the_order_of_the_tokens():
    x = torch.randn(5, 3, 16, requires_grad=True)
    seen = []
    (x * 1).register_hook(lambda grad: seen.append(grad.is_contiguous()))
    y = x * 1
    y.register_hook(lambda grad: seen.append(grad.is_contiguous()))
    batch_first(y).backward(torch.randn(3, 5, 16))
    assert seen == [True]
