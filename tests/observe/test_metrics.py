import io
import json
import math
import sys
import types

import pytest
import torch
from PIL import Image

from titan_dit.config import user_text
from titan_dit.config.operation import MetricsConfig
from titan_dit.config.section import UserError
from titan_dit.objectives.base import Preview
from titan_dit.observe import meter
from titan_dit.observe.metrics import curve, finite_or_none, keep_rows, read_rows, row_of
from titan_dit.observe.run_log import RunLog
from titan_dit.recovery import bad_steps, ledger, resume
from titan_dit.system import run_files


def row(step, loss=0.5):
    return {"step": step, "loss": loss, "lr": 1e-3}


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def write(file, *rows, tail=""):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)


@pytest.mark.parametrize(
    ("resumed", "kept"), [(0, []), (10, [10]), (25, [10, 20]), (99, [10, 20, 30])]
)
def test_rows_behind_the_resumed_step_are_dropped(tmp_path, resumed, kept):
    file = tmp_path / "metrics.jsonl"
    write(file, row(10), row(20), row(30))
    assert [r["step"] for r in keep_rows(file, resumed)] == kept
    assert [r["step"] for r in lines_of(file)] == kept


@pytest.mark.parametrize("tail", ['{"step": 30, "lo', '{"step": 30, "loss": 0.5', "\0\0\0", "{"])
def test_a_line_that_a_kill_cut_short_is_dropped(tmp_path, tail):
    file = tmp_path / "metrics.jsonl"
    write(file, row(10), row(20), tail=tail)
    kept = keep_rows(file, 99)
    assert kept == lines_of(file) == [row(10), row(20)]
    assert file.read_text().endswith("\n")  # or the next row would join the line


def test_a_fresh_run_starts_with_an_empty_file(tmp_path):
    assert keep_rows(tmp_path / "metrics.jsonl", 0) == []
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def open_metrics(folder, resumed=0, **settings):
    log = RunLog(folder, "run", is_written=True)
    log.open({}, MetricsConfig(**{"tensorboard": False, **settings}), resumed)
    return log


def test_rows_are_appended_one_by_one_and_a_resumed_run_goes_on(tmp_path):
    first = open_metrics(tmp_path)
    for step in (1, 10, 20):
        first.log(row(step, loss=1 / step))
        assert lines_of(tmp_path / "metrics.jsonl")[-1]["step"] == step
    second = open_metrics(tmp_path, resumed=10)
    second.log(row(11, loss=0.25))
    assert [r["step"] for r in lines_of(tmp_path / "metrics.jsonl")] == [1, 10, 11]
    assert curve(second.rows, "loss") == ([1, 10, 11], [1, 0.1, 0.25])


def test_what_is_not_finite_becomes_null_and_leaves_the_curve(tmp_path):
    assert finite_or_none(1.5) == 1.5
    run = open_metrics(tmp_path)
    for step, loss in enumerate((0.5, math.nan, math.inf, -math.inf, 0.4)):
        run.log(row(step, loss=finite_or_none(loss)))
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text.count("null") == 3
    assert "NaN" not in text
    assert "Infinity" not in text
    assert curve(run.rows, "loss") == ([0, 4], [0.5, 0.4])


def picture(*shades):
    """A preview of one column of pixels."""
    column = torch.tensor(shades, dtype=torch.uint8).view(-1, 1).numpy()
    return Preview(".png", lambda file: Image.fromarray(column).save(file))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_the_same_scalars_and_the_previews(tmp_path):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator
    run = open_metrics(tmp_path, tensorboard=True)
    run.log(row(1, loss=0.5))
    run.log(row(2, loss=None))
    run.show(2, picture(7, 250))
    run.show(3, Preview(".txt", lambda file: file.write_text("To be,\n\n  or *not* to be\n")))
    run.show(4, Preview(".npz", lambda file: file.write_bytes(b"neither")))
    run.log(row(3, loss=0.25))
    events = accumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 0.5), (3, 0.25)]
    assert sorted(events.Tags()["scalars"]) == ["loss", "lr"]
    (shown,) = events.Images("samples")
    with Image.open(io.BytesIO(shown.encoded_image_string)) as found:
        assert [found.getpixel((0, y)) for y in range(2)] == [(7,) * 3, (250,) * 3]
    assert shown.step == 2
    (said,) = events.Tensors("samples/text_summary")
    # Indented: TensorBoard reads Markdown, where this keeps lines and asterisks as they are.
    lines = [b"    To be,", b"    ", b"      or *not* to be"]
    assert said.tensor_proto.string_val == [b"\n".join(lines)]
    assert said.step == 3


def stand_in(calls, **replaced):
    """A wandb that notes its calls: the real one is an extra."""
    given = {
        "init": lambda **kwargs: calls.append(kwargs),
        "define_metric": lambda name, **kwargs: calls.append((name, kwargs)),
        "log": calls.append,
        "Image": lambda path: ("picture", path),
        "Html": lambda text: ("page", text),
    }
    return types.SimpleNamespace(**given | replaced)


def test_wandb_is_given_rows_and_previews_and_goes_on_in_the_same_run(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setitem(sys.modules, "wandb", stand_in(calls))
    for step, keys in ((1, {}), (2, {"wandb_project": "faces", "wandb_entity": "our-team"})):
        run = open_metrics(tmp_path, wandb=True, **keys)
        run.log({"step": step, "loss": 0.5, "mfu": None})
        run.show(step, picture(0))
        run.show(step, Preview(".txt", lambda file: file.write_text("1 <\n2")))
    first, own, every, row, shown, said, second, *_ = calls
    # Not wandb's step, which drops rows of steps that are repeated after a kill.
    assert (own, every) == (("step", {}), ("*", {"step_metric": "step"}))
    assert said == {"samples": ("page", "<pre>1 &lt;\n2</pre>"), "step": 1}
    assert row == {"step": 1, "loss": 0.5}
    file = tmp_path / "samples" / "step-00000001.png"
    assert shown == {"samples": ("picture", str(file)), "step": 1}
    assert file.is_file()
    assert first["id"] == second["id"]
    assert first["resume"] == "allow"
    assert (first["project"], first["entity"]) == ("titan_dit", None)
    assert (second["project"], second["entity"]) == ("faces", "our-team")


def test_a_wandb_that_does_not_start_is_one_line(tmp_path, monkeypatch):
    def refuse(**_):
        raise RuntimeError("api_key not configured.\n  call wandb.login()")

    monkeypatch.setitem(sys.modules, "wandb", stand_in([], init=refuse))
    with pytest.raises(UserError, match="wandb login") as error:
        open_metrics(tmp_path, wandb=True, wandb_entity="us")
    assert 'wandb_entity="us": wandb did not start: api_key not conf' in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H20", 148),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA GB200", 2500),
        ("NVIDIA GeForce RTX 3060", None),
    ],
)
def test_the_peak_of_a_gpu_is_found_by_the_longest_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert meter.peak_tflops(torch.device("cuda"), "bf16") == peak
    assert meter.peak_tflops(torch.device("cuda"), "fp16") == peak
    assert meter.peak_tflops(torch.device("cuda"), "fp32") is None
    assert meter.peak_tflops(torch.device("cpu"), "bf16") is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [("Tesla T4", 65), ("Tesla V100-SXM2-16GB", 125), ("Tesla V100-PCIE-32GB", 112)],
)
def test_old_gpus_have_a_peak_in_fp16_alone(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert meter.peak_tflops(torch.device("cuda"), "fp16") == peak
    assert meter.peak_tflops(torch.device("cuda"), "bf16") is None


def test_lines_that_are_no_rows_are_dropped(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('null\n3\n{"a": 1}\n{"step": 1, "loss": 2}\n')
    assert keep_rows(file, resumed_step=5) == [{"step": 1, "loss": 2}]


def test_throughput_counts_the_steps_of_every_bucket():
    work = [meter.Throughput(8, 64, 100, 1, None), meter.Throughput(16, 32, 40, 1, None)]
    assert meter.mean_of(work, {1: 1}).rates(1000.0)["tokens_per_s"] == 16 * 32
    mean = meter.mean_of(work, {0: 3, 1: 1})
    assert mean.samples == (3 * 8 + 16) / 4
    assert mean.samples * mean.tokens_per_sample == (3 * 8 * 64 + 16 * 32) / 4
    assert mean.samples * mean.flops_per_sample == (3 * 8 * 100 + 16 * 40) / 4
    assert meter.mean_of(work[:1], {}) == work[0]


@pytest.mark.parametrize(("peak", "mfu"), [(None, None), (100.0, 0.02)])
def test_a_row_says_how_fast_the_step_was(peak, mfu):
    work = meter.Throughput(32, 256, 10**12, ranks=8, peak_tflops=peak)
    found = row_of(
        *(7, 224, math.nan, 0.75, 1.5, 1e-3),
        times=(2000.0, 3.0),
        work=work,
        peak_gib=4.0,
        counters={"skipped_steps": 3, "nan_steps": 2},
    )
    assert found == {
        "step": 7,
        "samples": 224,
        "loss": None,
        "smooth_loss": 0.75,
        "grad_norm": 1.5,
        "lr": 1e-3,
        "step_ms": 2000.0,
        "samples_per_s": 16.0,
        "tokens_per_s": 4096.0,
        "tflops_per_gpu": 2.0,
        "mfu": mfu,
        "peak_gib": 4.0,
        "data_wait_ms": 3.0,
        "skipped_steps": 3,
        "nan_steps": 2,
    }


DAMAGED = [b"\xff\xfe", b"[" * 100_000, b"9" * 5000, b'{"step": 2', b"[1]"]
"""What a cut write leaves."""


@pytest.mark.parametrize("line", [*DAMAGED, b'{"step": "2"}', b'{"step": 2, "loss": "much"}'])
def test_a_damaged_line_is_skipped_and_gone_after_a_resume(tmp_path, line):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1, "loss": 0.5}\n' + line + b'\n{"step": 3, "loss": null}\n')
    assert [row["step"] for row in read_rows(file)] == [1, 3]
    assert [row["step"] for row in keep_rows(file, 3)] == [1, 3]
    assert file.read_bytes() == b'{"step": 1, "loss": 0.5}\n{"step": 3, "loss": null}\n'


def test_a_line_of_any_length_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(user_text, "MAX_LINE_BYTES", 16)
    file = tmp_path / "metrics.jsonl"
    for end in (b"", b"\n", b"\n" + b"x" * 100):
        file.write_bytes(b'{"step": 1}\n' + b" " * 50 + b'{"step": 2}\n{"step": 3}' + end)
        assert list(user_text.whole_lines(file)) == [(1, {"step": 1}), (3, {"step": 3})]


@pytest.mark.parametrize("line", DAMAGED)
def test_so_is_one_of_the_logs_of_faults_and_samples(tmp_path, line):
    (tmp_path / run_files.FAULTS).write_bytes(b'{"step": 1, "kind": "spike"}\n' + line)
    assert bad_steps.read_faults(tmp_path) == [{"step": 1, "kind": "spike"}]
    folder = tmp_path / run_files.SAMPLES_SEEN / "attempt-00001"
    folder.mkdir(parents=True)
    whole = b'{"step": 1, "ranks": 1, "numbers": [[0, 2]]}\n'
    (folder / "rank-00000.jsonl").write_bytes(whole + line)
    assert ledger.logged_samples(tmp_path) == {1: {0: 1, 1: 1}}


@pytest.mark.parametrize("text", [*DAMAGED, b"{}", b'{"skipped": [1], "in_vain": 0, "reached": 0}'])
def test_a_damaged_list_of_rollbacks_is_one_line(tmp_path, text):
    (tmp_path / run_files.ROLLBACKS).write_bytes(text)
    with pytest.raises(UserError, match=r"rollbacks\.json is damaged: "):
        resume.read_rollbacks(tmp_path)
