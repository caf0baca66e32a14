"""Timelines of pipelines that never ran: what their ranks would have noted, from a simulation."""

import random

from titan_dit.pipeline.events import CAUSE, Noted, PipelineEvent
from titan_dit.pipeline.schedules.placement import pipeline_order
from titan_dit.pipeline.schedules.proof import sequence_of
from titan_dit.pipeline.schedules.schedule import (
    Kind,
    inputs_of,
    num_microbatches_of,
    num_stages_of,
    output_of,
    reader_of,
)
from titan_dit.pipeline.timeline import Timeline, TimelineReader

TAKE = 2e-5
"""Seconds to take a message that is here, and to go on after an action."""


def order_of(schedule="interleaved_zero_bubble", ranks=4, microbatches=8, virtual_stages=2):
    return pipeline_order(
        schedule,
        num_ranks=ranks,
        num_microbatches=microbatches,
        virtual_stages=virtual_stages,
    )


class Ranks:
    """Ranks that run a planned order in virtual time and note their moments."""

    def __init__(self, order, seconds, latency=lambda source, target: 1e-4):
        """`seconds`: (action, pass) -> its time; `latency`: (source, target) -> of messages."""
        self.order, self.seconds, self.latency = order, seconds, latency
        self.noted = [[] for _ in order]
        self.free = [0.0] * len(order)
        self.rank_of = {a.stage: rank for rank, actions in enumerate(order) for a in actions}

    def note(self, rank, moment, what):
        self.noted[rank].append(Noted(moment, what, 1e9 * self.free[rank]))

    def window(self, passes):
        for number in range(passes):
            self.free = [max(self.free)] * len(self.free)
            for rank in range(len(self.order)):
                self.note(rank, PipelineEvent.STEP, 10 + number)
                self.note(rank, PipelineEvent.OUTSIDE, "data wait")
                self.free[rank] += 1e-3
                self.note(rank, PipelineEvent.OUTSIDE, None)
                self.note(rank, PipelineEvent.STARTS, None)
            self.one_pass(number)
            for rank in range(len(self.order)):
                self.note(rank, PipelineEvent.FINISHED, None)
                self.note(rank, PipelineEvent.OUTSIDE, "optimizer")
                self.free[rank] += 2e-3
                self.note(rank, PipelineEvent.OUTSIDE, None)
        return self.noted

    def one_pass(self, number):
        here = {}
        for rank, action in sequence_of(self.order):
            for message in inputs_of(action, num_stages_of(self.order)):
                if self.rank_of[message.stage] != rank:
                    self.note(rank, PipelineEvent.WAITS, CAUSE[message.kind])
                    self.free[rank] = max(self.free[rank] + TAKE, here[message])
                    self.note(rank, PipelineEvent.ARRIVED, message)
                    self.note(rank, PipelineEvent.WAITS, None)
            self.note(rank, PipelineEvent.BEGINS, action)
            self.free[rank] += self.seconds(action, number)
            self.note(rank, PipelineEvent.ENDS, action)
            message = output_of(action)
            target = self.rank_of.get(reader_of(message), rank)
            if target != rank:
                self.note(rank, PipelineEvent.SENDS, message)
                here[message] = self.free[rank] + self.latency(rank, target)
                self.free[rank] += TAKE


def timeline_of(order, seconds, passes=2, late=None, sizes=None, usual=1e-4):
    """The timeline of a window; `late`: {(source, target): seconds}."""
    ranks = Ranks(order, seconds, lambda *edge: (late or {}).get(edge, usual))
    noted = ranks.window(passes)
    read = tuple(TimelineReader(n, lambda at: at / 1e9).read(one) for n, one in enumerate(noted))
    stages = num_stages_of(order)
    stage_ranks = tuple(ranks.rank_of[stage] for stage in range(stages))
    microbatches = num_microbatches_of(order)
    return Timeline(read, stage_ranks, tuple(sizes or [1.0] * stages), order, microbatches)


def costs_of(order, seed, slow=None, sigma=0.05, unit=5e-3, lengths=False):
    """Seconds of every action: jitter, perhaps a rank 1.3 times slow, perhaps other lengths."""
    draws = random.Random(seed)
    rank_of = {a.stage: rank for rank, actions in enumerate(order) for a in actions}
    sizes = [draws.choice((0.4, 1.0, 2.6)) if lengths else 1.0 for _ in range(64)]

    def seconds(action, number):
        if action.kind is Kind.BACKWARD_INPUT and action.stage == 0:
            return 1e-6  # All work of the first stage is for its weights.
        share = 2.0 if action.kind is Kind.BACKWARD else 1.0
        if action.kind is Kind.BACKWARD_WEIGHT and action.stage == 0:
            share = 2.0
        share *= 1.3 if rank_of[action.stage] == slow else 1.0
        return unit * share * sizes[action.microbatch] * draws.lognormvariate(0, sigma)

    return seconds
