"""When the actions of an order run if NCCL carries its messages.

NCCL runs the operations of one queue one after another. An operation starts when it is the first of
its queue on both ends, and when the computations before it on both ends are done. `execution.loop`
itself says what a rank posts, and when.
"""

from types import SimpleNamespace

from titan_dit.execution.loop import Inbox, Loop
from titan_dit.schedules.messages import channels, inputs_of, output_of

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
    loop = object.__new__(Loop)
    loop.stage_ranks, loop.inbox = stage_ranks, Inbox(sequences, links, lambda message: message)
    sent = {message for (source, _), out in sequences.items() if source == rank for message in out}
    for action in loop.planned(order[rank]):
        line.append(("run", action))
        if output_of(action) in sent:
            line.append(("send", output_of(action)))
    return line


def makespan(order, stage_ranks, costs, queue_of):
    """The time of the last action; None for a deadlock."""
    ends = {m: pair for pair, sent in channels(order, stage_ranks).items() for m in sent}
    posts, queues = {}, {}
    for rank in range(len(order)):
        done = 0
        for what, name in posted(order, stage_ranks, rank):
            if what == "run":
                done += 1
                continue
            posts.setdefault(name, []).append((rank, done))
            queues.setdefault(queue_of(rank, *ends[name]), []).append(name)
    return _run(order, len(stage_ranks), costs, ends, posts, queues)


def _run(order, num_stages, costs, ends, posts, queues):
    finished = [[0.0] for _ in order]  # By rank: when its first n actions are done.
    heads = dict.fromkeys(queues, 0)
    free = dict.fromkeys(queues, 0.0)
    queues_of = {}
    for queue, names in queues.items():
        for name in names:
            queues_of.setdefault(name, []).append(queue)
    arrived = {}

    def advance(rank):
        """Run the actions of a rank whose messages have arrived."""
        before = len(finished[rank])
        for action in order[rank][before - 1 :]:
            inputs = inputs_of(action, num_stages)
            needed = [m for m in inputs if m in ends and ends[m][1] == rank]
            if any(m not in arrived for m in needed):
                break
            start = max([finished[rank][-1], *(arrived[m] for m in needed)])
            finished[rank].append(start + costs[action.kind, action.stage])
        return len(finished[rank]) > before

    def deliver(queue):
        """Carry the first message of a queue, if both ends are there."""
        if heads[queue] == len(queues[queue]):
            return False
        name = queues[queue][heads[queue]]
        both = queues_of[name]
        if any(queues[q][heads[q]] != name for q in both if heads[q] < len(queues[q])):
            return False
        if any(done >= len(finished[rank]) for rank, done in posts[name]):
            return False
        ready = [finished[rank][done] for rank, done in posts[name]]
        arrived[name] = max(*ready, *(free[q] for q in both)) + LATENCY
        for q in both:
            free[q], heads[q] = arrived[name], heads[q] + 1
        return True

    progress = True
    while progress:
        progress = any([advance(rank) for rank in range(len(order))])
        for queue in queues:
            while deliver(queue):
                progress = True
    if any(len(done) <= len(actions) for done, actions in zip(finished, order, strict=True)):
        return None
    return max(done[-1] for done in finished)
