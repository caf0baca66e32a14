import atexit
import dataclasses
import errno
import itertools
import multiprocessing
import os
import pickle
import signal

import forked
import pytest
import torch

from titan_dit.config.section import UserError
from titan_dit.data import loader
from titan_dit.data.base import DataFacts, Field, Source
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.data.order import BatchPlan, EpochOrder, RankOrder
from titan_dit.data.sections import Digits
from titan_dit.ranks.failure import Disruption

CPU = torch.device("cpu")
FIELDS = ("latent", "label")


def anything(fields):
    """Accept all fields."""


def batches(count, rank=0, ranks=1, cursor=0, workers=0, global_batch=24):
    source = Digits().open()
    order = RankOrder(BatchPlan(global_batch), EpochOrder(5, len(source)), rank, ranks)
    endless = loader.load(source, order, cursor, anything, CPU, workers=workers)
    return list(itertools.islice(endless, count))


def named(batch, name):
    """Return a field or an attribute of a batch."""
    return batch.fields[name] if name in FIELDS else getattr(batch, name)


def assert_equal(a, b):
    assert a.fields.keys() == b.fields.keys() == set(FIELDS)
    for name in FIELDS:
        assert torch.equal(a.fields[name], b.fields[name])
    assert torch.equal(a.sample_numbers, b.sample_numbers)
    assert torch.equal(a.weight, b.weight)
    assert a.total_weight == b.total_weight


def test_a_batch_holds_the_samples_that_its_numbers_stand_for():
    source, epochs = Digits().open(), EpochOrder(5, 1797)
    for batch in batches(3, cursor=1797 - 40):  # across the end of an epoch
        for number, latent, label in zip(
            batch.sample_numbers.tolist(), *(batch.fields[name] for name in FIELDS), strict=True
        ):
            sample = source[epochs.rows([number])[0]]
            assert torch.equal(latent, sample["latent"])
            assert label == sample["label"]
        assert batch.fields["latent"].dtype == torch.float16  # As it is stored.
        assert batch.fields["label"].dtype == batch.sample_numbers.dtype == torch.int64


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_shares_of_the_ranks_make_up_the_whole_batch(ranks):
    whole = batches(2, cursor=1780)
    shares = [batches(2, rank, ranks, cursor=1780) for rank in range(ranks)]
    for step in range(2):
        parts = [share[step] for share in shares]
        for name in (*FIELDS, "sample_numbers", "weight"):
            together = torch.cat([named(part, name) for part in parts])
            assert torch.equal(together, named(whole[step], name))
        assert sum(part.weight.sum() for part in parts) == whole[step].total_weight == 24
        assert all(part.total_weight == 24 for part in parts)


@pytest.mark.parametrize("ranks", [5, 7])
def test_rows_that_only_fill_up_have_no_weight(ranks):
    (whole,) = batches(1, cursor=1780)
    parts = [batches(1, rank, ranks, cursor=1780)[0] for rank in range(ranks)]
    for name in FIELDS:
        assert len({len(part.fields[name]) for part in parts}) == 1
        assert sum(len(part.fields[name]) for part in parts) > 24
    for name in (*FIELDS, "sample_numbers"):
        real = [named(part, name)[part.weight > 0] for part in parts]
        assert torch.equal(torch.cat(real), named(whole, name))
    for part in parts:
        assert part.total_weight == 24
        assert set(part.weight.tolist()) <= {0.0, 1.0}
        assert part.fields["latent"].isfinite().all()


def test_workers_give_the_same_batches_in_the_same_order():
    alone, helped = batches(7, cursor=1700), batches(7, cursor=1700, workers=2)
    for a, b in zip(alone, helped, strict=True):
        assert_equal(a, b)


class Killed(Source):
    """Kill the reading process, like the OOM killer."""

    facts = LatentFacts(shape=(1, 8, 8), count=99, num_classes=10)
    fields = facts.fields(torch.float32)

    def read(self, rows):
        os.kill(os.getpid(), signal.SIGKILL)


class Unreadable(Source):
    """A dataset whose files are lost, or whose disk fails, after opening."""

    facts = LatentFacts(shape=(1, 8, 8), count=99, num_classes=10)
    fields = facts.fields(torch.float32)

    def __init__(self, error):
        self.error = error

    def read(self, rows):
        raise self.error


@pytest.mark.parametrize("error", [UserError("a/shard"), OSError(116, "Stale", "a/shard")])
def test_what_cannot_be_read_in_training_may_be_tried_again(error):
    order = RankOrder(BatchPlan(4), EpochOrder(5, 99), 0, 1)
    with pytest.raises(Disruption, match="a/shard"):
        next(loader.load(Unreadable(error), order, 0, anything, CPU, workers=1))


def test_an_error_that_is_kept_keeps_no_workers():
    order = RankOrder(BatchPlan(4), EpochOrder(5, 99), 0, 1)
    with pytest.raises(Disruption) as kept:
        next(loader.load(Unreadable(UserError("a")), order, 0, anything, CPU, workers=2))
    assert multiprocessing.active_children() == []
    assert kept.traceback


def keep_a_loader():
    order = RankOrder(BatchPlan(4), EpochOrder(5, 1797), 0, 1)
    batches = loader.load(Digits().open(), order, 0, anything, CPU, workers=2)
    next(batches)
    globals()["kept"] = batches
    for worker in multiprocessing.active_children():
        os.kill(worker.pid, signal.SIGHUP)
    sender = forked.call(os.kill, worker.pid, signal.SIGTERM)  # From Slurm, as it were.
    sender.join()
    next(batches)
    atexit._run_exitfuncs()  # As Python's exit.
    os._exit(7 if multiprocessing.active_children() else 0)


def test_a_program_that_keeps_a_loader_ends_and_only_its_own_exit_ends_workers():
    process = forked.call(keep_a_loader)
    process.join(60)
    assert process.exitcode == 0


def test_a_killed_worker_is_told_and_may_be_tried_again():
    order = RankOrder(BatchPlan(4), EpochOrder(5, 99), 0, 1)
    with pytest.raises(Disruption, match=r"a data worker was killed: not enough memory\?"):
        next(loader.load(Killed(), order, 0, anything, CPU, workers=2))


def test_loading_from_a_cursor_continues():
    whole = batches(6)
    for a, b in zip(whole[4:], batches(2, cursor=4 * 24), strict=True):
        assert_equal(a, b)


def test_moving_a_batch_keeps_all_of_it():
    (batch,) = batches(1)
    moved = batch.to(CPU)
    assert_equal(moved, batch)
    on_meta = batch.to(torch.device("meta"))
    assert all(named(on_meta, name).is_meta for name in (*FIELDS, "sample_numbers", "weight"))


@pytest.mark.parametrize("workers", [0, 1])
def test_what_was_read_is_looked_at_where_it_was_read_and_may_be_refused(workers):
    here = os.getpid()

    def inspect(fields):
        assert fields.keys() == set(FIELDS)
        away = os.getpid() != here
        raise UserError(f"[data] looked at {len(fields['label'])} rows, away={away}")

    order = RankOrder(BatchPlan(4), EpochOrder(5, 1797), 0, 1)
    with pytest.raises(UserError, match=rf"looked at 4 rows, away={workers > 0}") as caught:
        next(loader.load(Digits().open(), order, 0, inspect, CPU, workers=workers))
    assert not isinstance(caught.value, Disruption)  # A retry would read the same data.


@dataclasses.dataclass
class Kinds(Source):
    """Fields of every size and dtype."""

    fields: dict = dataclasses.field(default_factory=dict)
    facts = DataFacts(count=40)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {
            name: torch.randn(field.shape, generator=generator).mul(9).to(field.dtype)
            for name, field in self.fields.items()
        }


KINDS = Kinds(
    {
        "small": Field(torch.float32, (3,)),
        "large": Field(torch.float32, (80, 80)),
        "half": Field(torch.float16, (5,)),
        "small bfloat16": Field(torch.bfloat16, (3,)),
        "large bfloat16": Field(torch.bfloat16, (120, 120)),
        "whole": Field(torch.int64, ()),
        "bytes": Field(torch.uint8, (2, 2)),
        "yes or no": Field(torch.bool, (4,)),
    }
)


def test_what_a_worker_hands_over_comes_out_of_a_pickle_as_it_went_in():
    stored = loader.StoredBatch(KINDS.read(range(4)), torch.arange(4))
    assert loader.is_small(stored.fields["small"])
    assert not loader.is_small(stored.fields["large"])
    assert not loader.is_small(stored.fields["small bfloat16"])
    back = pickle.loads(pickle.dumps(stored))
    assert list(back.fields) == list(stored.fields)
    for name, value in stored.fields.items():
        assert back.fields[name].dtype == value.dtype
        assert torch.equal(back.fields[name], value)
    assert torch.equal(back.sample_numbers, stored.sample_numbers)


def test_fields_of_every_kind_come_out_of_a_worker():
    order = RankOrder(BatchPlan(4), EpochOrder(5, 40), 0, 1)
    alone, helped = (
        next(loader.load(KINDS, order, 8, anything, CPU, workers=workers)) for workers in (0, 1)
    )
    for name in KINDS.fields:
        assert alone.fields[name].dtype == helped.fields[name].dtype == KINDS.fields[name].dtype
        assert torch.equal(alone.fields[name], helped.fields[name])


def test_given_samples_are_loaded_as_training_would_see_them():
    (batch,) = batches(1, cursor=48)
    pairs = [(n, EpochOrder(5, 1797).rows([n])[0]) for n in batch.sample_numbers.tolist()]
    assert_equal(loader.load_samples(Digits().open(), pairs, anything, CPU, 24.0), batch)


@dataclasses.dataclass
class Dying(Kinds):
    """A source whose read ends in a worker as `how` says."""

    how: object = None

    def __getitem__(self, index):
        if self.how and torch.utils.data.get_worker_info():
            self.how()
        return super().__getitem__(index)


def killed_by(number):
    return lambda: os.kill(os.getpid(), number)


def no_memory():
    raise MemoryError


ENDS = {
    "out of memory": (killed_by(signal.SIGKILL), "a data worker was killed: not enough memory"),
    "a page of shared memory": (
        killed_by(signal.SIGBUS),
        "/dev/shm is full .*--data.num_workers 0",
    ),
    "exit": (lambda: os._exit(3), "a data worker was killed"),
    "MemoryError": (no_memory, "a data worker was killed: not enough memory"),
}


@pytest.mark.parametrize("case", ENDS)
@pytest.mark.timeout(60)
def test_a_worker_that_ends_ends_the_run_with_a_line(case):
    how, words = ENDS[case]
    order = RankOrder(BatchPlan(4), EpochOrder(5, 40), 0, 1)
    with pytest.raises(Disruption, match=words) as error:
        next(loader.load(Dying(KINDS.fields, how), order, 0, anything, CPU, workers=1))
    assert "\n" not in str(error.value)


@pytest.mark.timeout(60)
def test_full_shared_memory_ends_the_run_where_a_batch_cannot_be_sent(monkeypatch):
    def full(tensor):
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space")

    monkeypatch.setattr(torch.Tensor, "share_memory_", full)  # In the worker, which is forked.
    order = RankOrder(BatchPlan(4), EpochOrder(5, 40), 0, 1)
    with pytest.raises(Disruption, match=r"^\[data\] /dev/shm is full .*--data\.num_workers 0$"):
        next(loader.load(KINDS, order, 0, anything, CPU, workers=1))
    # Any other error of the thread that sends it: the batch would never come.
    monkeypatch.undo()
    monkeypatch.setattr(loader.StoredBatch, "__reduce__", full)
    with pytest.raises(Disruption, match="a data worker was killed"):
        next(loader.load(KINDS, order, 0, anything, CPU, workers=1))


def test_an_error_of_a_users_source_keeps_its_traceback():
    def wrong():
        raise RuntimeError("mine")

    order = RankOrder(BatchPlan(4), EpochOrder(5, 40), 0, 1)
    before = {child.pid for child in multiprocessing.active_children()}
    with pytest.raises(RuntimeError, match="mine") as caught:
        next(loader.load(Dying(KINDS.fields, wrong), order, 0, anything, CPU, workers=1))
    # Workers ignore SIGTERM: one that the traceback keeps would keep the process, too.
    assert caught.tb
    assert {child.pid for child in multiprocessing.active_children()} == before


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "/dev/shm is full"),
        (errno.EAGAIN, r"num_workers=2 cannot start: .*Set fewer"),
    ],
)
def test_workers_that_cannot_start_are_a_line(monkeypatch, number, words):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(loader.StatefulDataLoader, "__iter__", refuse)
    order = RankOrder(BatchPlan(4), EpochOrder(5, 40), 0, 1)
    with pytest.raises(Disruption, match=words):
        next(loader.load(KINDS, order, 0, anything, CPU, workers=2))
