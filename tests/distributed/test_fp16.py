"""fp16 runs: scales and skipped steps of every layout, small gradients, resume, rollback."""

import json
import math

import pytest
import torch
from harness import on_ranks
from test_grid import CP, DP, PP, TP, schedule
from tiny import assert_same_gradients, randomize, state, tiny_config, whole
from tiny_gpt import gpt_config

from titan_dit.optim.gradient_norm import clip_norm
from titan_dit.recovery import bad_steps
from titan_dit.rng import SampleRNG
from titan_dit.trainer import Trainer

ZBV = schedule("zbv_zero_bubble")
CASES = {1: [({}, {})], 2: [(PP, {}), (PP, ZBV), (TP, {}), (DP, {}), (CP, {})]}


def trainer_in(world, layout=({}, {}), precision=(), family=tiny_config, **sections):
    parallel, pipeline = layout
    sections.setdefault("training", {"global_batch_size": 8, "microbatch_size": 4})
    keys = {"dtype": "fp16", **dict(precision)}
    config = family(parallel=parallel, pipeline=pipeline, precision=keys, **sections)
    trainer = Trainer(config, world)
    randomize(trainer.parameters)
    return trainer


def steps_of(trainer, numbers, batches=None):
    """(loss scale, kind, loss, gradient norm) of each step."""
    batches, found = batches or trainer.batches(), []
    for trainer.step in numbers:
        scale = trainer.guard.loss_scale.item()
        trainer.train_step(next(batches))
        reading = trainer.guard.read(trainer.mesh.sum_loss)
        kinds = [bad.kind for bad in reading.bad] or ["good"]
        found.append((scale, *kinds, reading.loss, reading.grad_norm))
    return found


def overflow_of_one_rank(trainer):
    """A step with an infinite gradient on the last rank alone, in a parameter of its last stage.

    Returns its kind, whether the rank's tensors stayed as they were, and the scales around it.
    """
    before, first = local_tensors(trainer), trainer.guard.loss_scale.item()
    step = trainer.executor.step

    def spoiled(*given):
        loss = step(*given)
        if trainer.world.rank == trainer.world.size - 1:
            gradient = list(trainer.parameters.values())[-1].grad
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            local.view(-1)[0] = math.inf
        return loss

    trainer.executor.step = spoiled
    ((_, kind, _, _),) = steps_of(trainer, [trainer.step + 1])
    after = local_tensors(trainer)
    same = all(torch.equal(after[name], value) for name, value in before.items())
    return kind, same, first, trainer.guard.loss_scale.item()


def local_tensors(trainer):
    tensors = trainer.tensors()
    found = {f"model.{name}": tensor for name, tensor in tensors["model"].items()}
    for name, moments in tensors["optimizer"].items():
        found |= {f"{name}.{key}": value for key, value in moments.items()}
    return {
        name: (t.to_local() if hasattr(t, "to_local") else t).detach().clone()
        for name, t in found.items()
    }


def from_a_huge_scale(world, family=tiny_config):
    """By layout: overflows until the scale fits, growth, the next overflow; then one of a rank."""
    start = {tiny_config: 2.0**17, gpt_config: 2.0**22}[family]
    keys = {"loss_scale_init": start, "loss_scale_window": 2, "loss_scale_hysteresis": 1}
    found = {}
    for layout in CASES[world.size]:
        trainer = trainer_in(world, layout, keys, family, model={"num_layers": 4})
        steps = steps_of(trainer, range(1, 10))
        found[json.dumps(layout)] = steps, overflow_of_one_rank(trainer)
    return found


@pytest.fixture(scope="module")
def by_rank():
    return on_ranks(1, from_a_huge_scale) + on_ranks(2, from_a_huge_scale)


def test_every_layout_skips_the_same_steps_with_the_same_scales(by_rank):
    check_scales(by_rank)


@pytest.mark.long
def test_every_layout_of_a_gpt_with_tied_weights_skips_the_same_steps():
    check_scales(
        on_ranks(1, from_a_huge_scale, gpt_config) + on_ranks(2, from_a_huge_scale, gpt_config)
    )


def check_scales(by_rank):
    (expected, _), *others = (found for rank in by_rank for found in rank.values())
    kinds = [kind for _, kind, _, _ in expected]
    assert kinds[:3] == ["overflow"] * 3
    assert kinds.count("good") >= 3
    assert "overflow" in kinds[kinds.index("good") :], "the scale has grown until the next one"
    assert not math.isfinite(expected[0][3])
    for found, _ in others:
        for step, wanted in zip(found, expected, strict=True):
            assert step[:2] == wanted[:2]
            assert step[2] == pytest.approx(wanted[2], rel=2e-3)
            if math.isfinite(wanted[3]):
                assert step[3] == pytest.approx(wanted[3], rel=2e-2)


def test_an_overflow_of_one_stage_or_shard_skips_the_step_on_all_ranks(by_rank):
    for rank in by_rank:
        for layout, (_, (kind, same, before, after)) in rank.items():
            assert kind == "overflow", layout
            assert same, layout
            assert after == before / 2, layout


def small_gradients(world):
    """Gradients of a tiny loss: in fp32, in fp16 with a loss scale, and without one."""
    found = []
    for dtype, scale in (("fp32", 1.0), ("fp16", 2.0**26), ("fp16", 1.0)):
        precision = {"dtype": dtype, "loss_scale": scale}
        trainer = trainer_in(world, precision=precision, objective={"condition_dropout": 0.0})
        original = trainer.executor.loss
        trainer.executor.loss = lambda *given, loss=original: 1e-7 * loss(*given)
        batch = next(trainer.batches())
        prepared = trainer.built.prepare(batch, SampleRNG(0, batch.sample_numbers))
        trainer.executor.step(prepared, trainer.guard.loss_scale)
        clip_norm(trainer.parameters.values(), 0.0, loss_scale=trainer.guard.loss_scale)
        found.append({name: whole(p.grad) for name, p in trainer.parameters.items()})
    return found


def states_of_two_scales(world, optimizer):
    """Everything after two steps without clipping, with a small and a large constant scale."""
    found = []
    for scale in (2.0**3, 2.0**11):
        training = {"max_grad_norm": 0.0, "global_batch_size": 8}
        keys = {"loss_scale": scale}
        trainer = trainer_in(world, precision=keys, training=training, optimizer=optimizer)
        steps = steps_of(trainer, (1, 2))
        found.append((state(trainer), [norm for *_, norm in steps]))
    return found


def alone(world):
    muon = {"name": "muon", "ns_dtype": "fp32"}
    return small_gradients(world), [states_of_two_scales(world, keys) for keys in ({}, muon)]


@pytest.fixture(scope="module")
def found_alone():
    return on_ranks(1, alone)[0]


def test_gradients_that_vanish_in_fp16_are_kept_by_the_loss_scale(found_alone):
    (exact, scaled, vanished), _ = found_alone
    assert_same_gradients(scaled, exact, tolerance=3e-2)
    zeros = sum((gradient == 0).sum().item() for gradient in vanished.values())
    assert zeros > 0.5 * sum(gradient.numel() for gradient in vanished.values())


def test_norms_moments_and_weights_do_not_depend_on_the_scale_without_clipping(found_alone):
    for (small, norms), (large, same_norms) in found_alone[1]:
        assert norms == pytest.approx(same_norms, rel=1e-3)
        for name, value in small.items():
            size = value.abs().max().item()
            torch.testing.assert_close(large[name], value, rtol=0, atol=2e-2 * size, msg=name)


def run(world, folder, steps, spoiled=(), **sections):
    """A run whose samples `spoiled` are NaN; its rows, faults, weights and ledger."""
    keys = {"loss_scale_init": 2.0**12, "loss_scale_min": 2.0**10, "loss_scale_window": 2}
    training = {"global_batch_size": 8, "steps": steps}
    tables = {"checkpoint": {"every": 4, "keep": 0}, "job": {"dir": str(folder)}, **sections}
    model = {"num_layers": 1}
    trainer = Trainer(
        tiny_config(model=model, training=training, precision={"dtype": "fp16", **keys}, **tables),
        world,
    )
    original, wanted = trainer.batches, torch.tensor(list(spoiled), dtype=torch.int64)

    def batches():
        for batch in original():
            batch.fields["latent"][torch.isin(batch.sample_numbers, wanted)] = math.nan
            yield batch

    trainer.batches = batches
    trainer.fit()
    return state(trainer), trainer.guard.state(), trainer.ledger


def run_then_resumed(world, folder):
    whole_run = run(world, folder / "whole", 12, range(40, 42))
    run(world, folder / "resumed", 6, range(40, 42))
    return whole_run, run(world, folder / "resumed", 12, range(40, 42))


def rows_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_resumed_run_has_the_scales_and_the_bits_of_one_that_was_not_stopped(tmp_path):
    ((expected, found),) = on_ranks(1, run_then_resumed, tmp_path)
    for name, value in expected[0].items():
        assert torch.equal(found[0][name], value), name
    assert found[1:] == expected[1:]
    rows, resumed = rows_of(tmp_path / "whole"), rows_of(tmp_path / "resumed")
    for key in ("loss", "loss_scale", "overflow_steps", "skipped_steps"):
        assert [row[key] for row in rows] == [row[key] for row in resumed]
    faults = bad_steps.read_faults(tmp_path / "whole")
    assert (6, "overflow") in [(line["step"], line["kind"]) for line in faults]
    assert len({row["loss_scale"] for row in rows}) > 2
    # The samples of an overflow count as untrained.
    untrained = [entry.first_step for entry in expected[2].untrained]
    assert 6 in untrained
    assert rows[-1]["overflow_steps"] == len([f for f in faults if f["kind"] == "overflow"])
    assert rows[-1]["nan_steps"] == 0


def rolled_back(world, folder):
    """NaN in steps 6 to 13: overflows down to the least scale, then three bad steps."""
    run(world, folder, 14, range(40, 104), faults={"max_consecutive_bad_steps": 3})


def test_bad_steps_at_the_least_scale_roll_back_to_the_scale_of_the_checkpoint(tmp_path):
    on_ranks(1, rolled_back, tmp_path)
    faults = [
        (line["step"], line["kind"], line.get("loss_scale"))
        for line in bad_steps.read_faults(tmp_path)
    ]
    assert faults == [
        (6, "overflow", 2.0**14),
        (7, "overflow", 2.0**14),
        (8, "overflow", 2.0**13),
        (9, "overflow", 2.0**12),
        (10, "overflow", 2.0**11),
        *((step, "nonfinite", 2.0**10) for step in (11, 12, 13)),
        (13, "rollback", None),
        # From the checkpoint of step 8 on; the samples of the bad steps are skipped.
        (9, "overflow", 2.0**12),
        (10, "overflow", 2.0**11),
    ]
    assert [row["loss_scale"] for row in rows_of(tmp_path)][-4:] == [2.0**10] * 2 + [2.0**11] * 2


TEXT = {
    "model": {"vocab_size": 2048, "sequence_length": 32},
    "data": {"name": "plays", "sequence_length": 32},
}


def losses_of(world, dtype, family):
    training = {"steps": 300, "global_batch_size": 32 if family is tiny_config else 16}
    sections = {} if family is tiny_config else TEXT
    config = family(precision={"dtype": dtype}, training=training, **sections)
    trainer = Trainer(config, world)
    batches, found = trainer.batches(), []
    for trainer.step in range(1, 301):
        trainer.train_step(next(batches))
        reading = trainer.guard.read(trainer.mesh.sum_loss)
        found.append((reading.loss, reading.bad))
    return found


@pytest.mark.long
@pytest.mark.parametrize("family", [tiny_config, gpt_config])
def test_losses_of_300_steps_in_fp16_are_those_of_fp32(family):
    exact, found = (on_ranks(1, losses_of, dtype, family)[0] for dtype in ("fp32", "fp16"))
    assert not any(skipped for _, skipped in found)
    errors = [abs(a / b - 1) for (a, _), (b, _) in zip(found, exact, strict=True)]
    assert max(errors) <= 2e-3
