"""Saves beside training on two ranks: what one cannot do or has wrong, both learn."""

import errno
import os
from pathlib import Path

import pytest
import torch
from harness import on_ranks
from tiny import randomize, tiny_config

from titan_dit.checkpoint import checkpoint, store, torch_files
from titan_dit.checkpoint.planning import Plans
from titan_dit.config.section import UserError
from titan_dit.ranks.failure import Disruption
from titan_dit.ranks.process_group import Ranks
from titan_dit.trainer import Trainer

pytestmark = pytest.mark.timeout(300)


def trainer_in(world, folder, **sections):
    checkpoint = {"every": 10, "max_failures": 2}
    trainer = Trainer(
        tiny_config(job={"dir": str(folder)}, checkpoint=checkpoint, **sections), world
    )
    randomize(trainer.parameters)
    return trainer


def fail(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/the/disk")


def no_memory(*args, **kwargs):
    raise RuntimeError("can't allocate memory")


FAILURES = {
    "folder on the first": (0, store.Disk, "begin"),
    "tensors on the second": (1, torch_files.Digesting, "write"),
    "tensors on both": (None, torch_files.Digesting, "write"),
    "memory on the second": (1, torch, "_foreach_copy_"),
    "manifest on the first": (0, store.Disk, "write"),
}


def saved_with_failures(world, folder):
    """The messages of a save with each failure, and of the good ones between them."""
    trainer, said = trainer_in(world, folder), {}
    for number, (name, (rank, owner, attribute)) in enumerate(FAILURES.items(), 1):
        original = getattr(owner, attribute)
        trainer.step = number * 10
        if rank in (None, world.rank):
            setattr(owner, attribute, no_memory if owner is torch else fail)
        trainer.save()
        trainer.checkpoints.wait()
        setattr(owner, attribute, original)
        said[name] = trainer.checkpoints.poll()
        partial = f"step-{trainer.step:08d}.partial"
        left = [path.name for path in trainer.checkpoints.folder.glob(partial)]
        trainer.step += 5
        trainer.save()
        trainer.checkpoints.finish()
        said[name] += left + trainer.checkpoints.poll()
        # How long one had to wait is the machine's affair.
        said[name] = [line for line in said[name] if not line.startswith("waited")]
    return said


def test_what_one_rank_cannot_save_all_learn_of_and_go_on(tmp_path):
    first, second = on_ranks(2, saved_with_failures, str(tmp_path))
    assert first == second
    for number, (name, (rank, owner, _)) in enumerate(FAILURES.items(), 1):
        failed, saved = first[name]
        what = "can't allocate memory" if owner is torch else "No space left on device: /the/disk"
        culprit = f"rank {rank or 0}: {what}"
        assert failed.startswith(f"step {number * 10} was not saved"), name
        assert culprit in failed, name
        assert saved == f"saved {tmp_path}/checkpoints/step-{number * 10 + 5:08d}", name


def ended_by_failures(world, folder):
    trainer = trainer_in(world, folder)
    if world.rank == 1:
        torch_files.Digesting.write = fail
    said = []
    try:
        for trainer.step in (10, 20, 30):
            trainer.save()
    except UserError as error:
        said.append(str(error))
    return trainer.step, said


def test_too_many_failures_end_all_ranks_at_the_same_step(tmp_path):
    first, second = on_ranks(2, ended_by_failures, str(tmp_path))
    assert first == second
    step, [message] = first
    assert step == 30
    assert "max_failures=2" in message
    assert "rank 1: No space left on device" in message


def saved_and_trained_on(world, folder):
    """Weights as they were at the save; the same, loaded after training went on beside it."""
    trainer = trainer_in(world, folder)
    batches = trainer.batches()
    trainer.step = 1
    trainer.train_step(next(batches))
    trainer.save()
    expected = [p.detach().full_tensor().clone() for p in trainer.parameters.values()]
    for trainer.step in (2, 3, 4):
        trainer.train_step(next(batches))
        trainer.report_saves()
    trainer.checkpoints.finish()
    other = trainer_in(world, folder)
    other.resume()
    found = [p.detach().full_tensor() for p in other.parameters.values()]
    return other.step, all(map(torch.equal, found, expected))


def refusals_of_replicas(world, folder):
    """What a start and two saves say to bits flipped on the second rank, the last time none."""
    trainer = trainer_in(world, folder, parallel={"dp_replicate": 2, "dp_shard": 1})
    bits, refusals = trainer.parameters["head.out.bias"].to_local().view(torch.int32), []
    # In the last element: its last bit, one of its exponent, none.
    for step, flip, act in ((0, 1, trainer.fit), (7, 2**30, trainer.save), (8, 0, trainer.save)):
        trainer.step = step
        bits[-1] ^= flip * world.rank
        try:
            act()
            refusals.append(None)
        except Disruption as refusal:
            refusals.append(str(refusal))
        bits[-1] ^= flip * world.rank
    trainer.checkpoints.finish()
    return refusals


def plans_for_a_change_on_one_rank(world, folder):
    """Global plans made by each of four saves, and what the last two load."""
    made, make, ranks, kept = [], Plans.make, Ranks.with_own_group(), Plans()
    Plans.make = lambda *arguments: (made.append(1), make(*arguments))
    numbers, loaded = [], []
    for step in range(4):
        tensors = {"model": {"w": torch.full((4,), float(step))}}
        if step >= 2 and world.rank:
            tensors["model"]["b"] = torch.full((3,), float(step))
        checkpoint.write(folder / f"plan-{step}", tensors, {}, ranks, plans=kept)
        numbers.append(len(made))
    Plans.make = make
    for step in (2, 3):
        target = {"model": {"w": torch.zeros(4), "b": torch.zeros(3)}}
        checkpoint.load(folder / f"plan-{step}", target)
        loaded.append([sorted(set(values.tolist())) for values in target["model"].values()])
    return numbers, loaded


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    """One launch for the tests below."""
    folder = tmp_path_factory.mktemp("runs")
    return folder, on_ranks(2, two_runs_in, str(folder))


def two_runs_in(world, folder):
    copies = refusals_of_replicas(world, f"{folder}/copies")
    plans = plans_for_a_change_on_one_rank(world, Path(folder))
    return saved_and_trained_on(world, f"{folder}/beside"), copies, plans


def test_training_beside_a_save_does_not_change_what_is_saved(two_runs):
    folder, ranks = two_runs
    assert [beside for beside, _, _ in ranks] == [(1, True)] * 2
    saved = folder / "beside" / "checkpoints"
    assert [path.name for path in saved.iterdir()] == ["step-00000001"]


def test_a_change_on_one_rank_is_planned_by_all(two_runs):
    _, ranks = two_runs
    assert [plans for _, _, plans in ranks] == [([1, 1, 2, 2], [[[2.0]] * 2, [[3.0]] * 2])] * 2


def test_replicas_that_differ_in_a_bit_neither_start_nor_save(two_runs):
    folder, ((_, first, _), (_, second, _)) = two_runs
    assert first == second
    start, save, equal = first
    differ = (
        "[parallel] dp_replicate=2: the weights of rank 1 differ from those of rank 0 in "
        "head.out.bias at "
    )
    assert start.startswith(f"{differ}the start. If the model has none of its own, leave")
    assert save.startswith(f"{differ}step 7. Resume from a checkpoint")
    assert equal is None
    assert not (folder / "copies" / "config.toml").exists()
    saved = folder / "copies" / "checkpoints"
    assert [path.name for path in saved.iterdir()] == ["step-00000008"]
