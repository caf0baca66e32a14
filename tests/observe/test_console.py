import pytest

from titan_dit.observe.console import count, duration, progress, say

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


def test_a_line_is_printed_at_once(capsys):
    say("hello")
    assert capsys.readouterr().out == "hello\n"
