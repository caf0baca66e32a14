"""Ranks that do not divide the rows of a vocabulary: torch's loss, gradients and logits."""

import pytest
import torch
import torch.nn.functional as F
from harness import on_ranks
from torch.distributed.device_mesh import init_device_mesh

from titan_dit.parallel.vocabulary import score, whole

ROWS, SIZE = 256, 200  # On 3 ranks 86, 86 and 84 rows.


def drawn():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(SIZE, ROWS, generator=generator, dtype=torch.float64)
    return logits, torch.arange(SIZE), torch.rand(SIZE, generator=generator, dtype=torch.float64)


def on_a_third(world):
    mesh = init_device_mesh("cpu", (3,))
    logits, targets, weights = drawn()
    mine = logits.chunk(3, 1)[world.rank].clone().requires_grad_()
    loss = score(mesh, ROWS, mine * 1, targets, SIZE)
    (loss * weights).sum().backward()
    return loss.detach(), mine.grad, whole(mesh, ROWS, mine.detach())


def test_a_last_shard_of_fewer_rows_changes_nothing():
    found = on_ranks(3, on_a_third)
    logits, targets, weights = drawn()
    learning = logits.clone().requires_grad_()
    wanted = F.cross_entropy(learning[:, :SIZE], targets, reduction="none")
    (wanted * weights).sum().backward()
    for loss, _, joined in found:
        assert loss.tolist() == pytest.approx(wanted.tolist(), rel=1e-13)
        assert torch.equal(joined, logits)
    gradient = torch.cat([gradient for _, gradient, _ in found], 1)
    assert (gradient - learning.grad).abs().max() <= 1e-14
