"""Actions in run-time order: who decides, what may arrive, how far a host is ahead."""

from collections import deque
from types import SimpleNamespace

import pytest
import torch

from titan_dit.pipeline import pipelined, run_time
from titan_dit.pipeline.events import PipelineEvent, unmarked
from titan_dit.pipeline.pipelined import Loop, Microbatches
from titan_dit.pipeline.run_time import Deciding, DecidingExecutor, DeviceQueue
from titan_dit.pipeline.schedules.decider import Decider
from titan_dit.pipeline.schedules.placement import pipeline_order
from titan_dit.pipeline.schedules.schedule import Kind

CPU = torch.device("cpu")
STAGE_RANKS = [0, 1, 0, 1]
ORDER = pipeline_order("interleaved_zero_bubble", num_ranks=2, num_microbatches=4, virtual_stages=2)


class AtOnce:
    """A transport: what is posted has arrived, but kinds that are `late` come in a `wait`."""

    def __init__(self, late=""):
        self.late, self.said = late, []
        self.here, self.away = [], []

    def use(self, stream):
        assert stream == ()

    def post(self, message):
        self.said.append(("post", message))
        (self.away if message.kind in self.late else self.here).append(message)

    def arrived(self):
        found, self.here = self.here, []
        return found

    def wait(self, timeout_s=None):
        self.said.append(("wait", timeout_s))
        if timeout_s is None:
            assert self.away, "nothing will ever come"
            self.here.append(self.away.pop(0))

    def take(self, message):
        self.said.append(("take", message))
        return ()

    def send(self, message, tensors):
        self.said.append(("send", message))

    def flush(self):
        self.said.append(("flush", None))


class Ticking(AtOnce):
    """A transport whose waits also end for a decision."""

    def wait(self, timeout_s=None):
        self.said.append(("wait", timeout_s))
        assert len(self.said) < 1000, "no decision will ever come"
        if self.away:
            self.here.append(self.away.pop(0))


class Alone:
    """The decisions of a group of one rank."""

    leads = True

    def __init__(self):
        self.said = []

    def read(self):
        pass

    def send(self, action):
        self.said.append(action)

    def flush(self):
        pass


class Followed:
    """The decisions on a rank that follows; each comes a question later."""

    leads = False

    def __init__(self, actions):
        self.actions = deque(item for action in actions for item in (None, action))
        self.here = deque()

    def read(self):
        if self.actions and (action := self.actions.popleft()):
            self.here.append(action)

    def next_decision(self):
        return self.here.popleft() if self.here else None

    def flush(self):
        pass


def source(transport, decisions, memory=1.0, mark=unmarked):
    decider = Decider(ORDER[0], len(STAGE_RANKS), memory)
    return Deciding(decider, transport, decisions, STAGE_RANKS, 0, CPU, mark)


def run(transport, decisions, memory=1.0):
    """Run all actions; take their messages as the loop does."""
    own, ran = source(transport, decisions, memory), []
    for action in own.actions():
        ran.append(action)
        for message in own.remote_inputs(action):
            own.take(message)
    return ran


def test_the_first_rank_of_a_group_decides_and_tells_the_others():
    decisions = Alone()
    ran = run(AtOnce(late="I"), decisions)
    assert decisions.said == ran
    assert sorted(ran) == sorted(ORDER[0])
    assert tuple(ran) != ORDER[0]


def test_the_others_run_what_they_are_told_whatever_has_arrived():
    wanted = run(AtOnce(late="I"), Alone())
    # Alone it would run as planned: everything has arrived.
    assert run(AtOnce(), Alone()) == list(ORDER[0]) != wanted
    assert run(Ticking(), Followed(wanted)) == wanted
    # Its own messages are late, those of the first rank were not.
    assert run(Ticking(late="FI"), Followed(ORDER[0])) == list(ORDER[0])


@pytest.mark.parametrize("memory", [1.0, 1.5, 2.0])
def test_nothing_is_posted_beyond_what_the_window_and_one_message_per_stage_take(memory):
    transport = AtOnce(late="I")
    own = source(transport, Alone(), memory)
    started, most = [], 0
    for action in own.actions():
        started.append(action)
        posted = [m for word, m in transport.said if word == "post"]
        assert len(posted) == len(set(posted))
        inputs = [m.microbatch for m in posted if m.kind is Kind.FORWARD]
        begun = [a for a in started if a[:2] == (Kind.FORWARD, 2)]
        assert inputs == sorted(inputs)
        most = max(most, len(inputs) - len(begun))
        gradients = [m for m in posted if m.kind is Kind.BACKWARD_INPUT]
        forwards = {a[1:] for a in started if a.kind is Kind.FORWARD}
        assert {(m.stage - 1, m.microbatch) for m in gradients} <= forwards
        for stage in (0, 2):
            backwards = [a for a in started if a[:2] == (Kind.BACKWARD_INPUT, stage)]
            assert sum(m.stage == stage + 1 for m in gradients) <= len(backwards) + 2
        for message in own.remote_inputs(action):
            own.take(message)
    assert most <= own.decider.window + 1
    if memory == 1.0:
        assert most < 4, "all four microbatches may arrive: the case shows nothing"


def test_a_pass_ends_when_everything_has_left():
    transport = AtOnce()
    stages = {0: SimpleNamespace(stream=())}
    nothing = Microbatches([], [], lambda *_: None)
    Loop(stages, 4, source(transport, Alone()), nothing).run([])
    assert transport.said == [("flush", None)]


class Idle:
    """A stage that computes nothing."""

    stream = ()

    def __init__(self, index):
        self.index, self.is_first, self.is_last = index, index == 0, index == 3

    def forward(self, given, side_inputs):
        return ()

    def keep(self, microbatch, inputs, outputs):
        pass

    def backward_input(self, microbatch, gradients):
        return ()

    def backward_weight(self, microbatch):
        pass


@pytest.mark.parametrize("late", ["", "I", "F"])
def test_replicas_reduce_their_stages_in_one_sequence_when_all_is_done(late, monkeypatch):
    said = []
    for module in (run_time, pipelined):
        monkeypatch.setattr(module, "reduce_gradients", lambda stage: said.append(stage.index))
    executor = DecidingExecutor.__new__(DecidingExecutor)
    executor.order, executor.stage_ranks, executor.p2p = ORDER, STAGE_RANKS, SimpleNamespace()
    executor.p2p.rank, executor.device, executor.memory = 0, CPU, 1.0
    executor.shapes = SimpleNamespace(stream=())
    executor.stages = {2: Idle(2), 0: Idle(0)}
    executor.transport, executor.decisions = AtOnce(late), Alone()
    executor.mark = lambda moment, what: moment is PipelineEvent.ENDS and said.append(str(what))
    executor.learn(Microbatches([{}] * 4, [{}] * 4, lambda *_: None))
    assert len(said) == len(ORDER[0]) + 2
    assert said[-2:] == [0, 2]
    assert executor.transport.said[-1] == ("flush", None)


class Event:
    """A CUDA event that the test ends."""

    made = []

    def __init__(self):
        self.ended, self.stream = False, None
        self.made.append(self)

    def record(self, stream):
        self.stream = stream

    def query(self):
        return self.ended

    def synchronize(self):
        raise AssertionError("the host waits for the device")


@pytest.fixture
def events(monkeypatch):
    monkeypatch.setattr(Event, "made", [])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    return Event.made


def test_a_host_is_one_action_ahead_of_its_device(events):
    queue = DeviceQueue(torch.device("cuda", 1))
    assert not queue.is_full()
    queue.grow()
    assert events[0].stream == "stream of cuda:1"
    assert not queue.is_full()  # One runs: one more may wait for it.
    queue.grow()
    assert queue.is_full()
    events[0].ended = True
    assert not queue.is_full()
    queue.grow()
    assert queue.is_full()
    for event in events:
        event.ended = True
    assert not queue.is_full()
    assert not queue.ends


def test_a_host_that_is_ahead_sleeps_before_it_decides(events):
    class Working(AtOnce):
        """The device ends an action in every second nap."""

        naps = 0

        def wait(self, timeout_s=None):
            if timeout_s == run_time.POLL_S:
                self.naps += 1
                if self.naps % 2 == 0:
                    next(event for event in events if not event.ended).ended = True
            else:
                super().wait(timeout_s)

    transport = Working()
    own = source(transport, Alone())
    own.queue = DeviceQueue(torch.device("cuda"))
    behind = []
    for action in own.actions():
        behind.append(sum(not event.ended for event in events))
        for message in own.remote_inputs(action):
            own.take(message)
    assert max(behind) == run_time.MAX_QUEUED - 1  # Before the action itself is enqueued.
    assert transport.naps == 2 * (len(ORDER[0]) - run_time.MAX_QUEUED)


def test_a_cpu_has_no_queue(events):
    queue = DeviceQueue(CPU)
    for _ in range(5):
        queue.grow()
        assert not queue.is_full()
    assert events == []
