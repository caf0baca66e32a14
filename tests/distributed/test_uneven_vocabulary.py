"""Ranks that do not divide the rows of a vocabulary: the same loss, gradients, logits, adapters."""

import pytest
import tiny
import torch
import torch.nn.functional as F
from harness import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from titan_dit.parallel import lora
from titan_dit.parallel.tensor import gather_logits, score_shard

ROWS, SIZE = 256, 200  # On 3 ranks 86, 86 and 84 rows.


def drawn():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(SIZE, ROWS, generator=generator, dtype=torch.float64)
    return logits, torch.arange(SIZE), torch.rand(SIZE, generator=generator, dtype=torch.float64)


def on_a_third(world):
    mesh = init_device_mesh("cpu", (3,))
    logits, targets, weights = drawn()
    mine = logits.chunk(3, 1)[world.rank].clone().requires_grad_()
    loss = score_shard(mesh, ROWS, mine * 1, targets, SIZE)
    (loss * weights).sum().backward()
    return loss.detach(), mine.grad, gather_logits(mesh, ROWS, mine.detach()), adapted(mesh)


def adapted(mesh):
    """The outputs of a layer with an adapter, and the adapter's gradients."""
    layer = nn.Linear(4, ROWS, dtype=torch.float64)
    if mesh is not None:
        parallelize_module(layer, mesh, ColwiseParallel(output_layouts=Replicate()))
    lora.add(layer, 2, 1.5)
    tiny.randomize(dict(layer.named_parameters()))
    out = layer(drawn()[0][:, :4])
    out.square().sum().backward()
    return out.detach(), *(tiny.whole(p.grad) for p in (layer.lora_A, layer.lora_B))


def test_a_last_shard_of_fewer_rows_changes_nothing():
    found = on_ranks(3, on_a_third)
    logits, targets, weights = drawn()
    learning = logits.clone().requires_grad_()
    wanted = F.cross_entropy(learning[:, :SIZE], targets, reduction="none")
    (wanted * weights).sum().backward()
    for loss, _, joined, _ in found:
        assert loss.tolist() == pytest.approx(wanted.tolist(), rel=1e-13)
        assert torch.equal(joined, logits)
    gradient = torch.cat([gradient for _, gradient, *_ in found], 1)
    assert (gradient - learning.grad).abs().max() <= 1e-14
    for *_, tensors in found:
        for tensor, expected in zip(tensors, adapted(None), strict=True):
            torch.testing.assert_close(tensor, expected, rtol=1e-12, atol=1e-12)
