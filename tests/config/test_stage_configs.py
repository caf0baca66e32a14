"""The config of each stage, and what is refused about [[stages]]."""

import pytest
import tiny_joint
from captioned_sets import write_set

from titan_dit.config import catalog, config_file, dotted_names, stages
from titan_dit.config.section import UserError
from titan_dit.opening import settled_stages

TEXT = """
[model]
name = "dit"
hidden_size = 32
num_layers = 1
num_heads = 4
patch_size = 2
latent_size = 4
in_channels = 1
num_classes = 10
[objective]
name = "rectified_flow"
[data]
name = "synthetic"
latent_size = 4
channels = 1
num_classes = 10
[training]
global_batch_size = 16
max_grad_norm = 1.0
[optimizer]
lr = 1e-3
[checkpoint]
every = 4
[[stages]]
steps = 6
optimizer.weight_decay = 0.5
[[stages]]
steps = 5
data.latent_size = 8
model.latent_size = 8
optimizer.lr = 5e-4
training.tokens_per_step = 256
parallel.tp = 2
"""


def load(tmp_path, text=TEXT):
    (tmp_path / "run.toml").write_text(text)
    return config_file.load(["--config", str(tmp_path / "run.toml")], catalog.variant)


def test_a_stage_sets_its_keys_and_no_other_stage_s(tmp_path):
    config = load(tmp_path)
    first, second = stages.configs_of(config)
    assert config.training.steps == 11
    assert (first.training.begin, first.training.steps) == (0, 6)
    assert (second.training.begin, second.training.steps) == (6, 11)
    assert (first.optimizer.lr, first.optimizer.weight_decay) == (1e-3, 0.5)
    assert second.optimizer.weight_decay == config.optimizer.weight_decay != 0.5
    assert (second.optimizer.lr, second.data.latent_size, second.parallel.tp) == (5e-4, 8, 2)
    # The other way to say it is dropped, as by a flag.
    assert second.training.global_batch_size is None
    assert second.training.tokens_per_step == 256
    assert stages.alone(second).training.steps == 5


def test_steps_belong_to_stages(tmp_path):
    training = load(tmp_path).training
    assert [stages.number_after(training, step) for step in (0, 5, 6, 10, 11)] == [0, 0, 1, 1, 1]
    assert [stages.number_of(training, step) for step in (0, 1, 6, 7, 11)] == [0, 0, 0, 1, 1]
    assert stages.line_of(training, 1) == "stage 2 of 2, steps 7 to 11"


def test_a_written_config_reads_back_with_its_stages(tmp_path):
    config = load(tmp_path)
    text = config_file.to_toml(config_file.to_tables(config))
    assert text.count("[[stages]]\nsteps = ") == 2
    assert load(tmp_path, text) == config


REFUSED = {
    "optimizer.lrr = 1": "[[stages]] 2: [optimizer] lrr: unknown key. Did you mean lr?",
    "lr = 1": "[[stages]] 2: lr: unknown key. A stage has steps, and keys with their section",
    "optimiser.lr = 1": "[[stages]] 2: [optimiser]: unknown section. Did you mean optimizer?",
    "job.seed = 1": "[[stages]] 2: [job] is of the whole run",
    'optimizer.name = "muon"': "[[stages]] 2: [optimizer] name is of the whole run",
    "objective.time_scale = 1": "[[stages]] 2: [objective] time_scale is of the whole run",
    "training.epochs = 1": "[training] epochs is of the whole run. Each stage has steps",
    "model.hidden_size = 64": "is [32] in the first stage and [64] in this one",
    'lr_scheduler.decay = "wsd"\nlr_scheduler.wsd_decay_steps = 900': (
        "[[stages]] 2: [lr_scheduler] wsd_decay_steps=900 begins before the end of the warm-up"
    ),
    "model.num_heads = 2": "[[stages]] 2: [model] num_heads=2, but 4 in the first stage",
    "training.global_batch_size = 0": "[[stages]] 2: [training] global_batch_size=0 must be",
}
REPLACED = {
    ("steps = 5", "steps = 0"): "[[stages]] 2 steps=0 must be at least 1",
    ("steps = 5", 'steps = "5"'): '[[stages]] 2 steps="5" must be a whole number',
    ("steps = 5", "steps = 1\n" + "[[stages]]\nsteps = 1\n" * 99): "[[stages]]: 101 stages",
    ("steps = 5", ""): "[[stages]] 2 has no steps",
    ("[training]", "[training]\nsteps = 12"): "steps=12 contradicts [[stages]], which have 6 + 5",
    ("[training]", "[training]\nsteps = 6"): "steps=6 contradicts [[stages]]",
    ("[training]", "[training]\nepochs = 1"): "epochs=1.0 contradicts [[stages]]",
    ("every = 4", "every = 0"): "[checkpoint] every=0, but a stage hands its weights on",
    ("[[stages]]\nsteps = 6\noptimizer.weight_decay = 0.5\n[[stages]]", "[stages]"): (
        "write [[stages]], with double brackets"
    ),
    ("steps = 6", "steps = 6\ndata.latent_size = 16\nmodel.latent_size = 16"): (
        "[[stages]] 2: its samples have 16 tokens, those of the stage before 64"
    ),
}


@pytest.mark.parametrize("line", REFUSED)
def test_wrong_keys_of_a_stage_are_refused(tmp_path, line):
    with pytest.raises(UserError) as caught:
        settled_stages(load(tmp_path, f"{TEXT}{line}\n"))
    assert REFUSED[line] in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", REPLACED)
def test_wrong_stages_are_refused(tmp_path, change):
    old, new = change
    assert TEXT.count(old) == 1
    with pytest.raises(UserError) as caught:
        settled_stages(load(tmp_path, TEXT.replace(old, new)))
    assert REPLACED[change] in str(caught.value)


@pytest.mark.parametrize("key", ["data.name", "lr_scheduler.decay", "parallel.tensor_plan"])
def test_modules_that_only_a_stage_of_a_stranger_s_run_names_are_not_imported(tmp_path, key):
    (tmp_path / "config.toml").write_text(f'{TEXT}{key} = "their_module:Thing"\n')
    tables = config_file.of_run(tmp_path / "config.toml")
    with pytest.raises(UserError, match=r"their_module:Thing.*--trust"):
        dotted_names.check_trusted(tables, "--run r", False)
    dotted_names.check_trusted(tables, "--run r", True)


def test_a_table_of_positions_is_refused_by_name(tmp_path):
    """A GPT may go on to longer texts with rotary positions only."""
    gpt = {
        "name": "gpt",
        "hidden_size": 32,
        "num_layers": 1,
        "num_heads": 4,
        "vocab_size": 2048,
        "sequence_length": 16,
    }
    later = {"steps": 2, "data": {"sequence_length": 32}, "model": {"sequence_length": 32}}

    def staged(kind):
        return config_file.build(
            {
                "model": gpt | {"position_embedding_type": kind},
                "objective": {"name": "next_token"},
                "data": {"name": "plays", "sequence_length": 16},
                "training": {"global_batch_size": 4, "stages": [{"steps": 2}, later]},
                "optimizer": {"lr": 1e-3},
            },
            catalog.variant,
        )

    assert [each.model.sequence_length for each in settled_stages(staged("rotary"))] == [16, 32]
    with pytest.raises(UserError, match=r"\[\[stages\]\] 2: \[model\] name=\"gpt\": the parameter"):
        settled_stages(staged("learned"))


def test_stages_take_their_buckets_of_one_folder_small_ones_first(tmp_path):
    """A network without a size has that of the largest samples of each stage."""
    write_set(tmp_path / "set", {(4, 8): 3, (4, 4): 3, (8, 8): 3})

    def sizes(*stages):
        data = {"name": "latents", "path": str(tmp_path / "set"), "buckets": ["8x4", "4x4"]}
        chosen = [{"steps": 2, "data": {"buckets": names} if names else {}} for names in stages]
        return [each.model.latent_size for each in settled_stages(joint(data, chosen))]

    assert sizes(["4x4"], [], ["4x4", "8x8"]) == [(4, 4), (4, 8), (8, 8)]
    with pytest.raises(UserError, match=r"\[\[stages\]\] 2: its samples have 4 tokens, .* 8\."):
        sizes([], ["4x4"])
    with pytest.raises(UserError, match=r'\[\[stages\]\] 1: \[data\] buckets: "9x9" is no bucket'):
        sizes(["4x4", "9x9"], [])


def joint(data, chosen):
    """A text-to-image network without a size in stages."""
    tables = {name: dict(table) for name, table in tiny_joint.TABLES.items()}
    del tables["model"]["latent_size"]
    training = {"global_batch_size": 4, "stages": chosen}
    return config_file.build(
        tables | {"data": data, "training": training, "checkpoint": {"every": 4}}, catalog.variant
    )
