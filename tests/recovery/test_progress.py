import json

from titan_dit.recovery.ledger import Ledger, Skipped
from titan_dit.recovery.resume import Progress, Rollbacks

GUARD = {"nan_steps": 2, "spike_steps": 1, "in_a_row": 0, "streak": None}
LEDGER = Ledger().skip([Skipped(32, 48, "bad")]).mark_untrained(2, range(8, 16))


def test_what_is_recorded_is_taken_up_again():
    progress = Progress(7, 72, LEDGER, GUARD)
    record = json.loads(json.dumps(progress.as_record(num_rows=50)))
    assert Progress.of(record) == progress
    assert record["nan_steps"] == 2
    assert record["ledger"]["epoch"] == 1
    assert record["ledger"]["trained"] == 72 - 16 - 8


def test_what_was_left_out_since_then_is_left_out():
    record = Progress(7, 72, LEDGER, GUARD).as_record(50)
    later = Skipped(80, 96, "worse")
    found = Progress.of(record, Rollbacks(skipped=(LEDGER.skipped[0], later)))
    assert found.ledger.skipped == (*LEDGER.skipped, later)


def test_an_empty_record_is_the_start():
    assert Progress.of({}) == Progress(guard={"nan_steps": 0})
    skipped = (Skipped(0, 8, "bad"),)
    assert Progress.of({}, Rollbacks(skipped)).ledger.skipped == skipped


def test_a_record_from_before_there_was_a_guard_has_its_count_alone():
    found = Progress.of({"step": 5, "cursor": 40, "nan_steps": 3})
    assert (found.step, found.cursor, found.guard) == (5, 40, {"nan_steps": 3})
