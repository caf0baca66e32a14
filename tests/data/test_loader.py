import itertools
import os
import signal

import pytest
import torch

from titan_dit.data import loader
from titan_dit.data.base import DataFacts, Source
from titan_dit.data.latents import Digits
from titan_dit.data.order import BatchPlan, EpochOrder, RankOrder
from titan_dit.failure import Disruption
from titan_dit.models.dit import DiTConfig
from titan_dit.section import UserError

MODEL = DiTConfig(hidden=8, layers=1, heads=1, patch=2, latent_size=8, channels=1, num_classes=10)
CPU = torch.device("cpu")
STATIC = MODEL.static(CPU)


def batches(count, rank=0, ranks=1, cursor=0, workers=0, global_batch=24):
    source = Digits().open()
    order = RankOrder(BatchPlan(global_batch), EpochOrder(5, len(source)), rank, ranks)
    endless = loader.load(source, order, cursor, MODEL, CPU, seed=5, workers=workers)
    return list(itertools.islice(endless, count))


def assert_equal(a, b):
    assert torch.equal(a.tokens, b.tokens)
    assert torch.equal(a.labels, b.labels)
    assert torch.equal(a.sample_numbers, b.sample_numbers)
    assert torch.equal(a.weight, b.weight)
    assert a.total_weight == b.total_weight


def test_a_batch_holds_the_samples_that_its_numbers_stand_for():
    source, epochs = Digits().open(), EpochOrder(5, 1797)
    for batch in batches(3, cursor=1797 - 40):  # across the end of an epoch
        for number, tokens, label in zip(
            batch.sample_numbers.tolist(), batch.tokens, batch.labels, strict=True
        ):
            sample = source[epochs.rows([number])[0]]
            assert torch.equal(tokens, MODEL.tokenize(sample.latent[None].float())[0])
            assert label == sample.label
        assert torch.equal(batch.static["positions"], STATIC["positions"])
        assert batch.tokens.dtype == torch.float32
        assert batch.labels.dtype == batch.sample_numbers.dtype == torch.int64


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_shares_of_the_ranks_make_up_the_whole_batch(ranks):
    whole = batches(2, cursor=1780)
    shares = [batches(2, rank, ranks, cursor=1780) for rank in range(ranks)]
    for step in range(2):
        parts = [share[step] for share in shares]
        for name in ("tokens", "labels", "sample_numbers", "weight"):
            together = torch.cat([getattr(part, name) for part in parts])
            assert torch.equal(together, getattr(whole[step], name))
        assert sum(part.weight.sum() for part in parts) == whole[step].total_weight == 24
        assert all(part.total_weight == 24 for part in parts)


@pytest.mark.parametrize("ranks", [5, 7])
def test_rows_that_only_fill_up_have_no_weight(ranks):
    (whole,) = batches(1, cursor=1780)
    parts = [batches(1, rank, ranks, cursor=1780)[0] for rank in range(ranks)]
    assert len({len(part.tokens) for part in parts}) == 1
    assert sum(len(part.tokens) for part in parts) > 24
    for name in ("tokens", "labels", "sample_numbers"):
        real = [getattr(part, name)[part.weight > 0] for part in parts]
        assert torch.equal(torch.cat(real), getattr(whole, name))
    for part in parts:
        assert part.total_weight == 24
        assert set(part.weight.tolist()) <= {0.0, 1.0}
        assert part.tokens.isfinite().all()


def test_workers_give_the_same_batches_in_the_same_order():
    alone, helped = batches(7, cursor=1700), batches(7, cursor=1700, workers=2)
    for a, b in zip(alone, helped, strict=True):
        assert_equal(a, b)


class Killed(Source):
    """Ends the process that reads it, as the kernel does where memory runs out."""

    facts = DataFacts(shape=(1, 8, 8), count=99, num_classes=10)

    def read(self, rows):
        os.kill(os.getpid(), signal.SIGKILL)


class Unreadable(Source):
    """What was there when it was opened is gone, or its disk fails."""

    facts = DataFacts(shape=(1, 8, 8), count=99, num_classes=10)

    def __init__(self, error):
        self.error = error

    def read(self, rows):
        raise self.error


@pytest.mark.parametrize("error", [UserError("a/shard"), OSError(116, "Stale", "a/shard")])
def test_what_cannot_be_read_in_training_may_be_tried_again(error):
    order = RankOrder(BatchPlan(4), EpochOrder(5, 99), 0, 1)
    with pytest.raises(Disruption, match="a/shard"):
        next(loader.load(Unreadable(error), order, 0, MODEL, CPU, seed=5, workers=1))


def test_a_killed_worker_is_told_and_may_be_tried_again():
    order = RankOrder(BatchPlan(4), EpochOrder(5, 99), 0, 1)
    with pytest.raises(Disruption, match=r"a data worker was killed: not enough memory\?"):
        next(loader.load(Killed(), order, 0, MODEL, CPU, seed=5, workers=2))


def test_loading_from_a_cursor_continues():
    whole = batches(6)
    for a, b in zip(whole[4:], batches(2, cursor=4 * 24), strict=True):
        assert_equal(a, b)


def test_moving_a_batch_keeps_all_of_it():
    (batch,) = batches(1)
    moved = batch.to(CPU)
    assert_equal(moved, batch)
    on_meta = batch.to(torch.device("meta"))
    assert all(
        getattr(on_meta, name).is_meta for name in ("tokens", "labels", "sample_numbers", "weight")
    )
