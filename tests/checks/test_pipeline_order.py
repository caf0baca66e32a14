"""Orders that do not fit the run are refused in one line before any work."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from plans import check, planned
from tiny import tiny_config

from titan_dit.checks.pipeline import check_same_file, order_hint
from titan_dit.config.config_file import changes, to_tables
from titan_dit.config.section import UserError
from titan_dit.pipeline.schedules import files
from titan_dit.pipeline.schedules.placement import pipeline_order

MODEL = {"num_layers": 8}
TRAINING = {"microbatch_size": 4}  # Four microbatches of a batch of 16.


def refused(words, pp=2, **pipeline):
    with pytest.raises(UserError, match=words) as found:
        check({"pp": pp}, pipeline=pipeline, model=MODEL, training=TRAINING)
    text = str(found.value)
    assert text.startswith("[pipeline] ")
    assert "\n" not in text
    return text


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Writes an order and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(order):
        text = order if isinstance(order, str) else files.write_order(tmp_path / "own.csv", order)
        if text is not None:
            (tmp_path / "own.csv").write_text(text)
        return "own.csv"

    return write


def stock(schedule, pp=2, microbatches=4, virtual_stages=1):
    sizes = {"num_ranks": pp, "num_microbatches": microbatches}
    return pipeline_order(schedule, **sizes, virtual_stages=virtual_stages)


def test_every_order_that_fits_passes(file):
    for schedule in ("1f1b", "interleaved_zero_bubble"):
        for keys in ({}, {"order": "run_time"}, {"order": "run_time", "memory": 1.5}):
            check({"pp": 2}, pipeline={"schedule": schedule, **keys}, model=MODEL)
        name = file(stock(schedule))
        keys = {"schedule": schedule, "order": name}
        check({"pp": 2}, pipeline=keys, model=MODEL, training=TRAINING)


@pytest.mark.parametrize(
    ("order", "hint"),
    [("runtime", " Did you mean run_time?"), ("Plan", " Did you mean planned?"), ("order.txt", "")],
)
def test_an_unknown_order_is_refused_with_the_likeliest_one(order, hint):
    text = refused("is not", order=order)
    assert text == f'[pipeline] order="{order}" is not "planned", "run_time" or a FILE.csv.{hint}'


def test_a_missing_file_is_refused_with_the_folder_it_is_not_in(file, tmp_path):
    text = refused("there is no such file", order="own.csv")
    assert str(tmp_path) in text
    (tmp_path / "folder.csv").mkdir()
    refused("there is no such file", order="folder.csv")


def test_a_file_for_another_pipeline_is_refused(file):
    refused(
        r'"own.csv" is for 4 pipeline ranks, but \[parallel\] pp=2', order=file(stock("1f1b", 4))
    )
    words = r'is for 4 stages, but schedule="1f1b" with virtual_stages=1 on \[parallel\] pp=2 has 2'
    loop = stock("interleaved_1f1b", virtual_stages=2)
    refused(words, order=file(loop))
    words = "is for 6 microbatches, but a step has 4 on each rank .*global_batch_size"
    text = refused(words, order=file(stock("1f1b", microbatches=6)))
    assert text.endswith('by `python -m titan_dit pipeline plan`, or set order = "planned".')
    words = r'has stage 2 on rank 0, but schedule="zbv_zero_bubble" on rank 1\. Write it'
    refused(words, order=file(loop), schedule="zbv_zero_bubble")


def test_a_file_that_deadlocks_overtakes_or_repeats_is_refused(file):
    four = stock("1f1b")
    stuck = (tuple(reversed(four[0])), four[1])
    refused(r'order="own.csv": (Deadlock|0\w\d comes after)', order=file(stuck))
    late = "0B0,0F0,0F1,0B1,0F2,0B2,0F3,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n"
    refused("Deadlock: these wait for each other: rank 0 at 0B0, rank 1", order=file(late))
    refused(
        "Stage 1 runs microbatch 3 forward 1 times, backward 0", order=file((four[0], four[1][:-1]))
    )
    loop = stock("interleaved_1f1b", virtual_stages=2)
    keys = {"schedule": "interleaved_1f1b", "virtual_stages": 2}
    check({"pp": 2}, pipeline={**keys, "order": file(loop)}, model=MODEL, training=TRAINING)
    first = [str(action) for action in loop[1]]
    a, b = first.index("1F1"), first.index("3F0")
    first[a], first[b] = first[b], first[a]
    overtaken = ",".join(map(str, loop[0])) + "\n" + ",".join(first) + "\n"
    refused("which was sent earlier|Deadlock", order=file(overtaken), **keys)


def test_a_garbled_file_is_refused_with_its_line(file):
    refused('order="own.csv": line 2: "1Z0" is not an action', order=file("0F0,0B0\n1Z0\n"))


def test_memory_and_run_time_need_each_other_and_a_pipeline(file):
    words = r'memory=1.5 is for order="run_time", but order="planned". Set memory = 1.0 or order'
    refused(words, memory=1.5)
    refused('but order="own.csv"', memory=1.5, order=file(stock("1f1b")))
    refused("memory=0.5", memory=0.5)
    words = r'order="run_time" is for a pipeline, but \[parallel\] pp=1. Set order = "planned"'
    refused(words, pp=1, order="run_time")
    refused(r'order="own.csv" is for a pipeline', pp=1, order=file(stock("1f1b")))


def test_kinds_of_a_file_decide_whether_the_backward_is_split(file):
    split = stock("interleaved_zero_bubble")
    keys = {"order": file(split)}
    sections = {"model": MODEL, "training": TRAINING}
    _, plan = planned({"pp": 2}, pipeline=keys, **sections)
    assert (plan.pipeline.schedule, plan.splits_backward) == ("1f1b", True)
    assert plan.order(4) == split
    assert plan.order(6) == stock("1f1b", microbatches=6)
    for other, words in (
        ({"compile": {"enabled": True}}, "splits the backward pass"),
        ({"activation_checkpoint": {"mode": "full"}}, "does not work with"),
    ):
        with pytest.raises(UserError, match=r'order="own.csv".*order = "planned"') as found:
            check({"pp": 2}, pipeline=keys, **sections, **other)
        assert words in str(found.value)
    full = {"order": file(stock("1f1b")), "schedule": "interleaved_zero_bubble"}
    check({"pp": 2}, pipeline=full, **sections, compile={"enabled": True})


def test_a_run_without_spare_work_is_told_that_run_time_order_seldom_pays():
    def hint(**pipeline):
        _, plan = planned({"pp": pipeline.pop("pp", 2)}, pipeline=pipeline, model=MODEL)
        return order_hint(plan)

    assert "seldom pays with schedule=" in hint(order="run_time")
    assert "seldom pays" in hint(order="run_time", schedule="interleaved_1f1b")
    assert hint() is None
    assert hint(order="run_time", memory=1.5) is None
    assert hint(order="run_time", schedule="zbv_zero_bubble") is None


def test_a_resumed_run_may_change_its_order():
    keys = {"order": "run_time", "memory": 1.5, "transport": "nixl", "network": "ib0"}
    before, now = (to_tables(tiny_config(pipeline=pipeline)) for pipeline in ({}, keys))
    assert before["pipeline"] != now["pipeline"]
    assert list(changes(before, now)) == []


def test_a_file_must_be_the_same_on_all_hosts(file):
    name = file(stock("1f1b"))
    keys = {"schedule": "1f1b", "order": name}
    _, plan = planned({"pp": 2}, pipeline=keys, model=MODEL, training=TRAINING)
    check_same_file(plan, lambda digest: [digest, digest])
    with pytest.raises(UserError, match=r'order="own.csv" is another order on rank 1 than on rank'):
        check_same_file(plan, lambda digest: [digest, f"not {digest}"])
    asked = []
    check_same_file(planned({"pp": 2})[1], asked.append)
    assert not asked


def test_hosts_whose_files_differ_in_their_messages_alone_are_told_apart(file):
    digests = []
    for first in ("0F0,0SEND_F0,0F1,0SEND_F1", "0F0,0F1,0SEND_F0,0SEND_F1"):
        rows = f"{first},0RECV_B0,0B0,0RECV_B1,0B1"
        order = file(f"{rows}\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n")
        plan = SimpleNamespace(
            order_file=files.read_order(Path(order)), pipeline=SimpleNamespace(order=order)
        )
        check_same_file(plan, lambda digest: digests.append(digest) or [digest])
    assert len(set(digests)) == 2


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"order": "run_time"},
            'order="run_time" decides within a step. Set order = "planned", or runtime = "auto"',
        ),
        ({"transport": "shared_memory"}, "sends by the process group, but transport=.* Leave out"),
    ],
)
def test_what_torchs_runtime_cannot_do_is_refused_before_the_start(keys, words):
    assert refused(words, runtime="torch", **keys).startswith('[pipeline] runtime="torch"')
