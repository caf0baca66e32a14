"""A GPT and a BERT by commands: train, resume on two ranks, draw or refuse, convert, predict."""

import json
import sys

import commands
import pytest
import torch
from commands import metrics, only_error, run, sample
from safetensors.torch import load_file, save_file

CONFIG = """
[model]
name = "{model}"
hidden_size = 32
num_layers = 2
num_heads = 2
vocab_size = 2049
sequence_length = 32

[objective]
name = "{objective}"

[data]
name = "plays"
sequence_length = 32

[training]
global_batch_size = 4

[precision]
dtype = "fp32"

[ema]
decays = []

[metrics]
every = 1
tensorboard = false
"""
OBJECTIVES = {"gpt": "next_token", "bert": "masked_token"}


@pytest.fixture(scope="module", params=OBJECTIVES)
def trained(request, tmp_path_factory):
    """Four steps without a stop, in `whole`, and two, in `parts`."""
    name = request.param
    cwd = tmp_path_factory.mktemp(name)
    (cwd / "tiny.toml").write_text(CONFIG.format(model=name, objective=OBJECTIVES[name]))
    for job, steps in (("whole", 4), ("parts", 2)):
        done = train(cwd, "--job.name", job, "--training.steps", steps)
        assert done.returncode == 0, done.stderr
    return name, cwd


def train(cwd, *flags, ranks=1):
    return commands.train(
        *flags,
        "--optimizer.lr",
        1e-3,
        "--lr_scheduler.warmup_steps",
        0,
        cwd=cwd,
        ranks=ranks,
        config="tiny.toml",
    )


def test_it_resumes_on_two_ranks_converts_and_predicts(trained):
    name, cwd = trained
    flags = ("--job.name", "parts", "--training.steps", 4, "--parallel.tp", 2)
    done = train(cwd, *flags, ranks=2)
    assert done.returncode == 0, done.stderr
    whole, parts = (metrics(cwd / "outputs" / job) for job in ("whole", "parts"))
    assert [row["step"] for row in parts] == [1, 2, 3, 4]
    for one, other in zip(whole, parts, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)

    tokens = torch.arange(24).reshape(2, 12)
    save_file({"tokens": tokens}, cwd / "tokens.safetensors")
    command = [
        sys.executable,
        "-m",
        "titan_dit",
        "convert",
        "--input",
        "outputs/whole",
        "--out",
        "out",
    ]
    done = run(command, cwd)
    assert done.returncode == 0, done.stderr
    architecture = json.loads((cwd / "out" / "config.json").read_text())["architectures"]
    assert architecture == [{"gpt": "GPT2LMHeadModel", "bert": "BertForMaskedLM"}[name]]
    done = run([*command[:4], "--input", "out", "--out", "back"], cwd)
    assert done.returncode == 0, done.stderr
    for source in ("outputs/whole", "back"):
        done = run(
            [
                *command[:3],
                "predict",
                "--run",
                source,
                "--input",
                "tokens.safetensors",
                "--out",
                f"{source}.safetensors",
            ],
            cwd,
        )
        assert done.returncode == 0, done.stderr
    ours, back = (
        load_file(cwd / f"{file}.safetensors")["out"] for file in ("outputs/whole", "back")
    )
    assert ours.shape == (2, 12, 2049)
    assert torch.equal(ours, back)


def test_a_gpt_continues_a_prompt_and_a_bert_says_what_it_does_instead(trained):
    name, cwd = trained
    done = sample(
        "--run", "outputs/whole", "--prompt", "KING. ", "--length", 2, "--num", 1, cwd=cwd
    )
    if name == "gpt":
        assert done.returncode == 0, done.stderr
        assert "KING. " in done.stdout
    else:
        assert "was trained with MaskedToken" in (error := only_error(done))
        assert "titan_dit predict" in error
