"""`python -m titan_dit pipeline plan` on the measured costs of a run, and `pipeline draw`."""

import re
import sys
from dataclasses import replace

import pytest
from PIL import Image, ImageColor

from titan_dit import __main__
from titan_dit.commands.flags import PipelineDrawFlags
from titan_dit.commands.pipeline_draw import Drawn
from titan_dit.config.config_file import FORMAT
from titan_dit.config.section import UserError
from titan_dit.pipeline.schedules import files
from titan_dit.pipeline.schedules.files import MeasuredCosts
from titan_dit.pipeline.schedules.placement import pipeline_order
from titan_dit.pipeline.schedules.proof import check
from titan_dit.pipeline.schedules.schedule import Action, Kind, peak_activations
from titan_dit.pipeline.schedules.simulator import simulate
from titan_dit.pipeline.timeline import COMPUTED, GAP, IDLE_COLOUR, LEFT, RIGHT, ROW, TOP, WIDTH

PROFILE = "profile/timeline-steps-3-5.costs.json"
CONFIG = """format = {}
[parallel]
pp = {}
[pipeline]
schedule = "{}"
virtual_stages = 2
"""
ORDER = pipeline_order(
    "interleaved_zero_bubble", num_ranks=4, num_microbatches=16, virtual_stages=2
)


def measured(delay=0.01):
    """Actions of 10 ms, as many microbatches of which are long as are short, and slow links."""
    lengths = [0.01 * (0.5 + microbatch % 3) for microbatch in range(16)]
    seconds = {action: lengths[action.microbatch] for row in ORDER for action in row}
    return MeasuredCosts(
        stage_ranks=(0, 1, 2, 3) * 2,
        num_microbatches=16,
        order=ORDER,
        seconds=seconds,
        latencies={(rank, (rank + 1) % 4): delay for rank in range(4)},
        step_s=1.25,
    )


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = tmp_path / "outputs" / "mine"
    made.mkdir(parents=True)
    (made / "config.toml").write_text(CONFIG.format(FORMAT, 4, "interleaved_zero_bubble"))
    files.write_costs(made / PROFILE, measured())
    return made


def typed(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["titan_dit", "pipeline", *map(str, words)])
    __main__.main()


def plan(monkeypatch, *words):
    typed(monkeypatch, "plan", "--run", "outputs/mine", "--out", "order.csv", *words)


def test_the_plan_of_a_run_is_written_and_its_gain_is_said(run, monkeypatch, capsys):
    plan(monkeypatch, "--memory", "1.25")
    said = capsys.readouterr().out
    found = files.read_order(run.parent.parent / "order.csv").order
    check(found, num_stages=8, num_microbatches=16)
    costs = measured()
    before, after = (
        simulate(order, costs.seconds.__getitem__, latency=costs.latency)
        for order in (ORDER, found)
    )
    pairs = zip(peak_activations(found), peak_activations(ORDER), strict=True)
    assert all(new <= 1.25 * old for new, old in pairs)
    assert "interleaved_zero_bubble, 4 ranks, 16 microbatches; a step took 1,250.0 ms" in said
    rows = {re.split("  +", line)[0]: re.split("  +", line)[1:] for line in said.splitlines()[1:]}
    steps = [f"{1000 * x.makespan:,.1f}" for x in (before, after)]
    assert rows["step"] == [f"{step} ms" for step in steps]
    vary = [float(text[:-3].replace(",", "")) for text in rows["step, times vary by 10%"]]
    assert 1.02 < vary[0] / vary[1] < 1.05 * before.makespan / after.makespan
    assert rows["idle"] == [f"{x.idle_fraction:.1%}" for x in (before, after)]
    held = [" ".join(map(str, x.peak_activations)) for x in (before, after)]
    assert rows["peak activations"] == held
    gain = float(re.search(r"wrote order.csv: ([\d.]+) x as fast", said)[1])
    assert gain == pytest.approx(before.makespan / after.makespan, abs=6e-3)
    assert gain > 1.1
    assert said.endswith("Run it with --pipeline.order order.csv\n")


def test_a_plan_that_does_not_pay_says_so_and_is_the_planned_order(run, monkeypatch, capsys):
    even = {action: 0.01 for action in measured().seconds}
    even |= {a: 0.0 for a in even if a.kind is Kind.BACKWARD_INPUT and a.stage == 0}
    files.write_costs(run / PROFILE, replace(measured(0.0), seconds=even))
    plan(monkeypatch)
    said = capsys.readouterr().out
    assert "wrote order.csv, the planned order: no other is 1% faster within this memory" in said
    assert said.endswith("Stay with --pipeline.order planned\n")
    assert files.read_order(run.parent.parent / "order.csv").order == ORDER


def refused(monkeypatch, *words):
    with pytest.raises((UserError, SystemExit)) as found:
        plan(monkeypatch, *words)
    assert isinstance(found.value, UserError)
    assert "\n" not in str(found.value)
    return str(found.value)


def test_what_cannot_be_planned_is_one_line(run, monkeypatch):
    assert "memory=0.9 must be at least 1" in refused(monkeypatch, "--memory", "0.9")
    for pp, schedule in ((2, "interleaved_zero_bubble"), (4, "interleaved_1f1b")):
        (run / "config.toml").write_text(CONFIG.format(FORMAT, pp, schedule))
        said = refused(monkeypatch)
        assert f"{PROFILE} is of another layout" in said
        assert f'pp={pp}, [pipeline] schedule="{schedule}"' in said
    (run.parent.parent / "order.csv").write_text("mine")
    assert "out=order.csv is there already" in refused(monkeypatch)
    assert (run.parent.parent / "order.csv").read_text() == "mine"
    assert "name a .csv file" in refused(monkeypatch, "--out", "order.txt")
    assert "no such folder" in refused(monkeypatch, "--run", "outputs/none", "--out", "o.csv")
    (run / PROFILE).unlink()
    said = refused(monkeypatch, "--out", "o.csv")
    assert "no timeline-steps-*.costs.json in" in said
    assert "Train the run a few steps with --profile.enabled true" in said


def test_planned_and_run_time_order_are_drawn_below_each_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ("--ranks", 2, "--memory", 1.5, "--latency", 1, "--plan", "--out", "drawn/order.png")
    typed(monkeypatch, "draw", *flags)
    *lines, drew = capsys.readouterr().out.splitlines()
    assert drew == "drew drawn/order.png"
    names, steps = zip(
        *(re.match(r"(.*): ([\d.]+) forwards", line).groups() for line in lines), strict=True
    )
    assert names == ("planned", "run_time, memory 1.5", "FILE.csv of pipeline plan, memory 1.5")
    planned, run_time, plan = map(float, steps)
    assert run_time <= plan < 0.8 * planned
    sheet = Image.open("drawn/order.png").convert("RGB")
    forward, pale = (ImageColor.getrgb(c) for c in (COMPUTED["F"][1], IDLE_COLOUR["input"][1]))
    height = sheet.height // 3
    for block in range(3):
        # Of the second rank: the first forward, before it idle time, and the end of the step.
        y = block * height + TOP + ROW + GAP + 5
        row = [sheet.getpixel((x, y)) for x in range(LEFT, WIDTH - RIGHT)]
        per_forward = len(row) / planned
        assert row[round(1.4 * per_forward)] == pale
        assert row[round(1.75 * per_forward)] == forward
        end = max(x for x, colour in enumerate(row) if colour != (255, 255, 255)) / per_forward
        assert end == pytest.approx(float(steps[block]), abs=0.05)
    with pytest.raises(UserError, match=r"name a \.png file"):
        typed(monkeypatch, "draw", "--out", "order.jpg")
    assert list(tmp_path.iterdir()) == [tmp_path / "drawn"]


def test_what_is_drawn_has_the_times_of_the_flags():
    made = Drawn(PipelineDrawFlags(out="x.png", lengths=(1.0, 3.0), slowness=(1.0, 1.0, 1.3, 1.0)))
    assert made.cost(Action(Kind.FORWARD, 1, 2)) == 0.5
    assert made.cost(Action(Kind.FORWARD, 6, 3)) == pytest.approx(0.5 * 3 * 1.3)
    planned, run_time = made.simulations().values()
    assert planned.order == made.order != run_time.order
    assert planned.makespan > 1.02 * run_time.makespan
    assert planned.peak_activations == run_time.peak_activations
