"""Training with [repa]: layouts, resumed runs, its last step, formats, adapters, metrics."""

import json

import pytest
import torch
from harness import on_ranks
from test_grid import CP, DP, PP, TP, schedule
from tiny import graphs_alone, randomize, state, tiny_config, torch_rng, whole
from tiny_gpt import gpt_config
from tiny_joint import joint_config
from tiny_repa import repa, sections

from titan_dit.config.section import UserError
from titan_dit.objectives.repa import FEATURES, alignments
from titan_dit.opening import open_objective, open_source, plan_run
from titan_dit.plan import resolve, with_buckets
from titan_dit.trained_model import load
from titan_dit.trainer import Trainer

OWN = "objective.1.projector.0.weight"
STEPS, LAST = 4, 3


def config_of(folder, parallel=None, pipeline=None, aligns=True, **more):
    own = {
        "model": {"num_layers": 4},
        "training": {"global_batch_size": 8, "microbatch_size": 2, "steps": STEPS},
        "checkpoint": {"every": 2, "async_save": False},
        "job": {"dir": str(folder)},
        "parallel": parallel or {},
        "pipeline": pipeline or {},
        # Else AdamW makes steps of the rounding errors of gradients that are 0.
        "precision": {"dtype": "fp64"},
    }
    own |= sections(last_step=LAST)
    if not aligns:
        del own["repa"]
    for name, table in more.items():
        own[name] = own.get(name, {}) | table
    return tiny_config(**own)


def train(world, config, steps):
    """Train up to a step, as `fit` does, and save after it; the trainer and its rows."""
    trainer = Trainer(config, world)
    if not trainer.checkpoints.complete():
        randomize(trainer.parameters)
    trainer.resume()
    trainer.open_run_directory()
    batches = trainer.batches()
    rows = []
    while trainer.step < steps:
        trainer.step += 1
        _, _, lr = trainer.train_step(next(batches))
        trainer.meter.restart()
        trainer.report(trainer.read_guard(), lr, {})
        rows.append(trainer.row)
    trainer.save()
    trainer.checkpoints.finish()
    return trainer, rows


def numbers_of(rows):
    return [(row["loss"], row.get("repa_loss")) for row in rows]


def alone(world, folder):
    """One process: the whole run in one go, and what differs in other settings."""
    found = {}
    trainer, rows = train(world, config_of(folder / "half"), 2)
    trainer, rows = train(world, config_of(folder / "whole"), STEPS)
    found["whole"] = state(trainer), numbers_of(rows)
    for name, more in (
        ("full", {"activation_checkpoint": {"mode": "full"}}),
        ("compiled", {"compile": {"enabled": True}}),
        ("bf16", {"precision": {"dtype": "bf16"}}),
        ("fp16", {"precision": {"dtype": "fp16"}}),
        ("no_repa", {"aligns": False}),
    ):
        with graphs_alone():
            config = config_of(folder / name, **more)
            trainer, rows = train(world, config, STEPS)
        found[name] = state(trainer), numbers_of(rows)
    return found


def weights_by_step(world, folder):
    """The projector's weights after each step, and what a batch after the last one holds."""
    trainer = Trainer(config_of(folder / "steps", checkpoint={"every": 0}), world)
    batches, found = trainer.batches(), []
    for trainer.step in range(1, STEPS + 1):
        batch = next(batches)
        assert batch.step == trainer.step
        prepared = trainer.built.prepare(batch, torch_rng(trainer, batch))
        trainer.train_step(batch)
        found.append((whole(trainer.parameters[OWN]), FEATURES in prepared.context))
    assert alignments(trainer.executor.model)[0].sums is not None
    return found


def adapted(world, folder):
    """Two steps of [lora] from the whole run's weights; what moved."""
    config = config_of(
        folder / "adapted",
        lora={"rank": 2, "targets": ["blocks.*"]},
        checkpoint={"init": str(folder / "whole"), "init_weights": "model"},
    )
    trainer = Trainer(config, world)
    trainer.resume()
    before = {name: whole(p) for name, p in trainer.parameters.items()}
    batches = trainer.batches()
    for trainer.step in (1, 2):
        trainer.train_step(next(batches))
    return {name for name, p in trainer.parameters.items() if not torch.equal(before[name], p)}


def switched_on(world, folder):
    """[repa] set in a run that has begun without: its step, and the projector before and after."""
    goes_on = {"resume": str(folder / "no_repa"), "allow_changes": True}
    trainer = Trainer(config_of(folder / "switched", checkpoint=goes_on), world)
    before = whole(trainer.parameters[OWN])
    trainer.resume()
    return trainer.step, before, whole(trainer.parameters[OWN])


PICTURED = {"data": {"name": "tiny_repa:Pictured"}, "model": {"num_layers": 4, "in_channels": 3}}
ONLINE = {"repa": {"network": "tiny_repa:squares"}}


def pictured(world, folder):
    """A run on pictures with stored features, and with features that it computes."""
    found = []
    for number, more in enumerate((PICTURED, PICTURED | ONLINE)):
        validated = {"validation": {"every": 2, "samples": 20}}
        config = config_of(folder / f"pictured-{number}", **more, **validated)
        trainer, rows = train(world, config, STEPS)
        batch = next(trainer.batches())
        loss = trainer.validate()["validation_loss"]
        found.append((state(trainer), [*numbers_of(rows), loss], [*batch.fields]))
    return found


def on_one(world, folder):
    found = alone(world, folder)
    others = adapted(world, folder), pictured(world, folder), switched_on(world, folder)
    return found, weights_by_step(world, folder), others


LAYOUTS = [
    (TP, {}),
    (CP, {}),
    (DP, {}),
    (PP, schedule("zbv_zero_bubble")),
    (PP, schedule("1f1b", split=[1, 3])),
]


def on_two(world, folder):
    """The second half of one process's run, in each layout."""
    found = []
    for number, layout in enumerate(LAYOUTS):
        more = {"checkpoint": {"resume": str(folder / "half"), "every": 0}}
        config = config_of(folder / f"two-{number}", *layout, **more)
        trainer, rows = train(world, config, STEPS)
        found.append((state(trainer), numbers_of(rows)))
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("aligned")
    [one] = on_ranks(1, on_one, folder)
    return folder, one, on_ranks(2, on_two, folder)


def test_every_layout_goes_on_as_one_process_does(runs):
    _, ((found, _, _)), by_rank = runs
    wanted, numbers = found["whole"]
    for place, layout in enumerate(LAYOUTS):
        seen = {}
        for ranks in by_rank:
            tensors, rows = ranks[place]
            seen |= tensors
            for (loss, cosine), (own_loss, own_cosine) in zip(rows, numbers[2:], strict=True):
                assert loss == pytest.approx(own_loss, rel=1e-5), layout
                assert (cosine is None) == (own_cosine is None), layout
                assert cosine is None or cosine == pytest.approx(own_cosine, rel=1e-5), layout
        assert seen.keys() == wanted.keys(), layout
        for name, tensor in wanted.items():
            error = (seen[name].double() - tensor.double()).abs().max()
            assert error <= 1e-6 * tensor.abs().max() + 1e-9, (layout, name, error)


def test_the_loss_is_counted_once_where_the_block_runs_twice_or_is_compiled(runs):
    _, (found, _, _), _ = runs
    _, numbers = found["whole"]
    for name, tolerance in (("full", 1e-6), ("compiled", 1e-5), ("bf16", 0.05), ("fp16", 0.05)):
        for own, wanted in zip(found[name][1], numbers, strict=True):
            assert own[0] == pytest.approx(wanted[0], rel=tolerance), name
            if wanted[1] is None:
                assert own[1] is None
            else:
                assert own[1] == pytest.approx(wanted[1], rel=tolerance), name


def test_it_changes_the_weights_before_its_block_and_is_averaged_and_saved(runs):
    folder, (found, _, _), _ = runs
    tensors, _ = found["whole"]
    without, numbers = found["no_repa"]
    assert [cosine for _, cosine in numbers] == [None] * STEPS
    assert set(tensors) - set(without) == {name for name in tensors if ".objective.1." in name}
    changed = {
        n for n in without if n.startswith("model.") and not torch.equal(tensors[n], without[n])
    }
    assert "model.blocks.0.attn.qkv.weight" in changed
    for name in ("model", "ema.0.9", "ema.0.99"):
        assert f"{name}.{OWN}" in tensors
    assert f"optimizer.{OWN}.exp_avg" in tensors
    saved = load(folder / "whole", weights="model")
    assert not [name for name, _ in saved.network.named_parameters() if "objective" in name]
    wanted = tensors["model.head.out.weight"].float()
    assert torch.equal(saved.network.head.out.weight, wanted)


def test_after_the_last_step_the_features_are_left_out_and_the_projector_rests(runs):
    _, (found, weights, _), _ = runs
    assert [has for _, has in weights] == [True, True, True, False]
    one, two, three, four = (weight for weight, _ in weights)
    assert not torch.equal(one, two)
    assert not torch.equal(two, three)
    assert torch.equal(three, four)
    assert [cosine is None for _, cosine in found["whole"][1]] == [False] * LAST + [True]


def test_a_run_that_switches_it_on_begins_with_the_initial_projector(runs):
    _, (_, _, (*_, (step, before, after))), _ = runs
    assert step == STEPS
    assert before.any()
    assert torch.equal(after, before)


def test_adapters_and_the_projector_are_trained_alone(runs):
    _, (_, _, (moved, *_)), _ = runs
    own = {name for name in moved if name.startswith("objective.1.")}
    assert len(own) == 6
    assert moved - own
    assert all("lora_" in name for name in moved - own)


def test_features_that_are_computed_in_steps_are_those_that_are_stored(runs):
    _, (_, _, (_, (stored, computed), _)), _ = runs
    assert "features" in stored[2]
    assert "features" not in computed[2]
    assert stored[1] == computed[1]
    for name, tensor in stored[0].items():
        # In another order in memory: sums over a token's features differ in their last bits.
        torch.testing.assert_close(tensor, computed[0][name], rtol=1e-9, atol=1e-9, msg=name)


def test_the_rows_of_metrics_have_the_loss(runs):
    folder, (found, _, _), _ = runs
    rows = [json.loads(line) for line in (folder / "whole/metrics.jsonl").read_text().splitlines()]
    assert [row.get("repa_loss") for row in rows] == [cosine for _, cosine in found["whole"][1]]
    assert all(-1 <= cosine <= 1 for _, cosine in found["whole"][1] if cosine is not None)


def opened(config):
    """The parts of a run that are checked before any rank trains."""
    plan = plan_run(config, 1)
    return open_objective(config, plan, open_source(config))


def refusal(keys, more):
    with pytest.raises(UserError) as caught:
        opened(tiny_config(**sections(**keys) | more))
    return str(caught.value)


@pytest.mark.parametrize(
    ("keys", "more", "message"),
    [
        ({"block": 4}, {}, "[repa] block=4, but [model] has 3 blocks. Set a number from 1"),
        (
            {"dim": 7},
            {},
            "[repa] dim=7, but the features of [data], of tests:random, have 6 elements. Set dim = "
            "6.",
        ),
        (
            {},
            {"model": {"patch_size": 4}},
            "[repa] the features of [data] have a grid of 4 x 4, but [model] has 2 x 2 tokens. "
            "Encode them with --features-grid 2x2.",
        ),
        (
            {"network": "tiny_repa:squares"},
            {},
            '[repa] network="tiny_repa:squares" sees RGB pixels, but [data] holds [1, 8, 8] that '
            "are none. Leave it out",
        ),
        (
            {"network": "tiny_repa:nose"},
            PICTURED,
            '[repa] network="tiny_repa:nose": ',
        ),
        (
            {},
            {"data": {"name": "digits"}},
            "[repa] block is set, but [data] holds no features of its pictures.",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(keys, more, message):
    found = refusal(keys, more)
    assert found.startswith(message), found
    assert "\n" not in found


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda **repa: gpt_config(**repa), "[repa] aligns networks of pictures, but [objective]"),
        (
            lambda **repa: joint_config("wan", **repa),
            '[repa] aligns networks of pictures, but [model] name="wan" takes clips. Leave [repa]',
        ),
        (
            # 6 x 3 tokens, and 14 of padding.
            lambda **repa: joint_config("z_image", model={"latent_size": [6, 12]}, **repa),
            "[repa] block=2: [model] has 32 tokens for 3 x 6 of the picture: it pads them,",
        ),
    ],
)
def test_networks_that_cannot_be_aligned_are_one_line(config, message):
    with pytest.raises(UserError) as caught:
        resolve(config(repa=repa()), 1)
    assert str(caught.value).startswith(message), str(caught.value)


def test_buckets_are_one_line():
    more = {"data": {"others": [[4, 4]]}, "training": {"global_batch_size": None}}
    more["training"]["tokens_per_step"] = 64
    config = joint_config("joint_dit", repa=repa(), **more)
    plan = resolve(config, 1)
    with pytest.raises(UserError, match=r"^\[repa\] block=2: \[data\] holds 2 buckets"):
        with_buckets(plan, config, config.data.open().facts)
