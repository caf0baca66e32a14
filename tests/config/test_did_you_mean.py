"""Words that titan_dit does not know, as users of other trainers and newcomers type them."""

import pytest
from small_config import TEXT, keys_of_all

from titan_dit import __main__
from titan_dit.config import catalog, config_file, did_you_mean


def test_what_the_tables_name_is_there_and_no_word_stands_twice():
    there = keys_of_all()
    assert set(did_you_mean.MEANT) <= there
    assert set(did_you_mean.MEANT_SECTIONS) <= {path.split(".")[0] for path in there}
    for table in (did_you_mean.MEANT, did_you_mean.MEANT_SECTIONS, did_you_mean.VALUES):
        words = [word for words in table.values() for word in words.split()]
        assert len(words) == len(set(words))
    assert not set(did_you_mean.SENTENCES) & set(did_you_mean.KEYS)
    # A key of ours is never taken for another one of the same section.
    taken = {path for path in there if did_you_mean.KEYS.get(path, path) != path}
    assert taken == set()


LR = "Did you mean [optimizer] lr (--optimizer.lr)?"
FLAGS = {
    # In another section.
    "--training.lr 1e-3": f"[training] lr: unknown key. {LR}",
    "--lr 1e-3": f"--lr: flags have the form --section.key value, as in the TOML. {LR}",
    "--training.learning_rate 1e-3": LR,
    "--seed 1": "Did you mean [job] seed (--job.seed)?",
    "--wandb true": "Did you mean [metrics] wandb (--metrics.wandb)?",
    "--training.cfg_scal 2": "Did you mean [sampling] cfg_scale (--sampling.cfg_scale)?",
    "--data.path latents": 'unknown key. name="latents" has it: add --data.name latents.',
    # Words of other trainers.
    "--training.batch_size 8": "batch_size: unknown key. Did you mean global_batch_size?",
    "--batch_size 8": "Did you mean [training] global_batch_size (--training.global_batch_size)?",
    "--logging.every 5": "[logging]: unknown section. Did you mean metrics?",
    "--logging.log_freq 5": "Did you mean [metrics] every (--metrics.every)?",
    "--parallelism.tensor_parallel_degree 2": "Did you mean [parallel] tp (--parallel.tp)?",
    "--activation_checkpointing.mode full": "Did you mean activation_checkpoint?",
    "--checkpoint.interval 5": "[checkpoint] interval: unknown key. Did you mean every?",
    "--trainer.max_epochs 5": "Did you mean [training] epochs (--training.epochs)?",
    "--train-iters 5": "Did you mean [training] steps (--training.steps)?",
    "--gradient_checkpointing": "Did you mean [activation_checkpoint] mode "
    "(--activation_checkpoint.mode)?",
    "--gradient_accumulation_steps 2": "set --training.microbatch_size",
    "--image-size 256": "Set --model.latent_size",
    "--vae DIR": "`data encode` makes latents with an autoencoder (docs/encoding.md)",
    "--finetune": "a new run starts at another one's weights by --checkpoint.init PATH",
    "--nproc_per_node=4": "NGPU=4 before the command",
    "--nnodes 2": "NNODES=2 before the command",
    "--standalone": "Leave it out: one node is the default.",
    "--resume": "A run resumes by the same command",
    "--compile": "Did you mean [compile] enabled (--compile.enabled)?",
    "--training": "[training] is a section: --training.KEY, with one of the keys batch_multiple,",
    "--dryrun 4": "Write --dry-run.",
    # Names and values.
    "--optimizer.name AdamW": "Did you mean adamw?",
    "--objective.name flow_matching": "Did you mean rectified_flow?",
    "--model.name DiT-XL/2": "Did you mean dit?",
    "--precision.dtype bfloat16": '"fp16". Did you mean bf16?',
    "--lr_scheduler.decay Cosine": "Did you mean cosine?",
    "--training.steps 10,000": '[training] steps="10,000" must be a whole number. Write 10000.',
    "--training.steps 10k": "Write 10000.",
    "--training.steps 1,5": '[training] steps="1,5" must be a whole number.',
    "--training.steps 2.5e0": "[training] steps=2.5 must be a whole number.",
    "--optimizer.lr 0,001": "must be a number. Write 0.001.",
    "--optimizer.lr 1e\u22123": "Write 0.001.",
    "--optimizer.lr '1e-3'": "Write 1e-3, without quotes.",
    "--training.deterministic yes": "must be true or false. Write true.",
    "--training.steps None": "[training] steps is missing. Set steps, or epochs.",
    # The form of a flag.
    "-training.steps 5": "-training.steps: flags begin with two plain dashes: --training.steps",
    "\u2014training.steps 5": "flags begin with two plain dashes: --training.steps",
    "training.steps=5": "training.steps=5: flags begin with two dashes: --training.steps=5",
    "--job.seed 1 training.steps=5": "flags begin with two dashes: --training.steps=5",
    "--training.steps = 5": "write it without spaces: --training.steps=5",
    "--training.steps= 5": "write it without spaces: --training.steps=5",
    "--training/steps 5": "Write a dot: --training.steps",
    "--Training.Steps 5": "[Training]: unknown section. Did you mean",
    "--no-compile.enabled": "write booleans out: --compile.enabled false",
    "--config digits": "--config digits: give one config file, and other keys as flags.",
}


@pytest.mark.parametrize("words", FLAGS)
def test_a_flag_that_is_not_known_is_answered_with_what_was_meant(refused, words):
    message = refused(*words.split())
    assert FLAGS[words] in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-config", "digits"], "-config: flags begin with two plain dashes: --config"),
        (["-c", "digits"], "--config"),
        (["config=digits"], "flags begin with two dashes: --config=digits"),
        (["--job.config_file", "digits.toml"], "write --config digits.toml"),
        (["train", "--config", "digits"], "leave the word out"),
        (["--config", "dit-s2"], "Did you mean dit_s2.toml?"),
        (["--config", "digits.yaml"], "Did you mean digits.toml?"),
        (["--config", "."], "--config . is a folder. Name a file: "),
        (["--config", "a", "--config", "b"], "--config a and --config b: give one config file"),
    ],
)
def test_a_config_that_is_not_given_as_it_should_is_answered_with_how(arguments, words):
    with pytest.raises(config_file.UserError) as caught:
        config_file.load(arguments, catalog.variant)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("--config digits", "Name one first: python -m titan_dit train --config ..."),
        ("traim --config digits", "traim: no such command. Did you mean train?"),
        ("foo", "foo: no such command. There is: train, sample,"),
        ("pipeline", "pipeline: give one of its commands: pipeline plan, pipeline draw."),
    ],
)
def test_a_command_that_is_not_there_is_answered_with_the_nearest(monkeypatch, words, answer):
    monkeypatch.setattr("sys.argv", ["titan_dit", *words.split()])
    with pytest.raises(config_file.UserError) as caught:
        __main__.main()
    assert answer in str(caught.value)


FILES = {
    "[training]\nsteps = 5\n": "Put all keys of [training] under one heading.",
    "[ema]\nevery = 1\nevery = 2\n": "[ema] every stands twice: keep one.",
    "[compile]\nenabled = True\n": "The line is: enabled = True (TOML writes true and false)",
    "[activation_checkpoint]\nmode = None # unset\n": "leave the key out",
    "[activation_checkpoint]\nmode = full\n": "text stands in quotes",
    '[job]\ndir = "C:\\data"\n': "single quotes",
    "[ema]\ndecays = .9\n": "a digit on both sides of the point",
    "[job]\nseed: 5\n": "TOML writes key = value, below a [section]",
    "[job]\nseed = 10k\n": "write a number with digits",
    "[job]\nseed = 1e4\n": "[job] seed=10000.0 must be a whole number. Write 10000.",
    "[[job]]\nseed = 1\n": "write [job], with single brackets.",
    "[logging]\nevery = 5\n": "[logging]: unknown section. Did you mean metrics?",
    "[checkpoint]\nlr = 1\n": LR,
}


@pytest.mark.parametrize("extra", FILES)
def test_a_file_that_is_not_toml_is_answered_with_the_line_and_how_to_write_it(refused, extra):
    assert FILES[extra] in refused(text=TEXT + extra)


def test_a_byte_order_mark_is_no_error_but_another_encoding_is(load, tmp_path):
    assert load(text=f"\ufeff{TEXT}") == load()
    wide = tmp_path / "wide.toml"
    wide.write_text(TEXT, encoding="utf-16")
    with pytest.raises(config_file.UserError, match=r"is not UTF-8 \(byte 1\)\. Save"):
        config_file.load(["--config", str(wide)], catalog.variant)
