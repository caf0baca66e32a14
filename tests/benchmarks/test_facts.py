"""benchmarks/facts: every row is consistent with itself and with what its source printed."""

import csv
from collections import Counter

import pytest
from commands import ROOT

FACTS = ROOT / "benchmarks" / "facts"
FILES = {path.stem: path for path in sorted(FACTS.glob("*.csv"))}
ROWS = [
    (name, row)
    for name, path in FILES.items()
    for row in csv.DictReader(path.read_text().splitlines())
]
WHOLE = "gpus dp tp pp cp virtual_stages micro_batch_samples num_microbatches"
WHOLE += " global_batch_samples hidden heads kv_heads layers ffn seq_tokens vocab_padded parameters"


def numbers(row):
    return {key: int(row[key]) for key in WHOLE.split()}


def parameters_of(row, n):
    """By formula: Llama (rotary, SwiGLU, grouped queries) or GPT-2."""
    h, layers, f = n["hidden"], n["layers"], n["ffn"]
    if row["software"] == "torchtitan":
        block = 2 * h * h + 2 * h * h * n["kv_heads"] // n["heads"] + 3 * h * f + 2 * h
        return layers * block + 2 * n["vocab_padded"] * h + h
    block = 4 * h * h + 2 * h * f + 13 * h
    return layers * block + (n["vocab_padded"] + n["seq_tokens"]) * h + 2 * h


def step_ms(row, n):
    """Milliseconds of a step, from what the source printed."""
    reported, unit = float(row["reported"]), row["reported_unit"]
    if unit == "TFLOP/s per GPU, eq. 3":
        b, s, h, layers, v = (
            n[key]
            for key in ["global_batch_samples", "seq_tokens", "hidden", "layers", "vocab_padded"]
        )
        flops = 96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
        return flops / (n["gpus"] * reported * 1e12) * 1e3
    if unit == "tokens/s per GPU":
        return n["global_batch_samples"] * n["seq_tokens"] / (reported * n["gpus"]) * 1e3
    return reported * {"ms per step": 1, "s per step": 1e3}[unit]


def test_the_tables_have_the_rows_of_their_sources():
    assert Counter(name for name, _ in ROWS) == {
        "megatron_v100": 18,
        "oneflow_v100": 18,
        "megatron_a100": 24,
        "llm_foundry": 108,
        "torchtitan_h100": 18,
    }
    cases = Counter((name, row["case"]) for name, row in ROWS)
    assert max(cases.values()) == 1
    assert len({tuple(row) for _, row in ROWS}) == 1  # The same columns.


@pytest.mark.parametrize("name", FILES)
def test_ranks_batch_parameters_and_time_of_every_row_agree(name):
    for row in (row for file, row in ROWS if file == name):
        n, case = numbers(row), row["case"]
        assert n["gpus"] == n["dp"] * n["tp"] * n["pp"] * n["cp"], case
        batch = n["dp"] * n["micro_batch_samples"] * n["num_microbatches"]
        assert batch == n["global_batch_samples"], case
        assert parameters_of(row, n) == n["parameters"], case
        assert float(row["step_ms"]) == pytest.approx(step_ms(row, n), rel=1e-3), case
        assert n["hidden"] % n["heads"] == 0, case


def test_no_row_exceeds_its_devices_peak_or_memory():
    peaks = {"v100_16": 125, "a100_40": 312, "a100_80": 312, "h100": 989, "h100_96": 989}
    sizes = {"v100_16": 16160, "h100_96": 95830}
    for name, row in ROWS:
        n = numbers(row)
        tokens = n["global_batch_samples"] * n["seq_tokens"]
        share = tokens * 6 * n["parameters"] / n["gpus"] / float(row["step_ms"]) / 1e9
        peak = peaks[row["device"]] * (2 if row["precision"] == "float8" else 1)
        assert share < 0.8 * peak, row["case"]
        if row["memory_mib"]:
            assert float(row["memory_mib"]) < sizes[row["device"]], (name, row["case"])
