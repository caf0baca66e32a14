"""Time by kind of hand-made traces."""

import random

import pytest
from PIL import Image

from titan_dit.observe import profile
from titan_dit.observe.profile import COMPUTING, MARK, TimeKind, kind_of, segments, summarize

MAIN, OTHER = 1, 2


def event(name, start, end, cat="cpu_op", tid=MAIN, **args):
    return {
        "ph": "X", "cat": cat, "name": name, "pid": 9, "tid": tid,
        "ts": start * 1000, "dur": (end - start) * 1000, "args": args,
    }  # fmt: skip


def mark(name, start, end):
    return event(MARK + name, start, end, "user_annotation")


def launched(name, start, end, number, at, tid=MAIN, stream=7):
    """A kernel on a stream, and its launch on the host, in milliseconds."""
    return [
        event("cudaLaunchKernel", at, at + 0.01, "cuda_runtime", tid, correlation=number),
        event(name, start, end, "kernel", tid=stream, correlation=number),
    ]


def ms(summary):
    return {kind: pytest.approx(time) for kind, time in summary.ms.items() if time}


CPU = [
    {"ph": "M", "name": "process_name"},
    mark("steps", 0, 1000),
    event("aten::addmm", 100, 300),
    event("aten::copy_", 150, 200),  # part of the product
    event("aten::mul", 300, 400),
    event("autograd::engine::evaluate_function: MmBackward0", 400, 600),
    event("MmBackward0", 410, 590),
    event("aten::mm", 450, 550),
    mark("data wait", 600, 700),
    event("aten::stack", 620, 650),
    mark("optimizer", 700, 800),
    event("aten::add", 720, 760),
    event("gloo:all_reduce", 760, 900, "user_annotation", OTHER),
    event("aten::copy_", 770, 780, tid=OTHER),  # gloo's own
    event("aten::mul", 850, 950),
    event("FSDP::post_backward", 0, 1000, "user_annotation"),  # says nothing of kinds
    event("aten::mul", 1000, 1200),  # after the profiled steps
    event("aten::_scaled_dot_product_flash_attention_for_cpu", 25, 50),
    event("aten::mul", -100, -50),  # before them
]


def test_operators_of_a_cpu_are_counted_by_their_own_time():
    summary = summarize(CPU)
    assert ms(summary) == {
        TimeKind.GEMM: 300,
        TimeKind.ATTENTION: 25,
        TimeKind.ELEMENTWISE: 200,
        TimeKind.OPTIMIZER: 40,
        TimeKind.COMMUNICATION: 90,
        TimeKind.DATA_WAIT: 100,
        TimeKind.IDLE: 245,
    }
    assert summary.hidden_ms == pytest.approx(50)
    assert summary.wall_ms == 1000
    assert summary.device.startswith("CPU")


def test_the_longest_are_named_with_their_calls():
    top = {(t.name, t.kind): (t.calls, t.ms) for t in summarize(CPU).top}
    # Its second part continues the same call.
    assert top["aten::addmm", TimeKind.GEMM] == (1, pytest.approx(150))
    assert top["aten::mul", TimeKind.ELEMENTWISE] == (2, pytest.approx(200))
    assert top["gloo:all_reduce", TimeKind.COMMUNICATION] == (1, pytest.approx(140))


GPU = [
    # GPU copies of our ranges are not host ranges.
    event(MARK + "steps", 30, 94, "gpu_user_annotation", tid=7),
    event(MARK + "data wait", 30, 94, "gpu_user_annotation", tid=7),
    mark("steps", 0, 100),
    mark("data wait", 0, 20),
    event("aten::mm", 20, 25),
    *launched("some_kernel_of_a_new_library", 30, 50, 1, at=22),
    # The backward pass runs on its own thread.
    event("aten::_flash_attention_backward", 26, 28, tid=OTHER),
    *launched("dot_do_o", 50, 60, 2, at=27, tid=OTHER),
    *launched("vectorized_elementwise_kernel", 60, 66, 3, at=29, tid=OTHER),  # by none
    *launched("ncclDevKernel_AllGather", 40, 64, 4, at=29.5, stream=8),
    mark("optimizer", 70, 80),
    *launched("ncclDevKernel_AllReduce", 70, 75, 5, at=71, stream=8),
    *launched("multi_tensor_apply_kernel", 76, 86, 6, at=72),
    # Two streams at once, half each; the launch of the second is not in the trace.
    *launched("triton_poi_fused_1", 90, 94, 7, at=85),
    event("sm90_xmma_gemm_bf16", 90, 94, "kernel", tid=9, correlation=99),
    event("Memcpy HtoD", 5, 10, "gpu_memcpy", tid=10, correlation=98),
]


def test_streams_of_a_gpu_hide_what_runs_behind_computing():
    summary = summarize(GPU)
    assert ms(summary) == {
        TimeKind.GEMM: 20 + 2,
        TimeKind.ATTENTION: 10,
        TimeKind.ELEMENTWISE: 6 + 2 + 5,
        TimeKind.OPTIMIZER: 10,
        TimeKind.COMMUNICATION: 5,
        # The device waits for data from 0 to 20, except during the copy.
        TimeKind.DATA_WAIT: 15,
        TimeKind.IDLE: 100 - (22 + 10 + 13 + 10 + 5 + 15),
    }
    assert summary.hidden_ms == pytest.approx(24)
    assert summary.device == "GPU"


def test_kinds_add_up_to_the_wall_time_whatever_overlaps():
    draw = random.Random(0)
    names = ("gemm", "flash_fwd", "add", "ncclDevKernel")
    for _ in range(20):
        kernels = []
        for _ in range(40):
            start = draw.uniform(-10, 110)
            stream, name = draw.randrange(3), draw.choice(names)
            kernels.append(event(name, start, start + draw.uniform(0, 20), "kernel", stream))
        summary = summarize([mark("steps", 0, 100), mark("data wait", 30, 40), *kernels])
        assert sum(summary.ms.values()) == pytest.approx(summary.wall_ms, rel=1e-9)
        computing = sum(summary.ms[kind] for kind in COMPUTING)
        assert 0 < summary.hidden_ms <= computing
        # Brute force: sample many moments.
        spans = [(e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3, e["name"]) for e in kernels]
        busy, both, count = 0, 0, 5000
        for i in range(count):
            now = (i + 0.5) * 100 / count
            running = {name.startswith("nccl") for s, e, name in spans if s <= now < e}
            busy += False in running
            both += running == {True, False}
        assert computing == pytest.approx(busy * 100 / count, abs=0.5)
        assert summary.hidden_ms == pytest.approx(both * 100 / count, abs=0.5)


def test_rounded_times_leave_no_segment_out_of_order():
    """Rounding may let a child end after its parent."""
    parts = segments([event("outer", 0, 10), event("inner", 5, 10.001), event("next", 10, 12)])
    assert [(p.start / 1e3, p.end / 1e3, p.chain, p.is_first) for p in parts] == [
        (0, 5, ("outer",), True),
        (5, 10, ("outer", "inner"), True),
        (10, 12, ("next",), True),
    ]


KERNELS = {
    "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_TNT": TimeKind.GEMM,
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>": TimeKind.GEMM,
    "void pytorch_flash::flash_fwd_kernel<...>": TimeKind.ATTENTION,
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80": TimeKind.ATTENTION,
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma": TimeKind.ATTENTION,
    "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL": TimeKind.COMMUNICATION,
    "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernel>": (
        TimeKind.ELEMENTWISE
    ),
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel": TimeKind.ELEMENTWISE,
    "triton_red_fused_native_layer_norm_3": TimeKind.ELEMENTWISE,
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_without_its_launch_is_known_by_its_name(name):
    assert kind_of(name, ()) == KERNELS[name]


def test_the_page_shows_every_kind_and_the_bar_is_filled(tmp_path):
    summary = summarize(CPU)
    lines = summary.lines("rank 3, steps 1 to 2", 2)
    assert lines[0] == "profile of rank 3, steps 1 to 2, CPU (operators of the main thread)"
    assert lines[2].split() == ["GEMM", "150.000", "30.0%"]
    assert lines[9].split() == ["all", "500.000", "100.0%"]
    assert lines[10].split() == ["communication", "hidden", "25.000", "5.0%"]
    assert max(map(len, lines)) <= 100
    cuts = profile.cuts(summary, 896)
    assert [first for _, first, _ in cuts[1:]] == [last for _, _, last in cuts[:-1]]
    assert (cuts[0][1], cuts[-1][2]) == (0, 896)
    profile.draw_profile(tmp_path / "page.png", summary, "rank 3", 2)
    with Image.open(tmp_path / "page.png") as page:
        row = [page.getpixel((x, 88)) for x in range(32, 32 + 896)]
    shown = {kind: f"#{r:02x}{g:02x}{b:02x}" for kind, (r, g, b) in
             ((kind, row[(first + last) // 2]) for kind, first, last in cuts)}  # fmt: skip
    assert shown == profile.PROFILE_COLOURS
