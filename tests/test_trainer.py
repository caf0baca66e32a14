"""A step, a save and a preview of the trainer, with stand-ins for all its parts."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from tiny import tiny_config

from titan_dit.config.layout import CompileConfig
from titan_dit.config.training import LRSchedulerConfig
from titan_dit.data.order import BatchPlan, EpochOrder
from titan_dit.opening import Opened
from titan_dit.optim.adamw import AdamWConfig
from titan_dit.optim.lr_schedule import learning_rate
from titan_dit.optim.optimizer import build_optimizer
from titan_dit.recovery.ledger import Ledger
from titan_dit.trainer import Trainer


@pytest.mark.parametrize("rank", [0, 3])
def test_a_step_draws_by_seed_and_number_and_takes_the_rate_of_its_own_number(rank):
    schedule, drawn, judged = LRSchedulerConfig(warmup_steps=10), [], []
    weight = torch.nn.Parameter(torch.ones(2))

    def step(prepared, loss_scale):
        weight.grad = 3.0 * loss_scale.expand(2)
        return torch.tensor(0.5)

    def check(*arguments):
        judged.append(arguments)
        return torch.tensor(False)

    trainer = SimpleNamespace(
        config=SimpleNamespace(
            job=SimpleNamespace(seed=7),
            compile=CompileConfig(),
            lr_scheduler=schedule,
            optimizer=SimpleNamespace(lr=1.0),
            training=SimpleNamespace(steps=100, max_grad_norm=0.0),
        ),
        built=SimpleNamespace(prepare=lambda batch, rng: drawn.append(rng)),
        world=SimpleNamespace(rank=rank),
        executor=SimpleNamespace(step=step),
        profile=SimpleNamespace(mark=lambda name: nullcontext()),
        stop=SimpleNamespace(flag=lambda: None),
        parameters={"w": weight},
        optimizer=build_optimizer({"w": weight}, AdamWConfig(lr=1.0), None),
        guard=SimpleNamespace(check=check, loss_scale=torch.tensor(64.0)),
        ema=SimpleNamespace(update=lambda step, skip: None),
        batch_plan=BatchPlan(4),
        step=5,
        cursor=16,
        meter=SimpleNamespace(steps=0),
    )
    batch = SimpleNamespace(sample_numbers=torch.arange(16, 20))
    _, norm, lr = Trainer.train_step(trainer, batch)
    assert drawn[0].seed == 7
    assert drawn[0].sample_numbers.tolist() == [16, 17, 18, 19]
    assert lr == learning_rate(schedule, 1.0, 5, 100) == 0.5
    assert trainer.optimizer.param_groups[0]["lr"] == 0.5
    # The norm without the loss scale and before clipping, and the cursor before the step.
    assert norm.item() == pytest.approx(18**0.5)
    assert judged[0][:2] == (5, 16)
    assert (trainer.cursor, trainer.meter.steps) == (20, 1)


def test_a_save_reads_the_verdicts_of_its_own_steps_first():
    trainer, said = mock.MagicMock(), []
    trainer.config, trainer.ledger = tiny_config(), Ledger()
    trainer.step, trainer.cursor, trainer.epochs = 2, 32, EpochOrder(0, 64)
    trainer.identity.as_record = dict
    trainer.mesh.sizes.product.return_value = 1  # No replicas to compare.
    trainer.guard.unread = ["a step that is still on the device"]
    trainer.read_guard = lambda: said.append("read")
    trainer.guard.state = lambda: said.append("state") or {"nan_steps": 1}
    trainer.checkpoints.save = lambda step, tensors, record, whole: said.append(record)
    Trainer.save(trainer)
    assert said[:2] == ["read", "state"]
    assert (said[2]["step"], said[2]["cursor"], said[2]["nan_steps"]) == (2, 32, 1)


def test_previews_are_drawn_with_the_averaged_weights():
    trainer, weights = mock.MagicMock(), ["the raw ones"]

    @contextmanager
    def swapped_in():
        weights.append("the averaged ones")
        yield
        weights.pop()

    trainer.ema.swapped_in = swapped_in
    drawn = []

    def preview(*_):
        drawn.append(weights[-1])
        return "a picture"

    trainer.step, trainer.objective.preview = 7, preview
    Trainer.preview(trainer)
    assert drawn == ["the averaged ones"]
    assert trainer.log.show.mock_calls == [mock.call(7, "a picture")]
    assert weights == ["the raw ones"]


@pytest.mark.parametrize("is_main", [True, False])
def test_the_first_rank_says_what_a_user_had_better_know(is_main, monkeypatch):
    monkeypatch.setattr("titan_dit.opening.attention_hint", lambda *_: "a line")
    monkeypatch.setattr("titan_dit.opening.format_hint", lambda *_: None)
    trainer = mock.MagicMock(config=tiny_config())
    trainer.world.is_main, trainer.built.notes = is_main, ["a note"]
    trainer.objective.hints = lambda source: ["a hint"]
    parts = mock.Mock(objective=trainer.objective)
    trainer.opened.hints = lambda *given: Opened.hints(parts, *given)
    Trainer.open_run_directory(trainer)
    assert (mock.call("a note", "a hint", "a line") in trainer.say.mock_calls) == is_main
