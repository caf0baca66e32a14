"""benchmarks/roofline.py against model FLOPs, counted operators and hand calculations."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from commands import ROOT
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from unchecked import unchecked

from titan_dit.models.dit_config import DiTConfig

sys.path.insert(0, str(ROOT / "benchmarks"))
import collectives
import limits
import roofline
from limits import Ceilings, Work

FLOPS_ONLY = Ceilings(gemm_tflops=1e-12, copy_gb_per_s=1e30)  # a FLOP takes a second
BYTES_ONLY = Ceilings(gemm_tflops=1e30, copy_gb_per_s=1e-9)  # a byte takes a second
SENT_BYTES = Ceilings(gemm_tflops=1, copy_gb_per_s=1, link_gb_per_s=1e-9)  # one sent, too


def config(**changes):
    small = {
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "patch_size": 2,
        "latent_size": 8,
        "in_channels": 1,
    }
    return DiTConfig(num_classes=10, **small | changes)


def named(size, latent_size=32):
    return DiTConfig(size=size, latent_size=latent_size, in_channels=4, num_classes=1000)


def built(work):
    with torch.device("meta"):
        return work.config.build(work.output_channels)


MODELS = {
    "XL/2 at 1024 tokens": Work(named("XL/2", 64), 8, 4, microbatches=2),
    "narrow MLP": Work(config(mlp_ratio=2.5, qk_norm=True), 2, 5),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_products_are_the_models_flops_and_parameters(name):
    work, model = MODELS[name], built(MODELS[name])
    flops = model.flops_per_sample(work.config.token_shape[0]) * work.batch
    assert limits.model_tflop(work) * 1e12 == pytest.approx(flops, rel=1e-12)
    assert work.num_parameters == sum(p.numel() for p in model.parameters())
    seconds = limits.gemm_s(work, FLOPS_ONLY) + limits.attention_s(work, FLOPS_ONLY)
    assert seconds == pytest.approx(flops, rel=1e-12)


class Moved(TorchDispatchMode):
    """Elements that operators other than products and attention read and write."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        # torch 2.15 runs _unsafe_view, a view that is not called one, as an operator.
        left_out = (
            "mm",
            "linear",
            "scaled_dot_product",
            "detach",
            "empty",
            "randn",
            "_unsafe_view",
        )
        if not func.is_view and not any(part in func._schema.name for part in left_out):
            tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
            self.elements += sum(map(elements_in_memory, tensors))
        return out


def elements_in_memory(tensor):
    """Expanded dims read the same memory and count once."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return torch.Size([size for size, stride in steps if stride]).numel()


def moved_by_a_layer(**changes):
    """(forward, forward and backward) elements per token, in bf16, of eager blocks."""
    moved = []
    for layers in (1, 2):
        model = config(num_layers=layers, latent_size=32, **changes).build(1).bfloat16()
        stream = (torch.randn(1, 256, 64), torch.randn(1, 64))
        stream = tuple(t.bfloat16().requires_grad_() for t in stream)
        with Moved() as log:
            for block in model.blocks.values():
                stream = block(stream, {})
            forward = log.elements
            stream[0].backward(torch.randn_like(stream[0]))
        moved.append((forward, log.elements))
    return tuple((two - one) / 256 for one, two in zip(*moved, strict=True))


@pytest.mark.parametrize("ffn", [256, 512])
def test_eager_blocks_move_what_is_counted(ffn):
    (fh, ff), (bh, bf), _ = limits.ELEMENTWISE["eager"]
    forward, both = moved_by_a_layer(mlp_ratio=ffn / 64)
    # Plus vectors with one value per sample.
    assert forward == pytest.approx(fh * 64 + ff * ffn, rel=0.01)
    assert both == pytest.approx((fh + bh) * 64 + (ff + bf) * ffn, rel=0.01)


def test_bytes_of_a_small_step_counted_by_hand():
    # 3 samples of 16 tokens, h 64, f 256, 2 layers.
    work, cut = Work(config(), 1, 3), Work(config(), 1, 3, sizes={"tp": 4})
    assert limits.elementwise_bytes(cut) == 2 * 48 * (2 * (28 * 64 + 5 * 256) / 4 + 7 * 64)
    assert limits.attention_s(work, BYTES_ONLY) == pytest.approx(12 * 2 * 48 * 64 * 2)
    parameters = work.num_parameters
    assert limits.state_bytes(work) == parameters * (28 + 12 + 12 + 12)
    two = Work(config(), 1, 3, num_averages=2, sizes={"dp_shard": 4})
    assert limits.state_bytes(two) == parameters / 4 * (28 + 12 + 24 + 12)
    modulation = next(p for p in limits.products(work) if p.name == "modulation")
    assert modulation.seconds(BYTES_ONLY) == pytest.approx(2 * (3 * 64 + 64 * 384 + 3 * 384))


def test_what_is_computed_again_takes_its_time_but_is_no_model_flop():
    plain, full = (Work(named("S/2"), 4, 8, remat=mode) for mode in ("none", "full"))
    assert limits.model_tflop(full) == limits.model_tflop(plain)
    h, layers, n = 384, 12, 256
    again = 8 * layers * (24 * n * h * h + 12 * h * h)
    more = limits.gemm_s(full, FLOPS_ONLY) - limits.gemm_s(plain, FLOPS_ONLY)
    assert more == pytest.approx(again)
    assert limits.attention_flops(full) == pytest.approx(limits.attention_flops(plain) * 4 / 3)


def test_a_step_waits_for_what_cannot_be_hidden_only():
    links = {"link_gb_per_s": 50, "inner_gb_per_s": 400}
    ceilings = Ceilings(gemm_tflops=700, copy_gb_per_s=3000, **links)
    alone = limits.terms_ms(Work(named("XL/2"), 4, 64), ceilings)
    computing = sum(alone[k] for k in ("GEMM", "attention", "elementwise", "optimizer"))
    assert alone["step"] == pytest.approx(computing)
    sharded = Work(named("XL/2"), 4, 64, sizes={"dp_shard": 8})
    terms = limits.terms_ms(sharded, ceilings)
    # 674.3e6 parameters, twice in bf16 and once in fp32, 7/8 of them.
    assert terms["dp (hidden)"] == pytest.approx(sharded.num_parameters * 8 * 7 / 8 / 50e6)
    assert terms["step"] < alone["step"]  # the optimizer's part is shared
    slow = Ceilings(gemm_tflops=700, copy_gb_per_s=3000, link_gb_per_s=1)
    assert limits.terms_ms(sharded, slow)["step"] == limits.terms_ms(sharded, slow)["dp (hidden)"]
    tp = limits.terms_ms(Work(named("XL/2"), 4, 64, sizes={"tp": 4}), ceilings)
    computing = sum(tp[k] for k in ("GEMM", "attention", "elementwise", "optimizer"))
    assert tp["step"] == pytest.approx(computing + tp["tp, ulysses"])


def test_replicas_reduce_shards_and_every_microbatch_gathers():
    ceilings = Ceilings(gemm_tflops=700, copy_gb_per_s=3000, link_gb_per_s=50)
    sizes = {"dp_replicate": 2, "dp_shard": 4, "cp": 2, "tp": 2}
    work = Work(named("S/2"), 4, 8, microbatches=4, sizes=sizes)
    # A tp rank's half of the parameters: 4 microbatches gather 7/8 of it twice in bf16 and reduce
    # it once in fp32, and replicas reduce an eighth to all.
    half = work.num_parameters / 2
    sent = half * (4 * 2 * 2 + 4) * 7 / 8 + 2 * (1 / 2) * 4 * half / 8
    assert limits.data_parallel_s(work, ceilings) == pytest.approx(sent / 50e9, rel=1e-12)


SENDING = [
    ("tp", "none", {}),
    ("tp", "selective", {}),
    ("tp", "full", {}),
    ("cp", "full", {"cp_method": "ring"}),
    ("cp", "attention", {"cp_method": "ulysses"}),
]


@pytest.mark.parametrize(("axis", "remat", "method"), SENDING)
def test_a_layer_sends_what_the_operators_of_a_step_do(axis, remat, method):
    """Equal to the byte, including communication repeated by recomputation."""
    sections = {"parallel": {axis: 4, **method}, "activation_checkpoint": {"mode": remat}}
    case = collectives.Case(axis, 4, sections, "", float)
    with unchecked():
        _, counted = collectives.sent(case, 1)
        if axis == "tp":  # The ends of the network send, too.
            counted = collectives.sent(case, 2)[1] - counted
            if torch.__version__ < "2.12":  # See docs/torch-versions.md.
                counted -= 2 * 3 / 4 * collectives.BATCH * collectives.HIDDEN * collectives.BF16
    send = limits.tensor_parallel_s if axis == "tp" else limits.context_parallel_s
    shape = {"hidden_size": collectives.HIDDEN, "num_heads": collectives.HEADS}
    shape |= {"latent_size": collectives.LATENT, "num_layers": 1}
    layout = {"sizes": {axis: 4}, "remat": remat, **method}
    work = Work(config(**shape), 1, collectives.BATCH, **layout)
    assert send(work, SENT_BYTES) == pytest.approx(counted, rel=1e-12)


FOUND = {
    "benchmark": "gpu bf16 ddpm",
    "objective": "ddpm",
    "device": "a device that does not exist",
    "ceilings": {
        **{"peak_tflops": 1000.0, "gemm_tflops": 500.0, "copy_gb_per_s": 2000.0},
        "attention": [
            {"head_dim": 72, "tokens": 256, "backend": "auto", "both TFLOP/s": 250.0},
            {"head_dim": 72, "tokens": 256, "backend": "cudnn", "both TFLOP/s": 400.0},
            {"head_dim": 128, "tokens": 4096, "backend": "auto", "both TFLOP/s": 600.0},
        ],
    },
    "rows": [
        {"model": model, "tokens": tokens, "batch": batch, "contender": name, "ms per step": said}
        for model, tokens, batch, name, said in [
            ("XL/2", 256, 32, "plain", "1000.0"),
            ("XL/2", 256, 32, "ours_compiled", "100.0"),
            ("XL/2", 1024, 64, "ours", "out of memory"),
            ("7B/2x8", 16384, 2, "ours_compiled", "99.0"),
            # May be faster than the bf16 limit.
            ("7B/2x8", 4096, 8, "ours_float8_rowwise", "99.0"),
        ]
    ],
}


def test_the_limit_of_a_measured_row_is_that_of_its_model_blocks_and_attention(
    monkeypatch, tmp_path
):
    (tmp_path / "gpu.json").write_text(json.dumps(FOUND))
    flags = ["--gpu", tmp_path / "gpu.json", "--out", tmp_path / "out.json"]
    monkeypatch.setattr(sys, "argv", ["roofline.py", *map(str, flags)])
    roofline.main()
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    seven = {
        "hidden_size": 4096,
        "num_layers": 8,
        "num_heads": 32,
        "in_channels": 4,
        "latent_size": 256,
    }
    expected = [
        (Work(named("XL/2"), 8, 32, is_compiled=False), 400, 1000),
        (Work(named("XL/2"), 8, 32), 400, 100),
        # Four times the measured tokens: falls back to the GEMM ceiling.
        (Work(replace(config(**seven), num_classes=1000), 8, 2), None, 99),
    ]
    for row, (work, attention, ms) in zip(rows, expected, strict=True):
        ceilings = Ceilings(500, 2000, attention_tflops=attention, peak_tflops=1000)
        terms = limits.terms_ms(work, ceilings)
        assert float(row["attention"]) == pytest.approx(terms["attention"], abs=0.01)
        assert float(row["limit"]) == pytest.approx(terms["step"], abs=0.05)
        assert float(row["limit / measured"]) == pytest.approx(terms["step"] / ms, abs=0.001)
    for row in rows[:2]:
        # 32 samples of 711.719 GFLOP, as the model says of 256 tokens.
        ms, limit = float(row["measured"]), float(row["limit"])
        assert float(row["MFU"]) == pytest.approx(32 * 0.711719 / ms, abs=0.001)
        assert float(row["MFU at most"]) == pytest.approx(32 * 0.711719 / limit, abs=0.001)
