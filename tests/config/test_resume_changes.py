import copy

import pytest

from titan_dit.config.config_file import changes, to_tables

MAY_CHANGE = [
    "job.name",
    "job.dir",
    "job.hooks",
    "training.steps",
    "training.microbatch_size",
    "training.deterministic",
    "parallel.dp_shard",
    "parallel.reshard_after_forward",
    "compile.enabled",
    "precision.loss_scale",
    "precision.loss_scale_init",
    "precision.loss_scale_window",
    "precision.loss_scale_hysteresis",
    "precision.loss_scale_min",
    "checkpoint.every",
    "checkpoint.resume",
    "faults.max_consecutive_bad_steps",
    "metrics.every",
    "sampling.cfg_scale",
    "validation.every",
    "ema.snapshots",
    "data.name",
    "data.num_workers",
]
MAY_NOT_CHANGE = [
    "job.seed",
    "job.data_order",
    "job.initial_weights",
    "model.name",
    "model.hidden_size",
    "model.qk_norm",
    "model.num_classes",
    "objective.name",
    "objective.timesteps",
    "objective.condition_dropout",
    "training.global_batch_size",
    "training.max_grad_norm",
    "precision.dtype",
    "optimizer.lr",
    "optimizer.betas",
    "optimizer.weight_decay",
    "lr_scheduler.warmup_steps",
    "lr_scheduler.decay",
    "ema.decays",
    "ema.every",
    "ema.power",
]


@pytest.fixture
def changed(load):
    def changed(path):
        section, key = path.split(".")
        old = to_tables(load())
        new = copy.deepcopy(old)
        new[section][key] = "something else"
        return list(changes(old, new))

    return changed


@pytest.mark.parametrize("path", MAY_CHANGE)
def test_a_resumed_run_may_change_what_leaves_the_mathematics_alone(changed, path):
    assert changed(path) == []


@pytest.mark.parametrize("path", MAY_NOT_CHANGE)
def test_a_resumed_run_may_not_change_the_mathematics(changed, path):
    section, key = path.split(".")
    (change,) = changed(path)
    assert change.startswith(f"[{section}] {key}: ")
    assert change.endswith(' -> "something else"')


def test_changes_names_old_and_new_values_one_by_one(load):
    old = to_tables(load())
    new = to_tables(load("--optimizer.lr", "2e-3", "--job.seed", "7", "--training.steps", "11"))
    assert list(changes(old, new)) == ["[job] seed: 0 -> 7", "[optimizer] lr: 0.001 -> 0.002"]
    assert list(changes(old, old)) == []
