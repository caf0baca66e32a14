"""Profiles of a few steps: a trace, memory snapshots, the wall time by kind, and its picture."""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from PIL import Image, ImageDraw, ImageFont
from torch.profiler import ProfilerActivity, profile, record_function

from titan_dit.config.operation import ProfileConfig
from titan_dit.observe.curve import GRID, INK, save_png
from titan_dit.system import run_files
from titan_dit.system.files import write_whole

MAX_EVENTS = 1_000_000
"""Allocations and frees kept; older ones are dropped."""


def start_memory_snapshot(device: torch.device) -> None:
    """Start to record the allocation history; does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=MAX_EVENTS)


def write_memory_snapshot(path: Path, device: torch.device) -> str:
    """Write the history as a pickle, stop recording, and return a console line."""
    if device.type != "cuda":
        return "[profile] memory=true: a CPU's allocator records no history; no snapshot is written"
    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
    torch.cuda.memory._record_memory_history(enabled=None)
    return f"memory snapshot in {path}"


Event: TypeAlias = Mapping[str, Any]
"""One entry of "traceEvents" in a Chrome trace; times in microseconds."""

MARK = "titan_dit: "
"""Prefix of our profiler ranges, so that no operator has the same name."""
STEPS, DATA_WAIT, OPTIMIZER = "steps", "data wait", "optimizer"
"""Ranges: all profiled steps; next(batches); clipping, AdamW and EMA."""


class TimeKind(StrEnum):
    """Kind of time. A moment has one kind, or several in equal parts."""

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


PROFILE_COLOURS = {
    TimeKind.GEMM: "#1f5aa6",
    TimeKind.ATTENTION: "#4f9ad1",
    TimeKind.ELEMENTWISE: "#8cc6a0",
    TimeKind.OPTIMIZER: "#d9b44a",
    TimeKind.COMMUNICATION: "#c8553d",
    TimeKind.DATA_WAIT: "#8e5ea2",
    TimeKind.IDLE: "#cccccc",
}
WIDTH, LEFT, ROW = 960, 32, 26
BAR_TOP, BAR_HEIGHT = 56, 64


def cuts(summary: Summary, width: int) -> list[tuple[TimeKind, int, int]]:
    """(kind, first pixel, pixel after the last) of each part of the stacked bar, without gaps."""
    edges, so_far = [], 0.0
    for kind in TimeKind:
        first, so_far = round(so_far / summary.wall_ms * width), so_far + summary.ms[kind]
        edges.append((kind, first, round(so_far / summary.wall_ms * width)))
    return edges


def draw_profile(path: Path, summary: Summary, title: str, steps: int) -> None:
    """Write the PNG."""
    rows = list(summary.rows(steps))
    height = BAR_TOP + BAR_HEIGHT + 32 + ROW * (len(rows) + len(summary.top) + 4)
    sheet = Image.new("RGB", (WIDTH, height), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(15)
    heading = f"{title}: {summary.wall_ms / steps:.2f} ms per step, {summary.device}"
    pen.text((LEFT, 18), heading, fill=INK, font=ImageFont.load_default(18))
    for kind, first, last in cuts(summary, WIDTH - 2 * LEFT):
        if last > first:
            box = (LEFT + first, BAR_TOP, LEFT + last - 1, BAR_TOP + BAR_HEIGHT)
            pen.rectangle(box, fill=PROFILE_COLOURS[kind])
    y = BAR_TOP + BAR_HEIGHT + 28
    pen.text((470, y), "ms per step", fill=INK, font=font, anchor="rm")
    pen.text((570, y), "share", fill=INK, font=font, anchor="rm")
    for what, ms, share in rows:
        y += ROW
        if what in PROFILE_COLOURS:
            pen.rectangle((LEFT, y - 8, LEFT + 16, y + 8), fill=PROFILE_COLOURS[TimeKind(what)])
        pen.text((LEFT + 28, y), what, fill=INK, font=font, anchor="lm")
        pen.text((470, y), f"{ms:.3f}", fill=INK, font=font, anchor="rm")
        pen.text((570, y), f"{share:.1%}", fill=INK, font=font, anchor="rm")
    y += ROW
    pen.line((LEFT, y, WIDTH - LEFT, y), fill=GRID)
    y += ROW
    pen.text((LEFT, y), "longest kernels or operators", fill=INK, font=font, anchor="lm")
    for x, text in ((680, "calls"), (800, "ms per step")):
        pen.text((x, y), text, fill=INK, font=font, anchor="rm")
    for top in summary.top:
        y += ROW
        pen.rectangle((LEFT, y - 8, LEFT + 16, y + 8), fill=PROFILE_COLOURS[top.kind])
        name = shortened(top.name, 60)
        pen.text((LEFT + 28, y), name, fill=INK, font=font, anchor="lm")
        pen.text((680, y), f"{top.calls / steps:.0f}", fill=INK, font=font, anchor="rm")
        pen.text((800, y), f"{top.ms / steps:.3f}", fill=INK, font=font, anchor="rm")
    save_png(sheet, path)


SLOWED = "recorded while the ranks of [profile] were profiled, which slows them down"


class Recording(Protocol):
    """A recording of the timeline of a pipeline; the ranks of a run call it together."""

    def begin(self) -> None:
        """Begin a window; an unwritten one is discarded."""

    def step(self, step: int) -> None:
        """A step of the window begins."""

    def outside(self, name: str) -> AbstractContextManager[None]:
        """Attribute the block to `name`."""

    def write(self, folder: Path, note: str) -> list[str]:
        """End the window, write its files with a note, and return console lines."""


class StepProfiler:
    """Profiles the steps of [profile] on this rank; does nothing if disabled.

    Every rank has one: call `begin` before and `is_over` after every step. Only the ranks of
    [profile] record. A pipeline's timeline covers the same number of steps after the profiled ones,
    because the profiler slows its ranks down. If a launch ends before these, the timeline of the
    profiled steps is written.
    """

    def __init__(
        self,
        config: ProfileConfig,
        run: Path,
        rank: int,
        device: torch.device,
        pipeline: Recording | None = None,
    ) -> None:
        self.config, self.rank, self.device = config, rank, device
        self.folder, self.pipeline = run / run_files.PROFILE, pipeline
        self.recording = self.stopped = False
        self.is_chosen = rank in (config.ranks or (0,))
        self.taken = 0
        """Steps started in this launch."""
        self.span: tuple[int, int] | None = None
        """First and last step profiled so far."""
        self.profiler: profile | None = None
        self.window: record_function | None = None

    def begin(self, step: int) -> None:
        """Call before a step and its wait for data."""
        if not self.config.enabled:
            return
        self.taken += 1
        first = self.config.start
        if first <= self.taken < first + self.config.steps:
            self.span = (self.span[0] if self.span else step, step)
        if self.is_chosen:
            # One step early: the profiler's set-up must not fall into the first profiled step.
            if self.taken == max(1, first - 1):
                self._prepare()
            if self.taken == first:
                self._start()
        if self.pipeline:
            self._record(self.pipeline, step)

    def mark(self, name: str) -> AbstractContextManager[object]:
        """Attribute the kernels and waits of the block to `name`."""
        profiled = record_function(MARK + name) if self.window else nullcontext()
        return self._both(profiled, name) if self.recording else profiled

    def is_over(self, *, stopped: bool = False) -> bool:
        """True if a profile is ready to write: after its last step, or when training `stopped`."""
        if not self.config.enabled:
            return False
        self.stopped, first, steps = stopped, self.config.start, self.config.steps
        if self.span is not None:
            return stopped or self.taken == first + steps - 1
        return self.recording and (stopped or self.taken == first + 2 * steps - 1)

    def write(self) -> list[str]:
        """Write the profile, the pipeline's timeline or both, if finished; return console lines."""
        lines: list[str] = []
        try:
            if self.span:
                lines += self._write_profile()
        finally:  # The ranks of a pipeline write together, even if one could not write its profile.
            lines += self._write_timeline()
        return lines

    def _write_timeline(self) -> list[str]:
        is_clean = self.taken >= self.config.start + self.config.steps
        if not (self.recording and self.pipeline and (self.stopped or is_clean)):
            return []
        self.recording = False
        return self.pipeline.write(self.folder, "" if is_clean else SLOWED)

    def _write_profile(self) -> list[str]:
        """Stop the profile, write its files on the chosen ranks, and return console lines."""
        assert self.span
        (first, last), self.span = self.span, None
        if not self.is_chosen:
            return [f"profiles of ranks {', '.join(map(str, self.config.ranks))} in {self.folder}"]
        name = f"rank-{self.rank}-steps-{first}-{last}"
        self.folder.mkdir(parents=True, exist_ok=True)
        trace = self.folder / f"{name}.json.gz"
        self._stop(trace)
        with gzip.open(trace, "rt") as file:
            summary = summarize(json.load(file)["traceEvents"])
        title = f"rank {self.rank}, steps {first} to {last}"
        # Not last - first + 1: a rollback repeats step numbers.
        steps = min(self.config.steps, self.taken - self.config.start + 1)
        lines = summary.lines(title, steps)
        write_whole(self.folder / f"summary-{name}.txt", "\n".join(lines) + "\n")
        draw_profile(self.folder / f"summary-{name}.png", summary, title, steps)
        if self.config.memory:
            lines.append(write_memory_snapshot(self.folder / f"memory-{name}.pickle", self.device))
        return [*lines, f"profile in {trace}"]

    def missed(self) -> str | None:
        """After the launch: a warning if it ended before the first profiled step, else None."""
        if not self.config.enabled or self.taken >= self.config.start:
            return None
        return (
            f"[profile] start={self.config.start}: nothing was profiled, this launch took only "
            f"{self.taken} steps. Lower start."
        )

    def _record(self, pipeline: Recording, step: int) -> None:
        first = self.config.start
        if self.taken in (first, first + self.config.steps):
            pipeline.begin()
            self.recording = True
        if self.recording:
            pipeline.step(step)

    @contextmanager
    def _both(self, profiled: AbstractContextManager[object], name: str) -> Iterator[None]:
        assert self.pipeline
        with self.pipeline.outside(name), profiled:
            yield

    def _prepare(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self.profiler = profile(activities=activities, acc_events=True)
        self.profiler.prepare_trace()

    def _start(self) -> None:
        assert self.profiler
        if self.config.memory:
            start_memory_snapshot(self.device)
        self._wait_for_device()
        self.profiler.start_trace()
        self.window = record_function(MARK + STEPS)
        self.window.__enter__()  # type: ignore[no-untyped-call]

    def _stop(self, trace: Path) -> None:
        assert self.profiler
        assert self.window
        # Before the window closes: kernels launched in it also end in it.
        self._wait_for_device()
        self.window.__exit__(None, None, None)
        self.profiler.stop_trace()
        self.profiler.export_chrome_trace(str(trace))
        self.profiler = self.window = None

    def _wait_for_device(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
