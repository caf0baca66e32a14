"""torch's schedule classes: their orders, a user's own, files, and which runtime `auto` takes."""

import itertools
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from known import INTERLEAVED, SCHEDULES
from order_text import to_csv
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

from titan_dit.config.layout import PipelineConfig
from titan_dit.config.section import UserError, conform, hints_of
from titan_dit.pipeline import runtimes, schedules
from titan_dit.pipeline.schedules import files, placement, torch_classes
from titan_dit.pipeline.schedules.schedule import Action, Call, Kind, schedule_of
from titan_dit.pipeline.torch_runtime import LoopDriver

SIZES = (2, 3, 4), (1, 2, 3, 4, 6, 8, 12), (1, 2, 4)
USERS = "users_schedules"


def cases(schedule, sizes=SIZES):
    """(ranks, microbatches, virtual stages) that the schedule supports."""
    for p, m, v in itertools.product(*sizes):
        if v > 1 and schedule not in INTERLEAVED:
            continue
        try:
            placement.check_schedule(schedule, num_ranks=p, num_microbatches=m, virtual_stages=v)
        except UserError:
            continue
        yield p, m, v


def stage_ranks(schedule, p, v):
    stages = range(p * placement.stages_per_rank(schedule, v))
    return tuple(placement.rank_of_stage(schedule, stage, p) for stage in stages)


def order_of(schedule, p, m, v):
    return placement.pipeline_order(schedule, num_ranks=p, num_microbatches=m, virtual_stages=v)


def chosen(schedule, p, m, v, **pipeline):
    """The runtime of a pipeline, and its console line."""
    config = PipelineConfig(schedule=schedule, virtual_stages=v, **pipeline)
    order = order_of(schedule, p, m, v)
    return runtimes.choose(config, order, stage_ranks(schedule, p, v), None)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_torchs_class_runs_the_same_actions(schedule):
    same, refused = 0, []
    for p, m, v in cases(schedule):
        made = torch_classes.torch_class(schedule_of(schedule))
        try:
            calls = torch_classes.record(made, stage_ranks(schedule, p, v), m)
        except ValueError:
            refused.append((p, m, v))
            continue
        assert torch_classes.order_of(calls) == order_of(schedule, p, m, v), (p, m, v)
        same += 1
    # torch wants a microbatch for each stage of 1f1b, and whole rounds with one stage, too.
    assert all(m < p for p, m, _ in refused) if schedule == "1f1b" else not refused
    assert same >= 9


def test_what_a_schedule_asks_for_is_recorded():
    made = torch_schedules.get_schedule_class("1F1B")
    first, second = torch_classes.record(made, (0, 1), 2)
    names = ", ".join(f"{call.what} {call.action}" for call in first)
    assert names == (
        "run 0F0, send 0F0, run 0F1, send 0F1, receive 1I0, run 0B0, receive 1I1, run 0B1"
    )
    assert second[:3] == (
        Call("receive", Action(Kind.FORWARD, 0, 0)),
        Call("run", Action(Kind.FORWARD, 1, 0)),
        Call("run", Action(Kind.BACKWARD, 1, 0)),
    )


def test_the_record_of_one_schedule_for_all_ranks_is_that_of_a_schedule_each():
    class Another(torch_schedules.ScheduleZBVZeroBubble):
        """A user's: not of torch's modules."""

    places = stage_ranks("zbv_zero_bubble", 4, 1)
    own = torch_classes.record(torch_schedules.ScheduleZBVZeroBubble, places, 8)
    assert torch_classes.record(Another, places, 8) == own


def test_a_driver_is_let_go_after_its_block_and_an_idle_stage_runs_nothing():
    stage = torch_classes.DrivenStage(0, 2, 0, 2)
    recorder = torch_classes.Recorder()
    with torch_classes.driven([stage], recorder):
        stage.forward_one_chunk(0, ())
    assert recorder.calls == [Call("run", Action(Kind.FORWARD, 0, 0))]
    with pytest.raises(AssertionError, match="0F1 outside of a step"):
        stage.forward_one_chunk(1, ())


# `auto` takes torch's runtime for these, whatever the ranks and microbatches: docs/pipelines.md.
FITS = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble")
FITS += ("zbv_zero_bubble",)
LATE = {(2, 4): 4, (4, 8): 6, (8, 16): 7, (4, 16): 3, (8, 64): 2}
"""(ranks, microbatches) -> per cent that dualpipev is slower."""


@pytest.mark.parametrize("schedule", FITS)
@pytest.mark.parametrize("p", [2, 4, 8])
def test_auto_takes_torchs_class_where_it_is_as_fast(schedule, p):
    for m in (p, 2 * p, 4 * p):
        found = chosen(schedule, p, m, 2 if schedule in INTERLEAVED else 1)
        assert found.torch is torch_classes.torch_class(schedule_of(schedule)), (m, found.line)
        name = found.torch.__name__
        assert found.line == f"torch's {name}: within 2% of the own loop's step (simulated)"


@pytest.mark.parametrize(("sizes", "slower"), LATE.items())
def test_auto_keeps_its_loop_where_torch_sends_late(sizes, slower):
    """A forward and a backward that overlap in torch are one action: the forward's output waits."""
    found = chosen("dualpipev", *sizes, 1)
    assert found.torch is None
    assert found.line == (
        f"own loop: torch's ScheduleDualPipeV would be {slower}% slower (simulated)"
    )
    assert chosen("dualpipev", *sizes, 1, runtime="torch").torch.__name__ == "ScheduleDualPipeV"


def test_own_and_torch_are_taken_at_their_word():
    assert chosen("1f1b", 2, 4, 1, runtime="own").line == 'own loop (runtime="own")'
    found = chosen("1f1b", 2, 4, 1, runtime="torch")
    assert found.line == 'torch\'s Schedule1F1B (runtime="torch")'


@pytest.mark.parametrize(
    ("sizes", "pipeline", "words"),
    [
        (("1f1b", 4, 2, 1), {}, r'schedule="1f1b": Number of microbatches \(2\) must be greater'),
        (("interleaved_1f1b", 2, 9, 1), {}, "requires the number of microbatches to be a multiple"),
        (
            ("1f1b", 2, 4, 1),
            {"order": "run_time"},
            'order="run_time" decides within a step. Set order = "planned", or runtime = "auto"',
        ),
        (("known:OWN", 2, 4, 1), {}, 'schedule="known:OWN": torch has no class for it'),
        (("known:LATER", 2, 4, 1), {}, rf"torch {re.escape(torch.__version__)} has no ScheduleX"),
        (("known:OTHER", 2, 4, 1), {}, "torch's class runs another order of actions"),
    ],
)
def test_what_torch_cannot_run_is_refused_in_one_line_and_auto_runs_it(sizes, pipeline, words):
    with pytest.raises(UserError, match=words) as found:
        chosen(*sizes, runtime="torch", **pipeline)
    text = str(found.value)
    assert text.startswith('[pipeline] runtime="torch": ')
    assert 'runtime = "auto"' in text
    assert "\n" not in text
    found = chosen(*sizes, **pipeline)
    assert found.torch is None
    assert re.search(words.split(". Set")[0].rstrip(), found.line), found.line


@pytest.mark.parametrize(
    ("name", "per_rank", "v_shaped", "splits"),
    [
        ("Mine", 2, False, False),
        ("Placed", 2, False, False),
        ("AllForward", 1, False, False),
        ("Folded", 2, True, True),
    ],
)
def test_a_user_s_class_is_a_schedule(name, per_rank, v_shaped, splits):
    full = f"{USERS}:{name}"
    found = schedule_of(full)
    assert (found.v_shaped, found.splits_backward) == (v_shaped, splits)
    v = 1 if v_shaped else per_rank
    assert placement.stages_per_rank(full, v) == per_rank
    order = order_of(full, 2, 4, v)
    like = {"Mine": "interleaved_1f1b", "Folded": "zbv_zero_bubble"}.get(name)
    if like:
        assert order == order_of(like, 2, 4, v)
    assert len(order) == 2
    assert sum(map(len, order)) == 2 * per_rank * 4 * (3 if splits else 2)
    # Our loop runs it, too.
    assert chosen(full, 2, 4, v, runtime="own").torch is None
    assert chosen(full, 2, 4, v, runtime="torch").torch is found.torch


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Sideways", r"puts its stages on the ranks \[0, 0, 1, 1\]: only loops \(\[0, 1, 0, 1\]\)"),
        ("Broken", "cannot be built for pp=2 and 8 microbatches: RuntimeError: no schedule today"),
        ("FORWARD", "Name a Schedule, or a class derived from torch's PipelineScheduleSingle"),
    ],
)
def test_a_class_that_is_no_schedule_is_refused_in_one_line(name, words):
    with pytest.raises(UserError, match=words) as found:
        schedule_of(f"{USERS}:{name}")
    assert str(found.value).startswith(f'[pipeline] schedule="{USERS}:{name}" ')
    assert "\n" not in str(found.value)


def test_a_class_that_forgets_microbatches_is_refused():
    with pytest.raises(
        UserError, match=r"with 4 microbatches: Stage 0 runs microbatch 3 forward 0"
    ):
        placement.check_schedule(f"{USERS}:Forgetful", num_ranks=2, num_microbatches=4)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Silent", "Rank 1 never sends 1I3"),
        ("Twice", "Rank 1 sends 1I3 out of sequence"),
        ("Early", "Rank 0 sends 0F0 before it is computed"),
    ],
)
def test_a_class_with_wrong_messages_is_refused_by_torch_and_runs_in_our_loop(name, reason):
    full = f"{USERS}:{name}"
    with pytest.raises(UserError, match=reason):
        chosen(full, 2, 4, 1, runtime="torch")
    assert chosen(full, 2, 4, 1).line == f'own loop: schedule="{full}": {reason}'


def test_a_class_is_asked_for_its_placement_with_the_sizes_that_it_accepts():
    name = f"{USERS}:Three"
    assert order_of(name, 2, 4, 3) == order_of("interleaved_1f1b", 2, 4, 3)
    with pytest.raises(
        UserError, match=r"with 4 microbatches: three stages please. Set \[training"
    ):
        placement.check_schedule(name, num_ranks=2, num_microbatches=4, virtual_stages=2)


def test_our_loop_needs_no_private_part_of_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, torch_classes.__name__, None)
    monkeypatch.delattr(schedules, "torch_classes")
    runtimes.choose.cache_clear()
    assert chosen("1f1b", 2, 4, 1, runtime="own").torch is None
    assert chosen("1f1b", 2, 4, 1).line.startswith('own loop: schedule="1f1b": ')
    with pytest.raises(UserError, match=r'runtime="torch": schedule="1f1b": '):
        chosen("1f1b", 2, 4, 1, runtime="torch")
    runtimes.choose.cache_clear()


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("GPipe", "gpipe"),
        ("1F1B", "1f1b"),
        ("Interleaved1F1B", "interleaved_1f1b"),
        ("ScheduleLoopedBFS", "looped_bfs"),
        ("interleavedzerobubble", "interleaved_zero_bubble"),
        ("ZBVZeroBubble", "zbv_zero_bubble"),
        ("DualPipeV", "dualpipev"),
    ],
)
def test_torchs_spellings_are_taken(spelled, name):
    assert conform(spelled, hints_of(PipelineConfig)["schedule"], "[pipeline] schedule") == name


def in_file(path, text):
    path.write_text(text)
    return files.read_order(path)


def dumped(schedule, p, m, v, format):
    """A file as torch writes it."""
    made = torch_classes.torch_class(schedule_of(schedule))
    places = stage_ranks(schedule, p, v)
    stages = [
        torch_classes.DrivenStage(index, len(places), 0, p)
        for index, place in enumerate(places)
        if place == 0
    ]
    runtime = torch_classes.make(made, stages, m)
    rows = runtime.pipeline_order if format == "compute_only" else runtime.pipeline_order_with_comms
    return "".join(",".join(map(str, rows[rank])) + "\n" for rank in range(p)).replace("None", "")


@pytest.mark.parametrize("format", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv_zero_bubble", "dualpipev"])
def test_a_file_of_torchs_runs_as_it_is(schedule, format, tmp_path):
    v, path = 2 if schedule in INTERLEAVED else 1, tmp_path / "torch.csv"
    file = in_file(path, "# by torch\n" + dumped(schedule, 2, 8, v, format))
    assert file.order == order_of(schedule, 2, 8, v)
    assert file.has_messages == (format == "compute_comms")

    def taken(runtime):
        config = PipelineConfig(
            schedule=schedule, virtual_stages=v, order=str(path), runtime=runtime
        )
        return runtimes.choose(config, file.order, stage_ranks(schedule, 2, v), file)

    assert taken("torch").torch
    if format == "compute_only":
        assert "is a plan for it" in taken("auto").line
        assert taken("own").torch is None
        return
    assert taken("auto").line.endswith("with its messages")
    with pytest.raises(UserError, match=r'says when messages are sent.* Set runtime = "torch"'):
        taken("own")


FIRST = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1"
SECOND = "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1"


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (FIRST.replace("0SEND_F1,", ""), SECOND, "Rank 0 never sends 0F1"),
        (FIRST.replace("0RECV_B1,", ""), SECOND, "before receiving input"),
        # Both ends agree, but not with the sequence in which the outputs are made.
        (
            "0F0,0F1,0SEND_F1,0SEND_F0,0RECV_B1,0RECV_B0,0B0,0B1",
            "1RECV_F1,1RECV_F0,1F0,1F1,1B0,1B1,1SEND_B1,1SEND_B0",
            "Rank 0 sends 0F1 out of sequence",
        ),
        (FIRST.replace("0SEND_F1,", "0SEND_F1,0SEND_F1,"), SECOND, "out of sequence|Duplicate"),
        (
            "0SEND_F0," + FIRST.replace("0SEND_F0,", ""),
            SECOND,
            "Rank 0 sends 0F0 before it is comp",
        ),
        (FIRST.replace("0SEND_F1", "0SEND_F99"), SECOND, "Rank 0 sends 0F99 out of sequence"),
        (FIRST, SECOND.replace("1RECV_F1,", "1RECV_F0,1RECV_F1,"), "1"),
        (FIRST, SECOND.replace("1RECV_F0,", "9RECV_F0,"), "9"),
    ],
)
def test_a_file_with_wrong_messages_is_refused_in_one_line(first, second, reason, tmp_path):
    path = tmp_path / "torch.csv"
    file = in_file(path, f"{first}\n{second}\n")
    config = PipelineConfig(schedule="gpipe", order=str(path))
    where = r'^\[pipeline\] runtime="auto": order=".*torch.csv": '
    with pytest.raises(UserError, match=f"{where}.*({reason})") as found:
        runtimes.choose(config, file.order, (0, 1), file)
    assert "\n" not in str(found.value)
    assert len(str(found.value)) < 600


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row,
        lambda row: row.replace("0F1,", "0F1,,,"),
        lambda row: f"0UNSHARD,{row},0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD",
        lambda row: row.replace("0SEND_F1,", "0SEND_F1,0WAIT_SEND_F0,0WAIT_SEND_F1,"),
        lambda row: f"\ufeff{row}",
    ],
)
def test_files_of_any_version_of_torch_run_with_bubbles_and_marks(change, tmp_path):
    path = tmp_path / "torch.csv"
    file = in_file(path, f"{change(FIRST)}\n{SECOND}\n")
    assert file.has_messages
    config = PipelineConfig(schedule="1f1b", order=str(path), runtime="torch")
    found = runtimes.choose(config, file.order, (0, 1), file)
    assert found.posts
    assert found.line == f'torch\'s runtime, order="{path}", with its messages'


def test_torch_reads_every_action():
    for action in itertools.chain.from_iterable(order_of("dualpipev", 4, 8, 1)):
        read = _Action.from_str(str(action))
        assert (read.computation_type.value, read.stage_index, read.microbatch_index) == action


def test_a_plan_s_file_goes_to_torch_with_its_comments(tmp_path):
    path = tmp_path / "order.csv"
    order = order_of("interleaved_1f1b", 2, 4, 2)
    files.write_order(path, order, ["a plan"])
    assert path.read_text() == "# a plan\n" + to_csv(order)
    made = torch_classes.from_file(files.read_order(path))
    calls = torch_classes.record(made, (0, 1, 0, 1), 4)
    assert torch_classes.order_of(calls) == order
    assert issubclass(torch_schedules.ScheduleInterleaved1F1B, _PipelineScheduleRuntime)


def test_a_class_that_differs_from_its_record_is_refused():
    messages = SimpleNamespace(actions=iter)
    loop = SimpleNamespace(perform=lambda action: None)
    first, second = (Action(Kind.FORWARD, 0, number) for number in range(2))
    driver = LoopDriver(loop, messages, [first])
    with pytest.raises(UserError, match="its class runs 0F1 where it ran 0F0 before"):
        driver.run(second)
    driver = LoopDriver(loop, messages, [first])
    driver.run(first)
    with pytest.raises(UserError, match="its class runs 0F1 where it ran nothing before"):
        driver.run(second)
    driver = LoopDriver(loop, messages, [first, second])
    driver.run(first)
    with pytest.raises(UserError, match="its class ends before 0F1, which it ran before"):
        driver.end()
    driver = LoopDriver(loop, messages, [first])
    driver.run(first)
    driver.end()
