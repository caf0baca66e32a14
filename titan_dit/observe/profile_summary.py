"""Wall time of the profiled steps by kind, from the events of a trace.

A moment counts as compute if any kernel computes; concurrent kernels share the moment equally. Else
it counts as exposed communication, else as the host's wait for data, else as idle. So the kinds add
up to the wall time. Communication hidden behind compute is reported separately.

A CPU has no kernels: the main thread's operators count instead, each with its self time. gloo's
collectives count as communication. Idle is Python and torch between operators.
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
"""Prefix of our profiler ranges, so that no operator has the same name."""
STEPS, DATA_WAIT, OPTIMIZER = "steps", "data wait", "optimizer"
"""Ranges: all profiled steps; next(batches); clipping, AdamW and EMA."""


class TimeKind(StrEnum):
    """Kind of a moment's time; each moment has one, or several in equal parts."""

    GEMM = "GEMM"
    ATTENTION = "attention"
    ELEMENTWISE = "elementwise"
    """All other compute: norms, modulation, GELU, sums, copies."""
    OPTIMIZER = "optimizer"
    COMMUNICATION = "communication exposed"
    DATA_WAIT = "data wait"
    IDLE = "idle"


@dataclass(frozen=True)
class Interval:
    """A kernel, operator or wait from `start` to `end`, in microseconds."""

    start: float
    end: float
    kind: TimeKind
    name: str
    calls: int = 1
    """0 if it continues a call of an earlier interval."""


@dataclass(frozen=True)
class Segment:
    """Time span of a thread with an unchanged stack of operators: `chain`, outermost first."""

    start: float
    end: float
    chain: tuple[str, ...]
    is_first: bool
    """True if the innermost operator starts here."""


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
    """Milliseconds by kind, which add up to `wall_ms`."""
    hidden_ms: float
    """Communication that overlaps compute."""
    top: tuple[Top, ...]
    """Kernels or operators with the largest total time."""

    def rows(self, steps: int) -> Iterator[tuple[str, float, float]]:
        """(kind, milliseconds per step, share of the wall time) of every table row."""
        for kind in TimeKind:
            yield kind, self.ms[kind] / steps, self.ms[kind] / self.wall_ms
        yield "all", self.wall_ms / steps, 1.0
        yield "communication hidden", self.hidden_ms / steps, self.hidden_ms / self.wall_ms

    def lines(self, title: str, steps: int) -> list[str]:
        """The summary as text."""
        lines = [f"profile of {title}, {self.device}", f"{'':24}{'ms per step':>12}{'share':>8}"]
        lines += [f"{what:24}{ms:12.3f}{share:8.1%}" for what, ms, share in self.rows(steps)]
        lines += ["", f"{'longest kernels or operators':60}{'calls':>7}{'ms per step':>12}  kind"]
        for top in self.top:
            name, calls = shortened(top.name, 58), top.calls / steps
            # A collective may be exposed in part: the kernel itself is neither.
            kind = top.kind.removesuffix(" exposed")
            lines.append(f"{name:60}{calls:7.0f}{top.ms / steps:12.3f}  {kind}")
        return lines


def shortened(text: str, length: int) -> str:
    """Text truncated to `length` characters."""
    return text if len(text) <= length else text[: length - 3] + "..."


ATTENTION = re.compile(r"scaled_dot_product|flash|efficient_attention|fmha|sdpa|_attn_|attention")
GEMM_OPERATORS = re.compile(
    r"aten::(add|sparse_|_int_|_scaled_|_grouped_|_scaled_grouped_)?mm|aten::(b|add|badd)m[mv]"
    r"|aten::m[mv]|aten::dot|aten::(_|cudnn_|mkldnn_)?convolution\w*|mkldnn::_(linear|convolution)\w*"
)
GEMM_KERNELS = re.compile(r"gemm|gemv|nvjet|xmma|cutlass|splitk", re.IGNORECASE)
COMPILED = re.compile(r"Torch-Compiled Region|CompiledFunction|CompiledFxGraph|^triton_|^cpp_fused")


def kind_of(kernel: str, chain: Sequence[str]) -> TimeKind:
    """Kind of a kernel, from its name and its launching operators, outermost first."""
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
    """True for torch's collectives."""
    return name.startswith(("c10d::", "_c10d_functional::"))


def summarize(events: Iterable[Event]) -> Summary:
    """Time by kind within the `STEPS` range, on the GPU if the trace has kernels."""
    timed = [event for event in events if event.get("ph") == "X"]
    # The host's ranges: GPU ranges of the same name span only their kernels.
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
    ms, hidden = time_by_kind([*spans, *waits], start, end)
    device = "GPU" if kernels else "CPU (operators of the main thread)"
    return Summary(device, (end - start) / 1e3, ms, hidden, longest(spans, start, end))


def extent(event: Event) -> tuple[float, float]:
    """Start and end in microseconds."""
    start = float(event["ts"])
    return start, start + float(event.get("dur", 0))


def span_of(event: Event, kind: TimeKind) -> Interval:
    """The interval of an event of a known kind."""
    return Interval(*extent(event), kind, event["name"])


def host_threads(timed: Iterable[Event]) -> dict[tuple[Any, Any], list[Event]]:
    """Operators and our own ranges by thread; other ranges do not affect the kind."""
    threads = defaultdict(list)
    for event in timed:
        category, name = event.get("cat"), event["name"]
        if category == "cpu_op" or (category == "user_annotation" and name.startswith(MARK)):
            threads[event["pid"], event["tid"]].append(event)
    return dict(threads)


def segments(events: Sequence[Event]) -> list[Segment]:
    """Nested events of one thread as disjoint segments, each with its chain of open events."""
    found: list[Segment] = []
    stack: list[tuple[float, tuple[str, ...]]] = []  # (end, chain) of open events
    has_segment: list[bool] = []  # of each open event
    now = float("-inf")

    def add(end: float) -> None:
        nonlocal now
        if stack and end > now:
            found.append(Segment(now, end, stack[-1][1], not has_segment[-1]))
            has_segment[-1] = True
        now = max(now, end)

    def close_until(moment: float) -> None:
        while stack and stack[-1][0] <= moment:
            add(stack[-1][0])
            stack.pop()
            has_segment.pop()
        add(moment)

    for event in sorted(events, key=lambda e: (e["ts"], -e.get("dur", 0))):
        start, end = extent(event)
        close_until(start)
        # Rounding may let an event end after its parent.
        outer_end, outer = stack[-1] if stack else (end, ())
        stack.append((min(end, outer_end), (*outer, event["name"])))
        has_segment.append(False)
    close_until(float("inf"))
    return found


def operator_spans(stretches: Iterable[Segment]) -> Iterator[Interval]:
    """Compute and collectives of a CPU's main thread, from its operators; no waits for data."""
    for stretch in stretches:
        name = stretch.chain[-1]
        # Autograd and Python frames are overhead. Waits for data are counted as a whole.
        works = "::" in name and not name.startswith(("autograd::", "torch::autograd"))
        if (works or COMPILED.search(name)) and MARK + DATA_WAIT not in stretch.chain:
            kind, calls = kind_of(name, stretch.chain), int(stretch.is_first)
            yield Interval(stretch.start, stretch.end, kind, name, calls)


def gloo_spans(timed: Iterable[Event]) -> Iterator[Interval]:
    """Collectives of gloo, which runs them on its own threads."""
    for event in timed:
        if event.get("cat") == "user_annotation" and event["name"].startswith("gloo:"):
            yield span_of(event, TimeKind.COMMUNICATION)


def device_spans(
    kernels: Iterable[Event],
    timed: Iterable[Event],
    threads: Mapping[tuple[Any, Any], Sequence[Segment]],
) -> Iterator[Interval]:
    """Kernels and copies, classified by the host operators that launched them."""
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


def time_by_kind(
    spans: Iterable[Interval], start: float, end: float
) -> tuple[dict[TimeKind, float], float]:
    """(milliseconds by kind from `start` to `end`, milliseconds of hidden communication)."""
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
            for given, part in fractions(active).items():
                times[given] += part * (moment - now)
                if active[TimeKind.COMMUNICATION] and given in COMPUTING:
                    hidden += part * (moment - now)
            now = moment
        active[kind] += change
    return {kind: time / 1e3 for kind, time in times.items()}, hidden / 1e3


COMPUTING = (TimeKind.GEMM, TimeKind.ATTENTION, TimeKind.ELEMENTWISE, TimeKind.OPTIMIZER)


def fractions(active: Mapping[TimeKind, int]) -> dict[TimeKind, float]:
    """Kinds of a moment as fractions that add up to 1."""
    if computing := sum(active[kind] for kind in COMPUTING):
        return {kind: active[kind] / computing for kind in COMPUTING if active[kind]}
    waiting = (TimeKind.COMMUNICATION, TimeKind.DATA_WAIT)
    return {next((kind for kind in waiting if active[kind]), TimeKind.IDLE): 1.0}


def longest(
    spans: Iterable[Interval], start: float, end: float, count: int = 10
) -> tuple[Top, ...]:
    """The `count` (name, kind) pairs with most time; overlapping calls count in full."""
    calls: Counter[tuple[str, TimeKind]] = Counter()
    times: Counter[tuple[str, TimeKind]] = Counter()
    for span in spans:
        if inside := max(0.0, min(span.end, end) - max(span.start, start)):
            calls[span.name, span.kind] += span.calls
            times[span.name, span.kind] += inside  # type: ignore[assignment]
    return tuple(Top(*key, calls[key], time / 1e3) for key, time in times.most_common(count))
