"""Files of a run that are not as the run wrote them: one line names file, line and value."""

import json

import pytest

from titan_dit.config.section import UserError
from titan_dit.recovery import bad_steps, ledger, resume
from titan_dit.system import run_files

HUGE = [[0, 2**61]]
FAULTS = {
    "step is missing": {"kind": "spike"},
    'step="3" must be a whole number': {"step": "3", "kind": "spike"},
    "to_step=-1 must be at least 0": {"step": 3, "kind": "rollback", "to_step": -1},
    "has 2,305,843,009,213,693,952 numbers": {"step": 3, "kind": "a", "sample_numbers": HUGE},
    "ends before it begins": {"step": 3, "kind": "a", "sample_numbers": [[3, 1]]},
    r"sample_numbers\[0\] holds 1 values": {"step": 3, "kind": "a", "sample_numbers": [[3]]},
    "loss_scale=.* must be a number": {"step": 3, "kind": "a", "loss_scale": "big"},
}


@pytest.mark.parametrize("words", FAULTS)
def test_a_wrong_line_of_the_fault_log_is_named(tmp_path, words):
    lines = [json.dumps({"step": 1, "kind": "spike"}), json.dumps(FAULTS[words]), '{"step": 4, "ki']
    (tmp_path / run_files.FAULTS).write_text("\n".join(lines))
    with pytest.raises(UserError, match=f"faults.jsonl line 2: .*{words}"):
        bad_steps.read_faults(tmp_path)


def test_numbers_without_end_are_no_samples_of_a_step(tmp_path):
    folder = tmp_path / run_files.SAMPLES_SEEN / "attempt-00001"
    folder.mkdir(parents=True)
    line = {"step": 3, "ranks": 1, "numbers": HUGE}
    (folder / "rank-00000.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(UserError, match=r"rank-00000\.jsonl line 1: numbers = .* too many"):
        ledger.logged_samples(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is damaged: not JSON .Expecting"),
        ("[" * 100_000, "is damaged: not JSON .nested too deeply"),
        ("[]", "must be a table"),
        ('{"skipped": [[1, 2]], "in_vain": 0, "reached": 0}', "holds 2 values, not 3"),
        ('{"skipped": [], "in_vain": -1, "reached": 0}', "in_vain=-1 must be at least 0"),
    ],
)
def test_wrong_rollbacks_are_one_line(tmp_path, text, words):
    (tmp_path / run_files.ROLLBACKS).write_text(text)
    with pytest.raises(UserError, match=words):
        resume.read_rollbacks(tmp_path)
