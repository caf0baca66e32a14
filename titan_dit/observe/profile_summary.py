"""From the events of a trace to time by kind: where the wall time of the profiled steps went.

At any moment a GPU computes (on one stream or several), or only communicates, or waits. Each moment
is given to what is computed, in equal parts if several kernels run; else to communication, which is
exposed then; else to the wait for data, if the host is in one; else it is idle. So the kinds add up
to the wall time, and communication behind computation is counted apart, as hidden.

On a CPU the operators of the main thread stand for the kernels, each with the time that none of
those inside it takes, gloo's work for communication; what is idle is Python, and torch between
operators.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

Event: TypeAlias = Mapping[str, Any]
"""One entry of "traceEvents" in a Chrome trace; times in microseconds."""

MARK = "titan_dit: "
"""Before the names of our own ranges, so that no operator is called the same."""
STEPS, DATA_WAIT, OPTIMIZER = "steps", "data wait", "optimizer"
"""Ranges: all profiled steps; next(batches); clipping, AdamW and averages."""


class TimeKind(StrEnum):
    """What a moment was spent on."""

    GEMM = "GEMM"
    ATTENTION = "attention"
    ELEMENTWISE = "elementwise"
    """All other computing: norms, modulation, GELU, sums, copies."""
    OPTIMIZER = "optimizer"
    COMMUNICATION = "communication exposed"
    DATA_WAIT = "data wait"
    IDLE = "idle"


@dataclass(frozen=True)
class Interval:
    """Something that takes from `start` to `end`, in microseconds."""

    start: float
    end: float
    kind: TimeKind
    name: str
    calls: int = 1
    """0 where it goes on with a call that another span began."""


@dataclass(frozen=True)
class Segment:
    """A stretch of a thread within the same nested operators, outermost first."""

    start: float
    end: float
    chain: tuple[str, ...]
    is_first: bool
    """Whether the innermost operator begins with it."""


@dataclass(frozen=True)
class Top:
    """A kernel or operator, over all its calls."""

    name: str
    kind: TimeKind
    calls: int
    ms: float


@dataclass(frozen=True)
class Summary:
    """Time by kind, in milliseconds over all profiled steps."""

    device: str
    wall_ms: float
    ms: Mapping[TimeKind, float]
    """Adds up to `wall_ms`."""
    hidden_ms: float
    """Communication while something was computed."""
    top: tuple[Top, ...]
    """The longest kernels or operators."""

    def rows(self, steps: int) -> Iterator[tuple[str, float, float]]:
        """(what, milliseconds per step, share of the wall time)."""
        for kind in TimeKind:
            yield kind, self.ms[kind] / steps, self.ms[kind] / self.wall_ms
        yield "all", self.wall_ms / steps, 1.0
        yield "communication hidden", self.hidden_ms / steps, self.hidden_ms / self.wall_ms

    def lines(self, title: str, steps: int) -> list[str]:
        """The page as text."""
        lines = [f"profile of {title}, {self.device}", f"{'':24}{'ms per step':>12}{'share':>8}"]
        lines += [f"{what:24}{ms:12.3f}{share:8.1%}" for what, ms, share in self.rows(steps)]
        lines += ["", f"{'the longest':60}{'calls':>7}{'ms per step':>12}  kind"]
        for top in self.top:
            name, calls = shortened(top.name, 58), top.calls / steps
            # Whether a collective is exposed is a question of the moment, not of the kernel.
            kind = top.kind.removesuffix(" exposed")
            lines.append(f"{name:60}{calls:7.0f}{top.ms / steps:12.3f}  {kind}")
        return lines


def shortened(text: str, length: int) -> str:
    """At most so many letters."""
    return text if len(text) <= length else text[: length - 3] + "..."


ATTENTION = re.compile(r"scaled_dot_product|flash|efficient_attention|fmha|sdpa|_attn_|attention")
GEMM_OPERATORS = re.compile(
    r"aten::(add|sparse_|_int_|_scaled_|_grouped_|_scaled_grouped_)?mm|aten::(b|add|badd)m[mv]"
    r"|aten::m[mv]|aten::dot|aten::(_|cudnn_|mkldnn_)?convolution\w*|mkldnn::_(linear|convolution)\w*"
)
GEMM_KERNELS = re.compile(r"gemm|gemv|nvjet|xmma|cutlass|splitk", re.IGNORECASE)
COMPILED = re.compile(r"Torch-Compiled Region|CompiledFunction|CompiledFxGraph|^triton_|^cpp_fused")


def kind_of(kernel: str, chain: Sequence[str]) -> TimeKind:
    """What a kernel does, by its name and by the operators that launched it, outermost first."""
    if kernel.startswith("nccl") or any(is_collective(name) for name in chain):
        return TimeKind.COMMUNICATION
    if MARK + OPTIMIZER in chain:
        return TimeKind.OPTIMIZER
    if any(ATTENTION.search(name) for name in (*chain, kernel)):
        return TimeKind.ATTENTION
    if any(GEMM_OPERATORS.fullmatch(name) for name in chain) or GEMM_KERNELS.search(kernel):
        return TimeKind.GEMM
    return TimeKind.ELEMENTWISE


def is_collective(name: str) -> bool:
    """Whether an operator is one of torch's collectives."""
    return name.startswith(("c10d::", "_c10d_functional::"))


def summarize(events: Iterable[Event]) -> Summary:
    """Time by kind within the range called `STEPS`, on the GPU if the trace has kernels."""
    timed = [event for event in events if event.get("ph") == "X"]
    # The host's: a GPU's ranges have the same names, and last from kernel to kernel.
    ranges = [event for event in timed if event.get("cat") == "user_annotation"]
    window = next(event for event in ranges if event["name"] == MARK + STEPS)
    threads = {thread: segments(nested) for thread, nested in host_threads(timed).items()}
    main = window["pid"], window["tid"]
    waits = [span_of(e, TimeKind.DATA_WAIT) for e in ranges if e["name"] == MARK + DATA_WAIT]
    kernels = [e for e in timed if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if kernels:
        spans = list(device_spans(kernels, timed, threads))
    else:
        spans = [*operator_spans(threads.get(main, [])), *gloo_spans(timed)]
    start, end = extent(window)
    ms, hidden = share_out([*spans, *waits], start, end)
    device = "GPU" if kernels else "CPU (operators of the main thread)"
    return Summary(device, (end - start) / 1e3, ms, hidden, longest(spans, start, end))


def extent(event: Event) -> tuple[float, float]:
    """Start and end in microseconds."""
    start = float(event["ts"])
    return start, start + float(event.get("dur", 0))


def span_of(event: Event, kind: TimeKind) -> Interval:
    """An event of a known kind."""
    return Interval(*extent(event), kind, event["name"])


def host_threads(timed: Iterable[Event]) -> dict[tuple[Any, Any], list[Event]]:
    """Operators and our own ranges, by thread; other ranges say nothing of what is computed."""
    threads = defaultdict(list)
    for event in timed:
        category, name = event.get("cat"), event["name"]
        if category == "cpu_op" or (category == "user_annotation" and name.startswith(MARK)):
            threads[event["pid"], event["tid"]].append(event)
    return dict(threads)


def segments(events: Sequence[Event]) -> list[Segment]:
    """Nested events of one thread as stretches side by side; outside of all there is none."""
    found: list[Segment] = []
    stack: list[tuple[float, tuple[str, ...]]] = []  # (end, chain) of what is open
    begun: list[bool] = []  # whether it has a segment already
    now = float("-inf")

    def add(end: float) -> None:
        nonlocal now
        if stack and end > now:
            found.append(Segment(now, end, stack[-1][1], not begun[-1]))
            begun[-1] = True
        now = max(now, end)

    def close_until(moment: float) -> None:
        while stack and stack[-1][0] <= moment:
            add(stack[-1][0])
            stack.pop()
            begun.pop()
        add(moment)

    for event in sorted(events, key=lambda e: (e["ts"], -e.get("dur", 0))):
        start, end = extent(event)
        close_until(start)
        # Rounded times may let an event end after the one around it.
        outer_end, outer = stack[-1] if stack else (end, ())
        stack.append((min(end, outer_end), (*outer, event["name"])))
        begun.append(False)
    close_until(float("inf"))
    return found


def operator_spans(stretches: Iterable[Segment]) -> Iterator[Interval]:
    """What a CPU computes, or waits for, on its main thread."""
    for stretch in stretches:
        name = stretch.chain[-1]
        # The rest is autograd's machinery and Python's. Waits for data are counted as a whole.
        works = "::" in name and not name.startswith(("autograd::", "torch::autograd"))
        if (works or COMPILED.search(name)) and MARK + DATA_WAIT not in stretch.chain:
            kind, calls = kind_of(name, stretch.chain), int(stretch.is_first)
            yield Interval(stretch.start, stretch.end, kind, name, calls)


def gloo_spans(timed: Iterable[Event]) -> Iterator[Interval]:
    """Collectives over gloo, which runs them on threads of its own."""
    for event in timed:
        if event.get("cat") == "user_annotation" and event["name"].startswith("gloo:"):
            yield span_of(event, TimeKind.COMMUNICATION)


def device_spans(
    kernels: Iterable[Event],
    timed: Iterable[Event],
    threads: Mapping[tuple[Any, Any], Sequence[Segment]],
) -> Iterator[Interval]:
    """Kernels and copies, each told by the operators on the host that launched it."""
    launches = {
        event["args"]["correlation"]: event
        for event in timed
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and "correlation" in event.get("args", {})
    }
    starts = {thread: [part.start for part in parts] for thread, parts in threads.items()}
    for event in kernels:
        launch = launches.get(event.get("args", {}).get("correlation"))
        chain: tuple[str, ...] = ()
        if launch and (thread := (launch["pid"], launch["tid"])) in threads:
            place = bisect_right(starts[thread], launch["ts"]) - 1
            if place >= 0 and launch["ts"] < threads[thread][place].end:
                chain = threads[thread][place].chain
        yield span_of(event, kind_of(event["name"], chain))


def share_out(
    spans: Iterable[Interval], start: float, end: float
) -> tuple[dict[TimeKind, float], float]:
    """(milliseconds of every kind from `start` to `end`, of communication that is hidden)."""
    edges = []
    for span in spans:
        first, last = max(span.start, start), min(span.end, end)
        if first < last:
            edges += [(first, 1, span.kind), (last, -1, span.kind)]
    edges.sort(key=lambda edge: edge[0])
    times, hidden, now = dict.fromkeys(TimeKind, 0.0), 0.0, start
    active = dict.fromkeys(TimeKind, 0)
    for moment, change, kind in [*edges, (end, 0, TimeKind.IDLE)]:
        if moment > now:
            for given, part in parts_of(active).items():
                times[given] += part * (moment - now)
                if active[TimeKind.COMMUNICATION] and given in COMPUTING:
                    hidden += part * (moment - now)
            now = moment
        active[kind] += change
    return {kind: time / 1e3 for kind, time in times.items()}, hidden / 1e3


COMPUTING = (TimeKind.GEMM, TimeKind.ATTENTION, TimeKind.ELEMENTWISE, TimeKind.OPTIMIZER)


def parts_of(active: Mapping[TimeKind, int]) -> dict[TimeKind, float]:
    """Whose this moment is, in parts that add up to 1."""
    if computing := sum(active[kind] for kind in COMPUTING):
        return {kind: active[kind] / computing for kind in COMPUTING if active[kind]}
    waiting = (TimeKind.COMMUNICATION, TimeKind.DATA_WAIT)
    return {next((kind for kind in waiting if active[kind]), TimeKind.IDLE): 1.0}


def longest(
    spans: Iterable[Interval], start: float, end: float, count: int = 10
) -> tuple[Top, ...]:
    """The names that took most, each in its kinds; what overlaps is counted in full."""
    calls: Counter[tuple[str, TimeKind]] = Counter()
    times: Counter[tuple[str, TimeKind]] = Counter()
    for span in spans:
        if inside := max(0.0, min(span.end, end) - max(span.start, start)):
            calls[span.name, span.kind] += span.calls
            times[span.name, span.kind] += inside  # type: ignore[assignment]
    return tuple(Top(*key, calls[key], time / 1e3) for key, time in times.most_common(count))
