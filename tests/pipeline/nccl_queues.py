"""When the actions of an order run if NCCL carries its messages.

NCCL runs the operations of one queue one after another. An operation starts when it is the first of
its queue on both ends, and when the computations before it on both ends are done. What a rank
posts, and when, says `execution.planned` itself.
"""

from types import SimpleNamespace

from titan_dit.pipeline.pipelined import Planned
from titan_dit.pipeline.schedules.schedule import channels, inputs_of, output_of

LATENCY = 0.02


def one_for_each_direction(rank, source, target):
    """Our groups: a queue for each pair of ranks and direction."""
    return rank, source, target


def one_for_each_rank(rank, source, target):
    """torch 2.11, and later with `device_id`: all messages of a rank share a queue."""
    return rank


def posted(order, stage_ranks, rank):
    """The operations of a rank in the order of its host: ("receive" | "run" | "send", name)."""
    line = []
    sequences = channels(order, stage_ranks)
    links = SimpleNamespace(rank=rank, receive=lambda message, _: line.append(("receive", message)))
    source = Planned(stage_ranks, sequences, links, (), None)
    source.empty = lambda message: message
    sent = {message for (source, _), out in sequences.items() if source == rank for message in out}
    for action in source.actions(order[rank]):
        line.append(("run", action))
        if output_of(action) in sent:
            line.append(("send", output_of(action)))
    return line


def connects(order, stage_ranks, first=()):
    """Whether all groups connect. The host waits at the first use of a group for its other end.

    `first`: the pairs of ranks that connect before the first action, in sequence.
    """
    ends = {m: pair for pair, line in channels(order, stage_ranks).items() for m in line}
    hosts = []
    for rank in range(len(order)):
        used = [ends[name] for what, name in posted(order, stage_ranks, rank) if what != "run"]
        hosts.append(list(dict.fromkeys([pair for pair in first if rank in pair] + used)))
    progress = True
    while progress:
        heads = [host[0] for host in hosts if host]
        ready = {pair for pair in heads if heads.count(pair) == 2}
        for host in hosts:
            if host and host[0] in ready:
                host.pop(0)
        progress = bool(ready)
    return not any(hosts)


def makespan(order, stage_ranks, costs, queue_of):
    """The time of the last action; None for a deadlock."""
    return Ranks(order, stage_ranks, costs, queue_of).run()


class Ranks:
    """Ranks that compute, and queues that carry their messages."""

    def __init__(self, order, stage_ranks, costs, queue_of):
        self.order, self.num_stages, self.costs = order, len(stage_ranks), costs
        lines = channels(order, stage_ranks)
        self.ends = {message: pair for pair, line in lines.items() for message in line}
        self.posts, self.queues, self.queues_of = {}, {}, {}
        for rank in range(len(order)):
            done = 0
            for what, name in posted(order, stage_ranks, rank):
                if what == "run":
                    done += 1
                    continue
                queue = queue_of(rank, *self.ends[name])
                self.posts.setdefault(name, []).append((rank, done))
                self.queues.setdefault(queue, []).append(name)
                self.queues_of.setdefault(name, []).append(queue)
        # By rank: when its first n actions are done.
        self.finished = [[0.0] for _ in order]
        self.free, self.arrived = dict.fromkeys(self.queues, 0.0), {}

    def run(self):
        progress = True
        while progress:
            progress = any([self.advance(rank) for rank in range(len(self.order))])
            for queue in self.queues:
                while self.deliver(queue):
                    progress = True
        pairs = zip(self.finished, self.order, strict=True)
        if any(len(done) <= len(actions) for done, actions in pairs):
            return None
        return max(done[-1] for done in self.finished)

    def advance(self, rank):
        """Run the actions of a rank whose messages have arrived."""
        done = self.finished[rank]
        before = len(done)
        for action in self.order[rank][before - 1 :]:
            inputs = inputs_of(action, self.num_stages)
            needed = [m for m in inputs if m in self.ends and self.ends[m][1] == rank]
            if any(m not in self.arrived for m in needed):
                break
            start = max([done[-1], *(self.arrived[m] for m in needed)])
            done.append(start + self.costs[action.kind, action.stage])
        return len(done) > before

    def deliver(self, queue):
        """Carry the first message of a queue, if both ends are there."""
        if not self.queues[queue]:
            return False
        name = self.queues[queue][0]
        both = [self.queues[q] for q in self.queues_of[name]]
        if any(names[0] != name for names in both):
            return False
        if any(done >= len(self.finished[rank]) for rank, done in self.posts[name]):
            return False
        ready = [self.finished[rank][done] for rank, done in self.posts[name]]
        ready += [self.free[q] for q in self.queues_of[name]]
        self.arrived[name] = max(ready) + LATENCY
        for q in self.queues_of[name]:
            self.free[q] = self.arrived[name]
            self.queues[q].pop(0)
        return True
