"""Tensor parallelism sends the elements that theory predicts, and no more."""

import pytest
import torch
from harness import on_ranks
from tiny import tiny_config, torch_rng
from tiny_joint import NETWORKS, joint_config
from torch.utils._python_dispatch import TorchDispatchMode

from titan_dit.trainer import Trainer

OPS = torch.ops._c10d_functional


class Elements(TorchDispatchMode):
    """Elements that a rank sends in collectives, of large and of small tensors."""

    def __init__(self, large):
        super().__init__()
        self.large = large
        self.sent = {"large": 0.0, "small": 0.0, "messages": 0}
        self.kinds = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        packet = op.overloadpacket
        whole = {
            OPS.all_gather_into_tensor: lambda: out.numel(),
            OPS.reduce_scatter_tensor: lambda: args[0].numel(),
            OPS.all_reduce: lambda: 2 * args[0].numel(),
        }
        if packet in whole:
            ranks = torch.distributed.get_world_size()
            numel = whole[packet]()
            kind = "large" if numel >= self.large else "small"
            self.sent[kind] += numel * (ranks - 1) / ranks
            self.sent["messages"] += 1
            self.kinds.add(str(packet))
        return out


BATCH, TOKENS, HIDDEN = 16, 16, 32


def single_blocks(**sections):
    """A FLUX.2 with a double block and so many single ones."""
    layers = {"num_double_layers": 1, "num_single_layers": sections["model"]["num_layers"]}
    return joint_config("flux2", **sections | {"model": layers})


def sent_per_layer(world, sequence_parallel, config_of=tiny_config):
    """From two depths, so that embed and head cancel out."""
    found = []
    for layers in (2, 6):
        config = config_of(
            model={"num_layers": layers},
            training={"global_batch_size": BATCH},
            parallel={"tp": world.size, "sequence_parallel": sequence_parallel},
        )
        trainer = Trainer(config, world)
        batch = next(trainer.batches())
        prepared = trainer.objective.prepare(batch, torch_rng(trainer, batch))
        with Elements(large=BATCH * TOKENS * HIDDEN) as elements:
            trainer.executor.step(prepared)
        found.append(elements.sent)
    return {kind: (found[1][kind] - found[0][kind]) / 4 for kind in found[0]}


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_layer_sends_what_theory_says(sequence_parallel):
    """8 (t-1)/t b s h (arXiv:2205.05198), and the 12 (t-1)/t b h of the modulation."""
    [sent, _] = on_ranks(2, sent_per_layer, sequence_parallel)
    assert sent["large"] == 8 * (1 / 2) * BATCH * TOKENS * HIDDEN
    # Without sequence parallelism the gradient of the modulation is whole on every rank.
    modulation = 12 if sequence_parallel else 6
    assert sent["small"] == modulation * (1 / 2) * BATCH * HIDDEN


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_layer_with_text_sends_as_many_elements_per_token(sequence_parallel):
    """The modulation is whole on every rank; gradients of its table and of two norms are sums."""
    [sent, _] = on_ranks(2, sent_per_layer, sequence_parallel, joint_config)
    # 8 tokens of the picture and 8 of text.
    assert sent["large"] == 8 * (1 / 2) * BATCH * TOKENS * HIDDEN
    table, norms = 6 * HIDDEN * sequence_parallel, 2 * HIDDEN // 4
    assert sent["small"] == 2 * (1 / 2) * (table + norms)


def wan_config(model, **sections):
    return joint_config("wan", model=model | {"hidden_size": HIDDEN}, **sections)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_layer_with_cross_attention_sends_numbers_of_its_norms_besides(sequence_parallel):
    """A third pair of products, and two numbers a token in forward and in backward of each norm."""
    [sent, _] = on_ranks(2, sent_per_layer, sequence_parallel, wan_config)
    assert sent["large"] == 12 * (1 / 2) * BATCH * TOKENS * HIDDEN
    # Queries and keys of the clip, queries of the clip and keys of the text's 8 tokens.
    numbers = 2 * BATCH * (2 * TOKENS + TOKENS + 8)
    # Gradients of a table and of a norm are sums over the ranks' tokens.
    small = (6 + 2) * HIDDEN * sequence_parallel
    assert sent["small"] == 2 * (1 / 2) * (numbers + small)
    # Three pairs of products, each with a gather and a scatter, or one sum, forward and backward;
    # one message of each norm, forward and backward; the gradients of the table and of the norm.
    assert sent["messages"] == (12 + 4 + 3 if sequence_parallel else 6 + 4)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_attention_beside_an_mlp_sends_half_as_many(sequence_parallel):
    """Both read tokens that are gathered once, and add to the same: 4 (t-1)/t b s h."""
    [sent, _] = on_ranks(2, sent_per_layer, sequence_parallel, single_blocks)
    assert sent["large"] == 4 * (1 / 2) * BATCH * TOKENS * NETWORKS["flux2"]["model"]["hidden_size"]
