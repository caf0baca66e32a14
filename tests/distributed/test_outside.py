"""Models, objectives and data from outside the package, and validation, on every layout."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from harness import on_ranks
from tiny import assert_same_gradients, randomize, state, tiny_config, whole

from titan_dit.config import catalog, config_file
from titan_dit.optim.gradient_norm import clip_norm
from titan_dit.rng import SampleRNG
from titan_dit.trainer import Trainer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LAYOUTS = {
    1: {"alone": {}},
    2: {
        "dp": {"dp_shard": 2},
        "tp": {"tp": 2},
        "pp": {"pp": 2},
        "cp": {"cp": 2, "cp_method": "ulysses"},
    },
    4: {
        "hsdp": {"dp_replicate": 2, "dp_shard": 2},
        "tp, whole tokens": {"dp_shard": 2, "tp": 2, "sequence_parallel": False},
        "dp x pp": {"dp_shard": 2, "pp": 2},
        "pp x cp": {"pp": 2, "cp": 2, "cp_method": "ulysses"},
        "tp x cp": {"tp": 2, "cp": 2, "cp_method": "ulysses"},
        "pp x tp": {"pp": 2, "tp": 2},
    },
}
GPT = {
    "model": "mine.gpt:GPTConfig",
    "objective": "mine.gpt:NextToken",
    "data": "mine.gpt:Text",
    "plan": "mine.gpt:plan",
}
OWN = {
    "model": "own:OwnConfig",
    "objective": "own:OwnObjective",
    "data": "own:OwnData",
    "plan": "own:plan",
}


def config_of(names, layout, folder, **sections):
    tables = {
        "model": {
            "name": names["model"],
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "context": 8,
        },
        "objective": {"name": names["objective"]},
        "data": {"name": names["data"], "path": str(folder / "text"), "context": 8},
        "parallel": {"tensor_plan": names["plan"], **layout},
        "training": {"steps": 4, "global_batch_size": 8, "microbatch_size": 2},
        "precision": {"dtype": "fp32"},
        "checkpoint": {"every": 0},
        "metrics": {"every": 1, "tensorboard": False},
        "validation": {"every": 1, "samples": 7},
        "ema": {"decays": [0.9]},
        "job": {"name": "outside"},
        **sections,
    }
    return config_file.build(tables, catalog.variant)


def digits(layout):
    """A diffusion run; its attention goes round the ring."""
    layout = {key: value for key, value in layout.items() if key != "cp_method"}
    return tiny_config(
        parallel=layout,
        training={"global_batch_size": 4, "microbatch_size": 1 if "dp_replicate" in layout else 2},
        validation={"every": 1, "samples": 5},
        model={"num_layers": 2},
        ema={"decays": [0.9]},
    )


def measured(world, folder, kinds=("gpt", "own")):
    """Loss, gradients and validation losses of each model on all layouts of this world."""
    os.chdir(folder)
    found = {}
    for kind in kinds:
        names = {"gpt": GPT, "own": OWN}.get(kind)
        for name, layout in LAYOUTS[world.size].items():
            config = config_of(names, layout, folder) if names else digits(layout)
            trainer = Trainer(config, world)
            randomize(trainer.parameters)
            batch = next(trainer.batches())
            rng = SampleRNG(trainer.config.job.seed, batch.sample_numbers)
            prepared = trainer.objective.prepare(batch, rng)
            losses = trainer.data_share.gather(trainer.executor.evaluate(prepared))
            loss = trainer.mesh.sum_loss(trainer.executor.step(prepared)).item()
            norm = clip_norm(trainer.parameters.values(), 0.0).item()
            grads = {name: whole(p.grad) for name, p in trainer.parameters.items()}
            found[f"{kind} {name}"] = loss, norm, grads, losses, trainer.validate()
    if world.size == 1 and "own" in kinds:
        found["state"] = trained(world, folder, {}, 4, "alone")
    if world.size == 2 and "own" in kinds:
        trained(world, folder, LAYOUTS[2]["pp"], 2, "moved")
        found["state"] = trained(world, folder, LAYOUTS[2]["tp"], 4, "moved")
    return found


def trained(world, folder, layout, steps, name):
    """The state after so many steps of the run of a name, from where it was."""
    os.chdir(folder)
    sections = {
        "training": {"steps": steps, "global_batch_size": 8, "microbatch_size": 2},
        "checkpoint": {"every": 2},
        "optimizer": {"lr": 1e-3},
        "lr_scheduler": {"warmup_steps": 1},
        "job": {"name": name},
    }
    trainer = Trainer(config_of(OWN, layout, folder, **sections), world)
    trainer.fit()
    return state(trainer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a user works: their package, their data."""
    folder = tmp_path_factory.mktemp("user")
    shutil.copytree(EXAMPLES, folder / "mine")
    (folder / "text").write_bytes(bytes(range(256)) * 4)
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    [found] = on_ranks(1, measured, folder)
    return found


@pytest.fixture(scope="module")
def on_two(folder):
    return on_ranks(2, measured, folder)


def check(kind, layout, alone, ranks):
    loss, norm, expected, losses, validated = alone[f"{kind} alone"]
    seen = {}
    for rank in ranks:
        found_loss, found_norm, found, found_losses, found_validated = rank[f"{kind} {layout}"]
        assert found_validated == pytest.approx(validated, rel=1e-5)
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert found_norm == pytest.approx(norm, rel=1e-5)
        torch.testing.assert_close(found_losses, losses, rtol=1e-5, atol=1e-6)
        seen |= found
    assert_same_gradients(seen, expected, 2e-6)
    if kind == "own":
        assert "objective.uncertainty.weight" in expected
        assert expected["objective.uncertainty.weight"].norm() > 0


@pytest.mark.parametrize("kind", ["gpt", "own"])
@pytest.mark.parametrize("layout", LAYOUTS[2])
def test_what_comes_from_outside_has_the_gradients_of_one_process(kind, layout, alone, on_two):
    check(kind, layout, alone, on_two)


def test_modules_of_an_objective_are_saved_averaged_and_taken_to_another_layout(alone, on_two):
    """Two steps in a pipeline and two by tensor parallelism are four steps of one process."""
    expected, found = alone["state"], on_two[0]["state"]
    own = [name for name in expected if "objective.uncertainty.weight" in name]
    assert sorted(own) == [
        "ema.0.9.objective.uncertainty.weight",
        "model.objective.uncertainty.weight",
        *(f"optimizer.objective.uncertainty.weight.{k}" for k in ("exp_avg", "exp_avg_sq", "step")),
    ]
    assert found.keys() == expected.keys()
    for name in own:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)
    # It has learned, and differs from its average.
    weight = expected["model.objective.uncertainty.weight"]
    assert not torch.equal(weight, expected["ema.0.9.objective.uncertainty.weight"])


@pytest.mark.long
def test_what_comes_from_outside_fits_layouts_of_two_axes(folder, alone):
    ranks = on_ranks(4, measured, folder)
    for layout in LAYOUTS[4]:
        check("gpt", layout, alone, ranks)
        check("own", layout, alone, ranks)


@pytest.mark.long
def test_a_dit_has_the_gradients_and_validation_losses_of_one_process(folder):
    [alone] = on_ranks(1, measured, folder, ("dit",))
    for size in (2, 4):
        ranks = on_ranks(size, measured, folder, ("dit",))
        for layout in LAYOUTS[size]:
            check("dit", layout, alone, ranks)
