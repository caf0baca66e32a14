import json

import pytest

from titan_dit.config.section import UserError
from titan_dit.pipeline.schedules import files
from titan_dit.pipeline.schedules.files import MeasuredCosts
from titan_dit.pipeline.schedules.placement import pipeline_order


def example():
    order = pipeline_order("dualpipev", num_ranks=2, num_microbatches=4)
    return MeasuredCosts(
        stage_ranks=(0, 1, 1, 0),
        num_microbatches=4,
        order=order,
        seconds={a: 0.01 * (1 + a.stage) + a.microbatch for row in order for a in row},
        latencies={(0, 1): 0.002, (1, 0): 0.0},
        step_s=1.5,
    )


def test_costs_are_read_as_they_were_written(tmp_path):
    file = tmp_path / "profile" / "timeline-steps-3-5.costs.json"
    files.write_costs(file, example())
    assert files.read_costs(file) == example()
    assert example().latency(0, 1) == 0.002
    assert example().latency(1, 3) == 0


def test_the_costs_of_the_last_steps_are_taken(tmp_path):
    for span in ("9-12", "10-12", "2-4", "100-99x"):
        files.write_costs(tmp_path / "profile" / f"timeline-steps-{span}.costs.json", example())
    assert files.newest_costs(tmp_path).name == "timeline-steps-10-12.costs.json"


def test_a_run_without_a_profile_says_how_to_make_one(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UserError, match=r"Train the run .* --profile.enabled true") as found:
            files.newest_costs(folder)
        assert "\n" not in str(found.value)
    assert "no such folder" in str(found.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, "has format=2, but this titan_dit reads 1"),
        ({"actions": {}}, "KeyError"),
        ({"links": {"0-1": 1}}, "ValueError"),
        ({"step_s": None}, "TypeError"),
        ({"order": [["0X0"]]}, "0X0"),
    ],
    ids=lambda x: "" if isinstance(x, str) else next(iter(x)),
)
def test_a_damaged_file_is_one_line(tmp_path, change, words):
    file = tmp_path / "timeline-steps-1-2.costs.json"
    files.write_costs(file, example())
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match=words) as found:
        files.read_costs(file)
    assert "\n" not in str(found.value)
    assert "--profile.enabled true" in str(found.value)
    file.write_text(file.read_text()[:50])
    with pytest.raises(UserError, match="no whole costs file"):
        files.read_costs(file)


def test_an_action_that_was_not_measured_is_named(tmp_path):
    file = tmp_path / "timeline-steps-1-2.costs.json"
    files.write_costs(file, example())
    content = json.loads(file.read_text())
    content["actions"]["0F"][2] = None
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="0F2 was not measured"):
        files.read_costs(file)
