import time

import pytest
from terminals import screen_of, terminal

from titan_dit.system import progress
from titan_dit.system.progress import ProgressLine, count, duration, following


@pytest.mark.parametrize(
    ("value", "text"), [(12, "12"), (999, "999"), (1234.5, "1.2k"), (2.5e6, "2.5M"), (3e9, "3.0G")]
)
def test_counts_are_short(value, text):
    assert count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (59.4, "0:59"),
        (59.6, "1:00"),
        (65, "1:05"),
        (3725, "1:02:05"),
        (360_000, "100:00:00"),
    ],
)
def test_durations_are_read_as_a_clock(seconds, text):
    assert duration(seconds) == text


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 0.0

    monkeypatch.setattr(progress.time, "monotonic", lambda: Clock.now)
    return Clock


def test_a_log_gets_a_line_every_ten_seconds_with_the_time_left(clock, capsys):
    line = ProgressLine(3000, "files", resumes=True)
    for second in range(31):
        clock.now = float(second)
        # An earlier run did the first thousand.
        line(1000 + 50 * second, f"dropped {second // 20}" if second >= 20 else "")
    line.end()
    assert capsys.readouterr().err.splitlines() == [
        "1,500/3,000  50 files/s  ETA 0:30",
        "2,000/3,000  50 files/s  ETA 0:20  dropped 1",
        "2,500/3,000  50 files/s  ETA 0:10  dropped 1",
    ]


@pytest.mark.parametrize("width", [60, 100, 200])
def test_a_terminal_gets_one_line_that_ends_with_all_done(width, clock, monkeypatch):
    with terminal(width, monkeypatch) as (_, read):
        line = ProgressLine(1 << 30, "B", what="verified " + "a-long-name/" * 6, form=count)
        for second in range(5):
            clock.now = float(second)
            line.add(1 << 28 if second else 0)
        line.end()
        line.end()
        written = read()
    shown = screen_of(written, width)
    assert len(shown) == 1
    assert len(shown[0]) < width
    if width > 100:
        assert shown[0].endswith("1.1G/1.1G  268.4M B/s  ETA 0:00")
    assert written.count("\n") == 1


def test_a_short_command_shows_nothing(clock, monkeypatch, capsys):
    with terminal(80, monkeypatch) as (_, read):
        line = ProgressLine(2, "files")
        line.add(1)
        line.add(1)
        line.end()
        assert read() == ""
    monkeypatch.setenv("RANK", "1")
    line = ProgressLine(2, "files")
    clock.now = 60.0
    line.add(2)
    assert capsys.readouterr().err == ""


def test_a_call_that_reports_nothing_is_followed_by_its_size(monkeypatch):
    monkeypatch.setattr(progress, "RENEWED_S", 0.01)
    with terminal(80, monkeypatch) as (_, read):
        line = ProgressLine(8, "B", what="writing a.pt")
        with following(lambda: int(1000 * (time.monotonic() - line.began)), line):
            time.sleep(0.1)
        written = read()
    assert "writing a.pt  8/8" in written
    assert written.endswith("\n")
    assert len(screen_of(written, 80)) == 1
