"""How a command starts its ranks, and the words that each of them gets."""

import os
import sys

import pytest
from torch.distributed.run import parse_args

from titan_dit.commands import sample, train
from titan_dit.commands.flags import SampleFlags
from titan_dit.config.section import UserError

# Each begins an option of the launcher, or is one.
WORDS = ["sample", "--run", "outputs/x", "--num", "3", "--step=2", "--role", "--", "--nnodes", "9"]


def test_no_word_is_taken_by_the_launcher(monkeypatch):
    started = []
    monkeypatch.setattr(train, "become", lambda *words: started.append(words))
    monkeypatch.setattr(sys, "argv", ["titan_dit", *WORDS])
    monkeypatch.setattr(sample, "draw", lambda *_: None)
    monkeypatch.setenv("NGPU", "2")
    monkeypatch.delenv("RANK", raising=False)
    sample.main(SampleFlags(run="outputs/x"))
    [(module, *words)] = started
    assert module == "titan_dit.launcher.launch"
    parsed = parse_args(words)
    assert (parsed.training_script, parsed.nproc_per_node) == ("titan_dit", "2")
    assert parsed.training_script_args == WORDS


@pytest.mark.parametrize(
    ("variables", "gpus", "ranks"),
    [
        ({}, False, 0),
        ({}, True, 4),
        ({"NGPU": "1"}, True, 0),
        ({"NGPU": "3"}, False, 3),
        ({"NNODES": "2", "RDZV_ENDPOINT": "a:1"}, False, 1),
        ({"RANK": "0"}, True, 0),
    ],
)
def test_a_command_launches_its_ranks_unless_it_is_one_of_them(monkeypatch, variables, gpus, ranks):
    started = []
    monkeypatch.setattr(train, "become", lambda *words: started.append(words))
    monkeypatch.setattr(train, "num_gpus", lambda environment: 4)
    monkeypatch.setattr(sys, "argv", ["titan_dit", *WORDS])
    monkeypatch.setattr(os, "environ", dict(variables))
    assert train.start_ranks(gpus=gpus) is ("RANK" in variables)
    assert [parse_args(words).nproc_per_node for _, *words in started] == [str(ranks)] * bool(ranks)


def test_a_number_that_the_launcher_cannot_read_is_answered_by_every_command(monkeypatch):
    monkeypatch.setattr(train, "become", lambda *words: None)
    monkeypatch.setattr(os, "environ", {"NGPU": "2", "GRACE": "5m"})
    with pytest.raises(UserError, match="GRACE=5m: set seconds"):
        train.start_ranks(gpus=False)
