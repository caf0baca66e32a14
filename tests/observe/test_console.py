import sys

import pytest
from terminals import screen_of, terminal

from titan_dit.observe.console import progress, say
from titan_dit.observe.run_log import RunLog
from titan_dit.system import stdio

ROW = {
    "step": 50,
    "loss": 0.12345,
    "grad_norm": 1.5,
    "lr": 1e-4,
    "samples_per_s": 1234.5,
    "tokens_per_s": 316_000.0,
    "tflops_per_gpu": 12.34,
    "mfu": 0.4567,
    "peak_gib": 3.21,
    "data_wait_ms": 0.44,
    "skipped_steps": 0,
    "step_ms": 500.0,
}


def test_a_line_says_how_far_how_well_and_how_long():
    assert progress(ROW, 3000) == (
        "step   50/3000  loss 0.1235  grad 1.500  lr 1.0e-04  1.2k samples/s  316.0k tokens/s  "
        "12.3 TFLOP/s  MFU 45.7%  3.21 GiB  data 0.4 ms  ETA 24:35"
    )


def test_the_smoothed_loss_stands_beside_that_of_the_step():
    line = progress(ROW | {"smooth_loss": 0.25, "validation_loss": 0.5}, 3000)
    assert "loss 0.1235  smooth 0.2500  validation 0.5000  grad" in line
    assert "smooth" not in progress(ROW | {"smooth_loss": None}, 3000)


def test_a_line_leaves_out_what_is_unknown_and_says_what_went_wrong():
    line = progress(ROW | {"mfu": None, "loss": None, "grad_norm": None, "skipped_steps": 3}, 3000)
    assert "MFU" not in line
    assert "loss not finite  grad not finite" in line
    assert "skipped 3" in line


def test_the_last_line_has_nothing_left():
    assert progress(ROW | {"step": 3000}, 3000).endswith("ETA 0:00")


def test_a_line_is_printed_at_once(capsys):
    say("hello")
    assert capsys.readouterr().out == "hello\n"


@pytest.mark.parametrize("width", [50, 60, 100, 200])
def test_a_line_fits_the_terminal_and_what_matters_stays(width):
    row = ROW | {"skipped_steps": 3, "validation_loss": 0.5}
    whole, line = progress(row, 3000), progress(row, 3000, width)
    assert len(line) < width
    for words in ("step   50/3000", "loss 0.1235", "skipped 3", "ETA 24:35"):
        assert words in line
    assert set(line.split("  ")) <= set(whole.split("  "))
    if width == 200:
        assert line == whole
    elif width == 100:
        assert "samples/s" in line


@pytest.mark.parametrize("width", [60, 100, 200])
def test_a_run_on_a_terminal_renews_one_line_which_nothing_garbles(width, tmp_path, monkeypatch):
    with terminal(width, monkeypatch) as (_, read):
        log = RunLog(tmp_path, "run", is_written=True)
        log.say("the first line")
        for step in (10, 20, 30):
            log.progress(ROW | {"step": step}, 3000)
        stdio.write(sys.stderr, "titan_dit: a line of another process\n")
        log.progress(ROW | {"step": 40}, 3000)
        log.say(None, "saved outputs/run/checkpoints/step-00000040")
        log.progress(ROW | {"step": 50, "validation_loss": 0.5}, 3000)
        log.progress(ROW | {"step": 60}, 3000)
        screen = screen_of(read(), width)
    assert [line.split("  loss")[0] for line in screen] == [
        "the first line",
        "titan_dit: a line of another process",
        "step   40/3000",
        "saved outputs/run/checkpoints/step-00000040",
        "step   50/3000",
        "step   60/3000",
    ]
    assert all(len(line) < width for line in screen)


def test_a_log_gets_a_whole_line_for_each_step(tmp_path, capsys):
    log = RunLog(tmp_path, "run", is_written=True)
    for step in (10, 20):
        log.progress(ROW | {"step": step}, 3000)
    log.say("saved")
    lines = capsys.readouterr().out.splitlines()
    assert [line[:12] for line in lines] == ["step   10/30", "step   20/30", "saved"]
    assert lines[0] == progress(ROW | {"step": 10}, 3000)
