import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from titan_dit.checkpoint.run_checkpoints import Checkpoints, step_of
from titan_dit.checkpoint.store import MANIFEST
from titan_dit.config.operation import FaultsConfig
from titan_dit.config.section import UserError
from titan_dit.recovery import resume
from titan_dit.recovery.ledger import (
    Ledger,
    SampleLog,
    Skipped,
    Untrained,
    logged_samples,
    next_attempt,
    trained,
)
from titan_dit.recovery.resume import Start
from titan_dit.system import run_files


def through_json(ledger, cursor=100):
    record = {"ledger": json.loads(json.dumps(ledger.as_json(cursor, 30)))}
    return Ledger.of(record), record["ledger"]


def test_a_ledger_comes_back_from_a_checkpoint_as_it_was():
    ledger = (
        Ledger().skip([Skipped(16, 48, "steps 2 to 3 were bad")]).mark_untrained(5, range(60, 76))
    )
    again, record = through_json(ledger)
    assert again == ledger
    assert record["samples"], record["epoch"] == (100, 3)
    assert record["trained"] == 100 - 32 - 16
    assert Ledger.of({}) == Ledger()


def test_what_is_skipped_behind_the_cursor_is_not_counted_as_lost():
    ledger = Ledger().skip([Skipped(90, 200, "")])
    assert ledger.as_json(100, 30)["trained"] == 90


def test_steps_in_a_row_take_one_entry_and_others_one_each():
    ledger = Ledger()
    for step in (3, 4, 5, 9):
        ledger = ledger.mark_untrained(step, range(8 * step, 8 * step + 8))
    assert ledger.untrained == (Untrained(24, 48, 3, 5), Untrained(72, 80, 9, 9))
    # A batch around a gap: two ranges of one step.
    ledger = ledger.mark_untrained(10, [80, 81, 90, 91])
    assert ledger.untrained[1:] == (Untrained(72, 82, 9, 10), Untrained(90, 92, 10, 10))


def test_the_same_range_is_skipped_once():
    entry = Skipped(1, 4, "why")
    assert Ledger().skip([entry]).skip([entry, Skipped(3, 9, "b")]).skipped_ranges == ((1, 9),)
    assert Ledger().skip([entry]) == Ledger().skip([entry]).skip([entry])


def checkpoints_in(folder, *steps):
    checkpoints = Checkpoints(folder / "checkpoints")
    for step in steps:
        path = checkpoints.folder / f"step-{step:08d}"
        path.mkdir(parents=True)
        (path / MANIFEST).write_text("{}")
    return checkpoints


def roll_back(folder, checkpoints, config, steps):
    """As the trainer, but without verifying the files."""
    older = [path for path in checkpoints.complete() if step_of(path) < steps.first]
    start = Start(older[-1], {"step": step_of(older[-1])}) if older else Start()
    return start.path, resume.record_rollback(folder, checkpoints, config, steps, start)


def bad(first, last, batch=10):
    return resume.BadStreak(first, last, ((first - 1) * batch, last * batch))


def test_a_run_goes_back_to_the_newest_checkpoint_before_the_bad_steps(tmp_path):
    checkpoints = checkpoints_in(tmp_path, 2, 4, 6, 8)
    start, rollbacks = roll_back(tmp_path, checkpoints, FaultsConfig(), bad(6, 9))
    assert start.name == "step-00000004"
    # The checkpoints of the bad steps are set aside.
    assert [path.name for path in checkpoints.complete()] == ["step-00000002", "step-00000004"]
    assert rollbacks.skipped == (Skipped(50, 90, "steps 6 to 9 were bad"),)
    assert resume.read_rollbacks(tmp_path) == rollbacks
    assert not list(tmp_path.glob("*.partial"))


def test_a_run_that_comes_no_further_goes_back_so_often_and_no_more(tmp_path):
    checkpoints, config = checkpoints_in(tmp_path, 2), FaultsConfig(max_rollbacks=2)
    for last in (5, 8):
        roll_back(tmp_path, checkpoints, config, bad(3, last))
    with pytest.raises(UserError, match="max_rollbacks=2 brought no progress"):
        roll_back(tmp_path, checkpoints, config, bad(7, 9))
    # Progress: step 9 was good, so the count restarts.
    _, rollbacks = roll_back(tmp_path, checkpoints, config, bad(10, 12))
    assert rollbacks.in_vain == 1
    assert len(resume.read_rollbacks(tmp_path).skipped) == 3


@pytest.mark.parametrize(
    ("steps", "config", "words"),
    [
        ((6, 8), {}, "no checkpoint from before step 6"),
        ((), {}, "no checkpoint from before step 6"),
        ((4,), {"max_rollbacks": 0}, "max_rollbacks=0"),
    ],
)
def test_a_run_that_cannot_go_back_says_why_and_leaves_everything_as_it_is(
    tmp_path, steps, config, words
):
    checkpoints = checkpoints_in(tmp_path, *steps)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError) as caught:
        roll_back(tmp_path, checkpoints, FaultsConfig(**config), bad(6, 9))
    assert words in str(caught.value)
    assert "[faults] max_consecutive_bad_steps=100: the last 4 steps" in str(caught.value)
    assert f"replay --run {tmp_path} --step 6" in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def batch_of(numbers):
    """A batch of these samples and one padding sample."""
    numbers = torch.tensor([*numbers, 0])
    weight = torch.ones(len(numbers)).scatter(0, torch.tensor([len(numbers) - 1]), 0.0)
    return SimpleNamespace(sample_numbers=numbers, weight=weight)


def log(run, attempt, ranks, steps, batch=6, cut=()):
    """Write an attempt's log, without the last rank's lines of the steps in `cut`."""
    for rank in range(ranks):
        written = SampleLog(run, attempt, rank, ranks)
        share = batch // ranks
        for step in steps:
            if step not in cut or rank < ranks - 1:
                first = (step - 1) * batch + rank * share
                written.write(step, batch_of(range(first, first + share)))
        written.file.close()


def test_the_sample_log_gives_the_history_that_the_run_has_had(tmp_path):
    assert next_attempt(tmp_path) == 1
    log(tmp_path, 1, 3, range(1, 8))
    log(tmp_path, 2, 2, range(4, 7), cut=(6,))
    seen = tmp_path / run_files.SAMPLES_SEEN / "attempt-00002" / "rank-00000.jsonl"
    with seen.open("a") as file:
        file.write('{"step": 7, "ra')
    assert next_attempt(tmp_path) == 3
    history = logged_samples(tmp_path)
    # Step 6 was cut short, step 7 was of the attempt that is no more.
    assert list(history) == [1, 2, 3, 4, 5]
    assert trained(tmp_path, Ledger()) == Counter(range(30))
    log(tmp_path, 3, 1, range(5, 9))
    assert trained(tmp_path, Ledger()) == Counter(range(48))
    assert trained(tmp_path, Ledger().mark_untrained(2, range(6, 12))) == Counter(
        [*range(6), *range(12, 48)]
    )


def test_a_sample_that_is_seen_twice_shows(tmp_path):
    written = SampleLog(tmp_path, 1, 0, 1)
    for step, numbers in ((1, [0, 1, 2]), (2, [2, 3, 4])):
        written.write(step, batch_of(numbers))
    assert trained(tmp_path, Ledger())[2] == 2
