"""A step, a save, a preview and the first lines of a trainer of one process."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from harness import on_ranks
from tiny import randomize, tiny_config

from titan_dit.checkpoint.record import read_record
from titan_dit.trainer import Trainer

RANKS = (0, 3)
"""What a trainer of one process takes itself for."""


def trainer_in(world, folder, name, rank=0, **sections):
    """A trainer with random weights; its average keeps the initial ones."""
    trainer = Trainer(tiny_config(job={"dir": f"{folder}/{name}"}, **sections), world)
    trainer.world = replace(world, rank=rank)
    randomize(trainer.parameters)
    return trainer


def one_step(world, folder, rank):
    """Step 5: the loss, the rate returned and used, what the guard notes, the next cursor."""
    training, rate = {"steps": 100, "global_batch_size": 16}, {"warmup_steps": 10}
    sections = {"training": training, "lr_scheduler": rate, "optimizer": {"lr": 1.0}}
    trainer = trainer_in(world, folder, f"steps-{rank}", rank, **sections)
    trainer.step, trainer.cursor = 5, 16
    loss, _, lr = trainer.train_step(next(trainer.batches()))
    [noted] = trainer.guard.unread
    used = {group["lr"] for group in trainer.optimizer.param_groups}
    return loss.item(), lr, used, (noted.step, noted.cursor), trainer.cursor, trainer.meter.steps


def saved_after_a_bad_step(world, folder):
    """Steps that are not judged before the save, those after it, and what was saved."""
    trainer = trainer_in(world, folder, "saved", checkpoint={"every": 2})
    trainer.open_run_directory()
    trainer.step, batch = 1, next(trainer.batches())
    next(iter(trainer.parameters.values())).detach().fill_(float("nan"))
    trainer.train_step(batch)
    before = len(trainer.guard.unread)
    trainer.save()
    trainer.checkpoints.finish()
    [checkpoint] = (Path(folder) / "saved" / "checkpoints").glob("step-*")
    return before, len(trainer.guard.unread), read_record(checkpoint)


def drawn(world, folder):
    """A preview of the run, and the same one of the averaged and of the raw weights."""
    trainer = trainer_in(world, folder, "drawn", sampling={"every": 1, "num": 4, "steps": 2})
    trainer.open_run_directory()
    trainer.step = 7
    trainer.preview()
    config, share = trainer.config, trainer.data_share

    def of_its_weights():
        preview = trainer.objective.preview(
            trainer.executor.predict, config.sampling, config.generation, 0, share
        )
        preview.write(Path(folder) / "preview.png")
        return (Path(folder) / "preview.png").read_bytes()

    with trainer.ema.swapped_in():
        averaged = of_its_weights()
    file = Path(folder) / "drawn" / "samples" / "step-00000007.png"
    return file.read_bytes(), averaged, of_its_weights()


def begun_from_weights(world, folder):
    """Names of the previews of a run of three steps from the weights of another one."""
    steps = {"steps": 1, "global_batch_size": 16}
    keys = {"training": steps, "checkpoint": {"every": 1}}
    Trainer(tiny_config(job={"dir": f"{folder}/base"}, **keys), world).fit()
    every = {"every": 2, "num": 4, "steps": 2}
    keys = {"sampling": every, "training": steps | {"steps": 3}}
    keys["checkpoint"] = {"init": f"{folder}/base", "every": 0}
    Trainer(tiny_config(job={"dir": f"{folder}/begun"}, **keys), world).fit()
    return sorted(file.name for file in (Path(folder) / "begun" / "samples").iterdir())


def first_lines(world, folder, rank):
    trainer = trainer_in(world, folder, f"lines-{rank}", rank)
    with (
        mock.patch("titan_dit.opening.attention_hint", return_value="a hint"),
        mock.patch.object(trainer, "say") as say,
    ):
        trainer.open_run_directory()
    return [line for call in say.mock_calls for line in call.args]


def on_one(world, folder):
    return {
        "steps": [one_step(world, folder, rank) for rank in RANKS],
        "saved": saved_after_a_bad_step(world, folder),
        "drawn": drawn(world, folder),
        "begun": begun_from_weights(world, folder),
        "lines": [first_lines(world, folder, rank) for rank in RANKS],
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return on_ranks(1, on_one, str(tmp_path_factory.mktemp("runs")))[0]


def test_a_step_draws_by_seed_and_number_and_takes_the_rate_of_its_own_number(found):
    on_the_first, on_another = found["steps"]
    assert on_another == on_the_first
    _, lr, used, noted, cursor, num_steps = on_the_first
    assert used == {lr} == {0.5}
    assert noted == (5, 16)
    assert (cursor, num_steps) == (32, 1)


def test_a_save_reads_the_verdicts_of_its_own_steps_first(found):
    before, after, record = found["saved"]
    assert (before, after) == (1, 0)
    assert (record["step"], record["cursor"], record["guard"]["nan_steps"]) == (1, 16, 1)


def test_previews_are_drawn_with_the_averaged_weights(found):
    preview, averaged, raw = found["drawn"]
    assert preview == averaged != raw


def test_weights_of_another_run_are_drawn_before_the_first_step(found):
    assert found["begun"] == [f"step-{step:08d}.png" for step in (0, 2, 3)]


def test_the_first_rank_says_what_a_user_had_better_know(found):
    first, another = found["lines"]
    assert "a hint" in first
    assert another
    assert "a hint" not in another
