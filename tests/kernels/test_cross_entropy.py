"""Cross entropy over a vocabulary: torch's values and gradients, in the memory of the logits."""

import threading

import pytest
import torch
import torch.nn.functional as F

from titan_dit.dry_run.memory import MemoryLog, StorageKind
from titan_dit.kernels import cross_entropy as kernel
from titan_dit.kernels.cross_entropy import VocabularyShard, cross_entropy

TOKENS, ROWS, SIZE = 37, 256, 200


def drawn(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, ROWS, generator=generator, dtype=torch.float64) * 4
    logits[:, SIZE:] += 50  # Padding would take all of the softmax.
    targets = torch.randint(SIZE, (TOKENS,), generator=generator)
    targets[:2] = torch.tensor([0, SIZE - 1])
    weights = torch.rand(TOKENS, generator=generator, dtype=torch.float64)
    return logits.to(dtype), targets, weights


def expected(dtype):
    logits, targets, weights = drawn(dtype)
    logits = logits.double().requires_grad_()
    loss = F.cross_entropy(logits[:, :SIZE], targets, reduction="none")
    (loss * weights).sum().backward()
    return loss.detach(), logits.grad


TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 5e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("chunk", [kernel.CHUNK, 10 * ROWS])
def test_loss_and_gradient_are_torchs_without_the_padding(dtype, chunk, monkeypatch):
    monkeypatch.setattr(kernel, "CHUNK", chunk)
    logits, targets, weights = drawn(dtype)
    wanted_loss, wanted = expected(dtype)
    logits.requires_grad_()
    # Not a leaf: backward overwrites the memory of the logits.
    loss = cross_entropy(logits * 1, targets, SIZE)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    (loss * weights.to(loss.dtype)).sum().backward()
    assert (loss - wanted_loss).abs().max() <= max(TOLERANCE[dtype], 1e-14) * 10
    assert (logits.grad - wanted).abs().max() <= TOLERANCE[dtype]
    assert not logits.grad[:, SIZE:].any()


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_shards_of_the_vocabulary_give_the_whole_loss_and_gradient(shards):
    """With 8 shards the last one holds padding alone, the one before a part."""
    logits, targets, weights = drawn(torch.float64)
    wanted_loss, wanted = expected(torch.float64)
    barrier, width = threading.Barrier(shards), ROWS // shards
    boxes, results = [None] * shards, [None] * shards

    def reduced(rank, value, operation):
        boxes[rank] = value.clone()
        barrier.wait()
        total = operation(torch.stack(boxes))
        barrier.wait()
        return value.copy_(total)

    def run(rank):
        part = logits[:, rank * width : (rank + 1) * width].clone().requires_grad_()
        shard = VocabularyShard(
            first=rank * width,
            largest=lambda value: reduced(rank, value, lambda all: all.amax(0)),
            total=lambda value: reduced(rank, value, lambda all: all.sum(0)),
        )
        loss = cross_entropy(part * 1, targets, SIZE, shard)
        (loss * weights).sum().backward()
        results[rank] = loss.detach(), part.grad

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(shards)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for loss, _ in results:
        assert (loss - wanted_loss).abs().max() <= 1e-13
    found = torch.cat([gradient for _, gradient in results], 1)
    assert (found - wanted).abs().max() <= 1e-14


def peak_bytes_per_logit(dtype, score):
    tokens, hidden, rows = 1024, 32, 8192
    x = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
    weight = torch.randn(rows, hidden, dtype=dtype, requires_grad=True)
    targets = torch.randint(rows, (tokens,))
    log = MemoryLog()
    with log, log.phase("head", StorageKind.ACTIVATIONS):
        log.begin()
        score(F.linear(x, weight), targets).sum().backward()
    return log.peak().total / (tokens * rows)


def test_the_head_takes_at_most_four_bytes_a_logit():
    def plain(logits, targets):
        return F.cross_entropy(logits.float(), targets, reduction="none")

    def ours(logits, targets):
        return cross_entropy(logits, targets, 8192)

    assert peak_bytes_per_logit(torch.bfloat16, plain) > 11
    assert peak_bytes_per_logit(torch.bfloat16, ours) <= 3
    assert peak_bytes_per_logit(torch.float32, ours) <= 5
