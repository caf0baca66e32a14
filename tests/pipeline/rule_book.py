"""Ranks that decide at run time, played with random times and with every rule checked."""

import heapq
import random

from titan_dit.config.section import UserError
from titan_dit.pipeline.schedules.decider import Decider
from titan_dit.pipeline.schedules.placement import pipeline_order
from titan_dit.pipeline.schedules.schedule import Action, Kind, num_stages_of, output_of, reader_of

SIZES = (2, 3, 4, 6, 8), (1, 2, 3, 4, 6, 8, 12, 16, 24)
RELEASES = Kind.BACKWARD, Kind.BACKWARD_WEIGHT


def drawn_order(rng, schedules):
    """An order of one of the schedules, for drawn sizes."""
    while True:
        name, p, m = rng.choice(schedules), *map(rng.choice, SIZES)
        stages = rng.choice((1, 2, 3)) if name.startswith("interleaved") else 1
        try:
            return pipeline_order(name, num_ranks=p, num_microbatches=m, virtual_stages=stages)
        except UserError:
            continue


class Play:
    """One step in which every action and message takes a random time.

    A message leaves when it is made and when its reader has posted it, as over a real transport.
    """

    def __init__(self, order, memory, seed):
        self.rng, self.order, self.now = random.Random(seed), order, 0.0
        count = num_stages_of(order)
        self.rank_of = {a.stage: rank for rank, actions in enumerate(order) for a in actions}
        self.deciders = [Decider(actions, count, memory) for actions in order]
        self.running = [None] * len(order)
        self.slow = [self.rng.choice((1, 1, 1, 3)) for _ in order]
        self.run = [[] for _ in order]
        self.made, self.posted, self.events = set(), set(), []
        self.most_held = [0] * len(order)

    def play(self):
        """Run until nothing happens any more; returns whether every rank finished."""
        for rank in range(len(self.deciders)):
            self.wake(rank)
        while self.events:
            self.now, _, rank, action, is_message = heapq.heappop(self.events)
            if is_message:
                self.deciders[rank].arrived(action)
            else:
                self.end(rank, action)
            self.wake(rank)
        return all(decider.finished for decider in self.deciders)

    def wake(self, rank):
        decider = self.deciders[rank]
        for message in decider.may_receive():
            assert self.rank_of[message.stage] != rank
            assert self.rank_of[reader_of(message)] == rank
            assert message not in self.posted, "posted twice"
            self.posted.add(message)
            self.send(message)
        if self.running[rank] is None and not decider.finished:
            found = decider.next()
            if isinstance(found, Action):
                self.running[rank] = found
                self.add(self.slow[rank] * self.rng.lognormvariate(0, 1.5), rank, found, False)

    def end(self, rank, action):
        self.deciders[rank].done(action)
        self.running[rank] = None
        self.run[rank].append(action)
        self.most_held[rank] = max(self.most_held[rank], self.deciders[rank].held)
        self.made.add(output_of(action))
        self.send(output_of(action))

    def send(self, message):
        if message in self.made and message in self.posted:
            reader = self.rank_of[reader_of(message)]
            self.add(self.rng.lognormvariate(0, 2), reader, message, True)

    def add(self, after, *event):
        heapq.heappush(self.events, (self.now + after, self.rng.random(), *event))


def played(order, memory, seed):
    """A finished play, all of whose rules hold."""
    found = Play(order, memory, seed)
    assert found.play(), [d.next() for d in found.deciders if not d.finished]
    for rank, planned in enumerate(order):
        decider, run = found.deciders[rank], found.run[rank]
        assert found.most_held[rank] <= decider.window
        assert sorted(run) == sorted(planned), "other kinds or microbatches than planned"
        for stage in {action.stage for action in planned}:
            for kinds in ((Kind.FORWARD,), (Kind.BACKWARD, Kind.BACKWARD_INPUT), RELEASES):
                a, b = (
                    [x for x in actions if x.stage == stage and x.kind in kinds]
                    for actions in (planned, run)
                )
                assert a == b, "a stage runs its microbatches in the planned sequence"
        starts_within_the_window(planned, run, decider.window)
    return found


def starts_within_the_window(planned, run, window):
    """The k-th forward of the plan starts only while k < released + window."""
    number = {a: k for k, a in enumerate(a for a in planned if a.kind is Kind.FORWARD)}
    released = 0
    for action in run:
        released += action.kind in RELEASES
        assert action.kind is not Kind.FORWARD or number[action] < released + window
