"""A language model by commands: train with previews, `sample --prompt`, `evaluate`."""

import json
import math
import sys

import commands
import pytest
from commands import metrics, run, sample

from titan_dit.data.sections import Plays

pytest.importorskip("tokenizers")

CONFIG = """
[model]
name = "gpt"
hidden_size = 32
num_layers = 2
num_heads = 2
vocab_size = 2048
sequence_length = 32

[objective]
name = "next_token"

[data]
name = "plays"
sequence_length = 32

[training]
steps = 2
global_batch_size = 4

[precision]
dtype = "fp32"

[validation]
every = 2
samples = 6

[sampling]
every = 2
num = 2

[generation]
prompt = "KING. "
max_new_tokens = 3

[checkpoint]
every = 2

[metrics]
tensorboard = false
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two steps."""
    cwd = tmp_path_factory.mktemp("trained")
    (cwd / "plays.toml").write_text(CONFIG)
    done = commands.train(cwd=cwd, config="plays.toml")
    assert done.returncode == 0, done.stderr
    return cwd


def texts(output):
    """The texts of `sample` or of a preview, without their titles."""
    return output.split("--- 0\n")[1].removesuffix("\n").split("\n--- 1\n")


def test_a_run_writes_text_previews(trained):
    found = (trained / "outputs/plays/samples/step-00000002.txt").read_text()
    assert len(texts(found)) == 2
    assert all(text.startswith("KING. ") for text in texts(found))


def test_sample_continues_a_prompt(trained):
    flags = ("--run", "outputs/plays", "--prompt", "To be, or not ", "--length", 5, "--num", 2)
    done = sample(*flags, cwd=trained)
    assert done.returncode == 0, done.stderr
    first, second = texts(done.stdout)
    assert first.startswith("To be, or not ")
    assert first != second
    again = sample(*flags, "--batch-size", 1, "--out", "out/b.txt", cwd=trained)
    assert again.returncode == 0, again.stderr
    assert texts((trained / "out/b.txt").read_text()) == [first, second]
    other = sample(*flags, "--seed", 1, "--top-k", 5, "--top-p", 0.5, cwd=trained)
    assert texts(other.stdout) != [first, second]


def test_evaluate_scores_the_second_part_in_one_process_and_on_two_ranks(trained):
    row = metrics(trained / "outputs/plays")[-1]
    command = (sys.executable, "-m", "titan_dit", "evaluate", "--run", "outputs/plays")
    alone = run([*command, "--out", "a.json"], trained, NGPU=1)
    assert alone.returncode == 0, alone.stderr
    assert "validation_bits_per_byte" in alone.stdout
    pair = run([*command, "--out", "b.json", "--parallel.tp", 2], trained, NGPU=2)
    assert pair.returncode == 0, pair.stderr
    found = [json.loads((trained / name).read_text()) for name in ("a.json", "b.json")]
    assert [one["layout"] for one in found] == ["one rank", "tp 2"]
    # Of the part that is scored, not of the part that is trained on.
    num_bytes = Plays(sequence_length=32).validation_part().open().facts.bytes_per_token
    bits = found[0]["validation_loss"] / math.log(2) / num_bytes
    assert found[0]["validation_bits_per_byte"] == pytest.approx(bits)
    for name in ("loss", "perplexity", "bits_per_byte"):
        for one in found:
            wanted = row[f"validation_{name}_ema_0.9999"]
            assert one[f"validation_{name}"] == pytest.approx(wanted, rel=1e-6)


BAD = {
    "pictures' flag": (("--labels", "3"), "--labels is not a flag for text, which outputs/plays"),
    "pictures' file": (("--out", "a.png"), "--out a.png: name a .txt file"),
    "tokenizer": (("--tokenizer", "none.json"), "tokenizer=none.json: there is no such file"),
    "top-p": (("--top-p", 0), "--top-p=0.0 must be above 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_flags_are_one_clear_error(case, trained):
    flags, wanted = BAD[case]
    done = sample("--run", "outputs/plays", "--prompt", "a", *flags, cwd=trained)
    assert done.returncode == 2
    assert wanted in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr
