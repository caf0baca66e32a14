"""The messages of a tied weight between the first and the last stage, and its shards over tp."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor.parallel import RowwiseParallel

from titan_dit.config.section import UserError
from titan_dit.dry_run.fake_step import fake_world
from titan_dit.models.base import Model
from titan_dit.models.gpt_config import GPTConfig
from titan_dit.parallel.mesh import AxisSizes, Mesh
from titan_dit.parallel.tensor import check_tied
from titan_dit.parallel.tensor_plans import gpt
from titan_dit.pipeline.tied import TiedWeights, copies_of


class Part(Model):
    """A stage with an embedding, or with an output layer."""

    def __init__(self, *, first):
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3) if first else None
        self.blocks = torch.nn.ModuleDict()
        self.head = None if first else torch.nn.Linear(3, 5, bias=False)
        self.tied = {"head.weight": "embed.weight"}


class Wire:
    """Links of two ranks in one process: a message arrives before it is received."""

    def __init__(self):
        self.messages = []

    def send(self, tensors, target):
        self.messages.append([tensor.clone() for tensor in tensors])
        return []

    def receive(self, buffers, source):
        for buffer, tensor in zip(buffers, self.messages[-1], strict=True):
            assert buffer.dtype == tensor.dtype
            buffer.copy_(tensor)
        return []


def ends(dtype):
    """The two ends of a pipeline of two stages, and the wire between them."""
    wire = Wire()
    first, last = Part(first=True), Part(first=False)
    return (
        TiedWeights({0: first}, (0, 1), wire, dtype),
        TiedWeights({1: last}, (0, 1), wire, dtype),
        wire,
    )


def test_weights_travel_as_the_stages_compute_and_gradients_in_fp32():
    owner, holder, wire = ends(torch.bfloat16)
    (weight,), (copy,) = owner.owners, holder.copies
    before = weight.detach().clone()
    owner.fetch()
    holder.fetch()
    assert wire.messages[-1][0].dtype == torch.bfloat16
    assert torch.equal(copy, before.bfloat16().float())
    assert torch.equal(weight, before)
    weight.grad, copy.grad = torch.full((5, 3), 1.0), torch.full((5, 3), 2.0**-20)
    holder.add_gradients()
    owner.add_gradients()
    assert (weight.grad == 1 + 2.0**-20).all()
    assert copy.grad is None


def test_a_copy_without_a_gradient_adds_none_and_a_frozen_one_sends_none():
    owner, holder, wire = ends(torch.float32)
    (weight,), (copy,) = owner.owners, holder.copies
    weight.grad = torch.ones(5, 3)
    holder.add_gradients()
    owner.add_gradients()
    assert (weight.grad == 1).all()
    for parameter in (weight, copy):
        parameter.requires_grad_(False)
    count = len(wire.messages)
    holder.add_gradients()
    owner.add_gradients()
    assert len(wire.messages) == count


def test_only_a_stage_without_the_owner_has_copies():
    assert copies_of(Part(first=True)) == {}
    last = Part(first=False)
    assert copies_of(last) == {"embed.weight": last.head.weight}
    last.embed = torch.nn.Embedding(5, 3)
    last.tie()
    assert copies_of(last) == {}


def test_a_plan_that_shards_the_two_ends_differently_is_refused():
    keys = {
        "hidden_size": 8,
        "num_layers": 1,
        "num_heads": 2,
        "vocab_size": 100,
        "sequence_length": 4,
    }
    plan = gpt.plan(sequence_parallel=False)
    by_columns = replace(plan, head={**plan.head, "out": RowwiseParallel()})
    one_end = replace(plan, embed={})
    with fake_world(0, 2):
        mesh = Mesh(AxisSizes(tp=2), "cpu").axis("tp")
        with torch.device("meta"):
            model, untied = (
                GPTConfig(**keys).build(),
                GPTConfig(tie_word_embeddings=False, **keys).build(),
            )
        check_tied(model, mesh, plan)
        check_tied(untied, mesh, by_columns)
        assert model.head.out.weight is model.embed.token.weight  # Only a copy was sharded.
        with pytest.raises(UserError, match=r"out\.weight is sharded by dim 1, but embed\.token"):
            check_tied(model, mesh, by_columns)
        with pytest.raises(UserError, match=r"to which it is tied, is whole\. Shard them alike"):
            check_tied(model, mesh, one_end)
