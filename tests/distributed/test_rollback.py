"""Runs that meet bad numbers and go back; several of them in one launch."""

import json
import time
from collections import Counter

import pytest
import torch
from harness import on_ranks
from tiny import state, tiny_config

from titan_dit.config.section import UserError
from titan_dit.pipeline import recording
from titan_dit.ranks.stop_request import Reason
from titan_dit.recovery.ledger import Ledger, Skipped, trained
from titan_dit.trainer import Trainer


def built(
    world,
    folder,
    steps=10,
    skip=(),
    faults=(),
    spoil=None,
    numbers=(),
    every=1,
    saved=(2, 0),
    snapshots=0,
    **sections,
):
    """A trainer of which the samples `numbers` are spoiled on their way in."""
    config = tiny_config(
        model={"num_layers": 2 if "parallel" in sections else 1},
        **sections,
        job={"dir": str(folder)},
        training={"steps": steps, "microbatch_size": 8 if sections else None},
        checkpoint={"every": saved[0], "keep": saved[1]},
        ema={"power": [0.1], "snapshots": snapshots},
        faults={"max_consecutive_bad_steps": 3, **dict(faults)},
        metrics={"every": every},
    )
    trainer = Trainer(config, world)
    trainer.ledger = Ledger().skip(skip)
    original, wanted = trainer.batches, torch.tensor(list(numbers), dtype=torch.int64)

    def batches():
        for batch in original():
            spoiled = torch.isin(batch.sample_numbers, wanted)
            batch.fields["latent"][spoiled] *= spoil or 1.0
            yield batch

    trainer.batches = batches
    return trainer


class Killed(Exception):
    """In place of a kill."""


def killed_after_going_back(trainer):
    original = trainer.roll_back

    def roll_back():
        original()
        raise Killed

    trainer.roll_back = roll_back


BAD = range(85, 125)  # In steps 6, 7 and 8, which draw 80 to 127.
NAN = {"spoil": float("nan"), "numbers": BAD}


def goes_back(world, folder):
    trainer = built(world, folder / "back", **NAN)
    trainer.fit()
    clean = built(world, folder / "clean", skip=[Skipped(80, 128, "")])
    clean.fit()
    return state(trainer), state(clean)


def looks_seldom(world, folder):
    """The same although the loss is not shown, and looked at when the streak may be full."""
    trainer = built(world, folder / "seldom", **NAN, every=0)
    trainer.fit()
    return state(trainer)


def keeps_one(world, folder):
    """The same although the newest checkpoint, the only one kept, is of a bad step."""
    trainer = built(world, folder / "one", **NAN, saved=(1, 1))
    trainer.fit()
    return state(trainer)


def meets_a_damaged_one(world, folder):
    """The checkpoint to go back to is damaged: the one before it will do."""
    trainer = built(world, folder / "damaged", **NAN)
    original = trainer.checkpoints.wait

    def wait():
        original()
        file = folder / "damaged" / "checkpoints" / "step-00000004" / "__0_0.distcp"
        if trainer.step == 8 and world.rank == 0 and file.is_file():
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)

    trainer.checkpoints.wait = wait
    trainer.fit()
    return state(trainer)


def is_stopped(world, folder):
    """With a row that is too long, which nobody has looked at yet."""
    trainer = built(world, folder / "stopped", **NAN, every=0, saved=(5, 0))
    trainer.open_run_directory()
    trainer.stop.agreed = lambda: trainer.step == 8
    trainer.stop.reason = Reason.STOP
    trainer.train()
    went_to, trainer = trainer.step, built(world, folder / "stopped", **NAN, saved=(5, 0))
    trainer.fit()
    return went_to, state(trainer)


def is_killed(world, folder):
    trainer = built(world, folder / "killed", **NAN, snapshots=10)
    killed_after_going_back(trainer)
    try:
        trainer.fit()
    except Killed:
        snapshots = (folder / "killed" / "checkpoints" / "averages").iterdir()
        assert sorted(path.name for path in snapshots) == [f"step-{n:08d}" for n in range(1, 5)]
        trainer = built(world, folder / "killed", **NAN, snapshots=10)
        trainer.fit()
    return state(trainer)


def gives_up(world, folder):
    numbers, faults = range(32, 10**4), {"max_rollbacks": 2, "log_samples": True}
    trainer = built(world, folder / "up", faults=faults, spoil=float("nan"), numbers=numbers)
    try:
        trainer.fit()
    except UserError as error:
        return str(error)
    return None


def is_recorded(world, folder):
    """The timeline of a pipeline that goes back within its window, and ends within a later one."""
    sections = {"parallel": {"pp": 2}, "profile": {"enabled": True, "start": 4, "steps": 3}}
    trainer = built(world, folder / "recorded", **NAN, **sections)
    trainer.profile.is_chosen = False  # torch's profile would take seconds.
    trainer.fit()
    sections["profile"] |= {"start": 1, "steps": 2}
    trainer = built(world, folder / "recorded", **NAN, **sections, steps=12)
    trainer.profile.is_chosen = False
    trainer.fit()
    group, own = trainer.mesh.axis("pp").get_group(), time.perf_counter_ns
    return recording.measure(group, lambda: own() + 10**12 * world.rank)


SPIKE = {"spoil": 300.0, "numbers": range(97, 98), "faults": {"spike_ratio": 5, "spike_after": 3}}


def meets_a_spike(world, folder):
    straight = built(world, folder / "spike", **SPIKE)
    straight.fit()
    for steps in (8, 10):  # Stopped and gone on with, the average in the checkpoint.
        resumed = built(world, folder / "resumed", **SPIKE, steps=steps)
        resumed.fit()
    states = straight.guard.state(), resumed.guard.state()
    return state(straight), state(resumed), states


def drops_a_batch(world, folder):
    """A loader that loses the first batch: the log tells, as it is of what was trained on."""
    trainer = built(world, folder / "drops", steps=3, faults={"log_samples": True})
    original = trainer.batches

    def batches():
        found = original()
        next(found)
        yield from found

    trainer.batches = batches
    trainer.fit()


RUNS = {
    1: (goes_back, looks_seldom, keeps_one, is_stopped, meets_a_spike, drops_a_batch),
    2: (goes_back, meets_a_damaged_one, is_killed, gives_up, is_recorded),
}
"""By number of ranks: on two what ranks do together, on one what each does for itself."""


def everything(world, folder):
    return {run.__name__: run(world, folder) for run in RUNS[world.size]}


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def saved(run, step):
    return json.loads((run / "checkpoints" / f"step-{step:08d}" / "manifest.json").read_text())


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_bad_numbers_on_one_rank(tmp_path):
    [found] = on_ranks(1, everything, tmp_path)
    clean = went_back(found, tmp_path)
    assert_same(found["looks_seldom"], clean)
    assert_same(found["keeps_one"], clean)
    step, stopped = found["is_stopped"]
    assert step == 5
    assert_same(stopped, clean)
    met_a_spike(*found["meets_a_spike"], tmp_path)
    assert trained(tmp_path / "drops", Ledger()) == Counter(range(16, 64))


def test_bad_numbers_on_two_ranks(tmp_path):
    first, second = on_ranks(2, everything, tmp_path)
    assert_same(first["goes_back"][0], second["goes_back"][0])
    clean = went_back(first, tmp_path)
    assert_same(first["meets_a_damaged_one"], clean)
    names = {path.name for path in (tmp_path / "damaged" / "checkpoints").iterdir()}
    assert "step-00000004.damaged-1" in names
    was_killed(first, tmp_path)
    gave_up(first["gives_up"], second["gives_up"], tmp_path)
    was_recorded(first["is_recorded"], tmp_path / "recorded" / "profile")


def went_back(results, folder):
    """As if the range had never been there: weights, moments, averages, cursor. These, clean."""
    found, clean = results["goes_back"]
    assert_same(found, clean)
    run = folder / "back"
    rows = lines(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert [row["samples"] for row in rows] == [16, 32, 48, 64, 80, *range(144, 209, 16)]
    assert [row["skipped_steps"] for row in rows] == [0] * 10
    clean_rows = lines(folder / "clean" / "metrics.jsonl")
    assert [row["loss"] for row in rows] == [row["loss"] for row in clean_rows]
    *bad, back = lines(run / "faults.jsonl")
    assert [(line["step"], line["kind"]) for line in bad] == [(n, "nonfinite") for n in (6, 7, 8)]
    assert [line["sample_numbers"] for line in bad] == [[[n, n + 16]] for n in (80, 96, 112)]
    assert all(len(line["rows"]) == len(line["drawn"]["timestep"]) == 16 for line in bad)
    assert back == {"step": 8, "kind": "rollback", "to_step": 4, "skipped": [80, 128]}
    names = {path.name for path in (run / "checkpoints").iterdir()}
    # The save of step 6 belonged to the row of bad steps; that of step 8 came after it.
    assert names == {f"step-{n:08d}" for n in range(2, 11, 2)} | {"step-00000006.set-aside-1"}
    ledger = saved(run, 10)["ledger"]
    assert ledger["skipped"] == [[80, 128, "steps 6 to 8 were bad"]]
    assert (ledger["samples"], ledger["trained"], ledger["untrained"]) == (208, 160, [])
    return clean


def was_killed(results, folder):
    """Before the next checkpoint: the range is left out all the same, and met once only."""
    assert_same(results["is_killed"], results["goes_back"][1])
    kinds = [line["kind"] for line in lines(folder / "killed" / "faults.jsonl")]
    assert kinds == ["nonfinite"] * 3 + ["rollback"]


def gave_up(message, other, folder):
    assert message == other
    assert "the run cannot roll back: max_rollbacks=2 brought no progress" in message
    kinds = [line["kind"] for line in lines(folder / "up" / "faults.jsonl")]
    assert kinds == [*["nonfinite"] * 3, "rollback"] * 2 + ["nonfinite"] * 3
    # Each time the samples behind, from the same step on.
    skipped = [line["skipped"] for line in lines(folder / "up" / "faults.jsonl")[3::4]]
    assert skipped == [[32, 80], [80, 128]]
    attempts = sorted(path.name for path in (folder / "up" / "samples-seen").iterdir())
    assert attempts == [f"attempt-{n:05d}" for n in (1, 2, 3)]


def was_recorded(offsets, folder):
    """The three steps after the profiled ones, of which the last is after the rollback."""
    ends = (".json.gz", ".png", ".txt", ".costs.json")
    names = {path.name for path in folder.iterdir() if path.name.startswith("timeline")}
    # The resumed run ended after the profiled steps.
    assert names == {f"timeline-steps-{of}{end}" for of in ("7-5", "11-12") for end in ends}
    text = (folder / "timeline-steps-7-5.txt").read_text()
    assert "2 ranks, 2 stages, 2 microbatches" in text
    table = text.split("\n\n")[1].splitlines()[1:]
    rows = {line[:26].strip(): [float(cell) for cell in line[26:].split()] for line in table}
    wall, *_ = rows.pop("all"), rows.pop("bubble, measured"), rows.pop("bubble, simulated")
    for rank in range(2):
        assert sum(row[rank] for row in rows.values()) == pytest.approx(wall[rank], abs=0.02)
    assert min(rows["F"] + rows["B"] + rows["optimizer"] + rows["data wait"]) > 0
    costs = json.loads((folder / "timeline-steps-7-5.costs.json").read_text())
    assert set(costs["actions"]) == {"0F", "0B", "1F", "1B"}
    assert set(costs["links"]) == {"0->1", "1->0"}
    assert "were profiled" not in text
    assert "were profiled" in (folder / "timeline-steps-11-12.txt").read_text()
    # The second clock is set 1000 s ahead; both ranks have the same.
    assert abs(offsets[1].offset_ns - 10**12) <= offsets[1].round_trip_ns / 2


def met_a_spike(straight, resumed, states, folder):
    assert_same(resumed, straight)
    assert states[0] == states[1]
    assert states[0]["spike_steps"] == 1
    assert states[0]["nan_steps"] == 0
    (line,) = lines(folder / "spike" / "faults.jsonl")
    assert (line["step"], line["kind"], line["sample_numbers"]) == (7, "spike", [[96, 112]])
    assert line["loss"] > 5
    rows = lines(folder / "spike" / "metrics.jsonl")
    assert [row["skipped_steps"] for row in rows] == [0] * 6 + [1] * 4
    assert [row["nan_steps"] for row in rows] == [0] * 10
    assert saved(folder / "spike", 10)["ledger"]["untrained"] == [[96, 112, 7, 7]]
