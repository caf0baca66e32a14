"""Orders as CSV files."""

import pytest
from known import SCHEDULES
from order_text import to_csv

from titan_dit.config.section import UserError
from titan_dit.pipeline.schedules import files
from titan_dit.pipeline.schedules.placement import pipeline_order


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_order_comes_back_from_its_file(schedule, tmp_path):
    order = pipeline_order(schedule, num_ranks=3, num_microbatches=6)
    path = tmp_path / "order.csv"
    files.write_order(path, order)
    assert path.read_text() == to_csv(order)
    files.write_order(path, order, [f"schedule {schedule}", "for 6 microbatches"])
    assert path.read_text().startswith(f"# schedule {schedule}\n# for 6 microbatches\n0F0,")
    file = files.read_order(path)
    assert file.order == order
    assert not file.has_messages


def test_spaces_bubbles_empty_lines_and_a_spreadsheet_s_marks_do_no_harm(tmp_path):
    path = tmp_path / "order.csv"
    path.write_bytes(b"\xef\xbb\xbf# by hand\r\n\r\n0F0, ,, 0B0,\r\n 1F0,1B0\r\n")
    assert to_csv(files.read_order(path).order) == "0F0,0B0\n1F0,1B0\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"0F0,0B0\n1F0,1X0\n", 'line 2: "1X0" is not an action: stage, F, B, I or W'),
        (b"# a comment\nrank,actions\n", 'line 2: "rank" is not an action'),
        ("\u0661F0\n".encode(), "is not an action"),
        (b"0F" + b"1" * 5000, r'line 1: "0F111111111111111111\.\.\." is not an action'),
        (b"# nothing\n", "has no actions"),
        (b"", "has no actions"),
        (b"\x00\xff\xfe0F0", "is not UTF-8"),
    ],
)
def test_what_is_no_order_is_refused_in_one_line(content, words, tmp_path):
    path = tmp_path / "order.csv"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf'^\[pipeline\] order=".*order.csv".* ?{words}') as found:
        files.read_order(path)
    assert "\n" not in str(found.value)
    assert str(found.value).endswith('pipeline plan`, or set order = "planned".')


def test_a_folder_is_no_order(tmp_path):
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        files.read_order(tmp_path)
