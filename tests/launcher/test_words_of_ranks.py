"""The words that every rank of a command gets."""

import sys

from torch.distributed.run import parse_args

from titan_dit.commands import sample, train
from titan_dit.commands.flags.sample import Options

# Each begins an option of the launcher, or is one.
WORDS = ["sample", "--run", "outputs/x", "--num", "3", "--step=2", "--role", "--", "--nnodes", "9"]


def test_no_word_is_taken_by_the_launcher(monkeypatch):
    started = []
    monkeypatch.setattr(train, "become", lambda *words: started.append(words))
    monkeypatch.setattr(sys, "argv", ["titan_dit", *WORDS])
    monkeypatch.setattr(sample, "draw", lambda *_: None)
    monkeypatch.setenv("NGPU", "2")
    monkeypatch.delenv("RANK", raising=False)
    sample.main(Options(run="outputs/x"))
    [(module, *words)] = started
    assert module == "titan_dit.launcher.launch"
    parsed = parse_args(words)
    assert (parsed.training_script, parsed.nproc_per_node) == ("titan_dit", "2")
    assert parsed.training_script_args == WORDS
