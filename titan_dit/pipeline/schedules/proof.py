"""Proof that an order computes every gradient once and never deadlocks."""

from __future__ import annotations

from collections import Counter, defaultdict

from titan_dit.pipeline.schedules.schedule import (
    Action,
    Kind,
    Order,
    inputs_of,
    num_stages_of,
    output_of,
    ranks_of,
)


def check(
    order: Order, *, num_stages: int, num_microbatches: int, in_sequence: bool = True
) -> None:
    """Raise ValueError with the first error, unless the order is valid.

    - Each stage is on one rank.
    - Each stage runs every microbatch forward once and backward once (in full, or as I and W).
    - Each stage runs F in microbatch order, and B and I in this order or the reverse one; not
      checked without `in_sequence`.
    - All ranks finish, although each waits for its next input before it does anything else.
    - A rank uses messages in the order sent: one channel per (sender, receiver, kind) is enough.
    """
    _check_places(order, num_stages)
    _check_counts(order, num_stages, num_microbatches)
    if in_sequence:
        _check_sequence(order)
    _check_channels(order, sequence_of(order))


def sequence_of(order: Order) -> list[tuple[int, Action]]:
    """All (rank, action), sorted so that every input comes before its use.

    The receiver buffers messages. Raises ValueError on a deadlock, which depends on the order only,
    not on timings.
    """
    num_stages = num_stages_of(order)
    sequence: list[tuple[int, Action]] = []
    done: set[Action] = set()
    position = [0] * len(order)
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(order):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                if not done.issuperset(inputs_of(action, num_stages)):
                    break
                done.add(output_of(action))
                sequence.append((rank, action))
                position[rank] += 1
                progress = True
    stuck = [
        f"rank {rank} at {actions[position[rank]]}"
        for rank, actions in enumerate(order)
        if position[rank] < len(actions)
    ]
    if stuck:
        raise ValueError(f"Deadlock: these wait for each other: {', '.join(stuck)}.")
    return sequence


def _check_places(order: Order, num_stages: int) -> None:
    ranks: defaultdict[int, set[int]] = defaultdict(set)
    for rank, actions in enumerate(order):
        for action in actions:
            ranks[action.stage].add(rank)
    if set(ranks) != set(range(num_stages)):
        raise ValueError(f"The order has stages {sorted(ranks)}, not 0 to {num_stages - 1}.")
    for stage, places in ranks.items():
        if len(places) > 1:
            raise ValueError(f"Stage {stage} is on several ranks: {sorted(places)}.")


def _check_counts(order: Order, num_stages: int, num_microbatches: int) -> None:
    counts = Counter(action for actions in order for action in actions)
    for stage in range(num_stages):
        for microbatch in range(num_microbatches):
            forward, full, inputs, weights = (
                counts.pop(Action(kind, stage, microbatch), 0) for kind in Kind
            )
            if forward != 1 or (full, inputs, weights) not in ((1, 0, 0), (0, 1, 1)):
                raise ValueError(
                    f"Stage {stage} runs microbatch {microbatch} forward {forward} times, backward "
                    f"{full} times in full, {inputs} times for inputs, {weights} for weights."
                )
    if counts:
        raise ValueError(f"There are only {num_microbatches} microbatches, not {min(counts)}.")


def _check_sequence(order: Order) -> None:
    latest: dict[tuple[bool, int], Action] = {}
    falls: dict[tuple[bool, int], bool] = {}
    for actions in order:
        for action in actions:
            if action.kind is Kind.BACKWARD_WEIGHT:
                continue
            is_forward = action.kind is Kind.FORWARD
            key = is_forward, action.stage
            if before := latest.get(key):
                fell = action.microbatch < before.microbatch
                if falls.setdefault(key, fell and not is_forward) != fell:
                    raise ValueError(f"{action} comes after {before}.")
            latest[key] = action


def _check_channels(order: Order, sequence: list[tuple[int, Action]]) -> None:
    """Raise ValueError unless each (sender, receiver, kind) uses its messages in the order sent."""
    num_stages = num_stages_of(order)
    rank_of = ranks_of(order)
    channel_of: dict[Action, tuple[int, int, Kind]] = {}
    for rank, action in sequence:
        for message in inputs_of(action, num_stages):
            if (source := rank_of[message.stage]) != rank:
                channel_of[message] = source, rank, message.kind
    sent: defaultdict[tuple[int, int, Kind], list[Action]] = defaultdict(list)
    for _, action in sequence:
        if (message := output_of(action)) in channel_of:
            sent[channel_of[message]].append(message)
    next_of = {channel: iter(messages) for channel, messages in sent.items()}
    # The dict is in the sequence of the messages' use.
    for message, channel in channel_of.items():
        if (earlier := next(next_of[channel])) != message:
            source, target, _ = channel
            raise ValueError(
                f"Rank {target} uses {message} of rank {source} before {earlier}, which was sent "
                "earlier."
            )
