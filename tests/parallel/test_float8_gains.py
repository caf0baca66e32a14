"""Which layers gain from float8: by the measured table, else by the roofline."""

import json

import pytest

from titan_dit.parallel.float8 import (
    COSTS,
    UNKNOWN_BALANCE,
    LinearShape,
    Measured,
    balance,
    intensity,
    is_faster,
    nearest,
    read_table,
)

H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
XL = {"qkv": (1152, 3456), "out": (1152, 1152), "up": (1152, 4608), "down": (4608, 1152)}


@pytest.mark.parametrize("recipe", COSTS)
def test_roofline_is_the_time_saved_against_the_time_paid(recipe):
    shape, cost, flops, bandwidth = LinearShape(16384, 2048, 6144), COSTS[recipe], 989e12, 3.35e12
    m, k, n = shape.rows, shape.inputs, shape.outputs
    # Each product takes 2 m k n / flops in bf16, and half of that in float8.
    saved = cost.products * (m * k * n / flops)
    paid = (cost.input * m * k + cost.weight * k * n + cost.gradient * m * n) / bandwidth
    assert intensity(shape, recipe) * bandwidth / flops == pytest.approx(saved / paid)


def test_what_a_dit_xl_gains_from():
    shapes = {name: LinearShape(128 * 256, *dims) for name, dims in XL.items()}

    def chosen(recipe, device, table):
        return {name for name, shape in shapes.items() if is_faster(shape, recipe, device, table)}

    assert chosen("te_current", H100, []) == {"qkv", "up", "down"}
    assert chosen("tensorwise", H100, []) == set()
    # The roofline and the measured table of an H200.
    assert chosen("tensorwise", H200, []) == {"qkv", "up", "down"}
    assert chosen("tensorwise", H200, read_table()) == {"up", "down"}
    for table in ([], read_table()):
        assert chosen("rowwise", H200, table) == set()


def test_a_wide_model_gains_unless_the_casts_are_slow_and_a_narrow_one_never():
    wide, slow = LinearShape(16384, 4096, 16384), {"rowwise", "rowwise_with_gw_hp"}
    assert {recipe for recipe in COSTS if not is_faster(wide, recipe, H100, [])} == slow
    assert {recipe for recipe in COSTS if not is_faster(wide, recipe, H200, read_table())} == slow
    # Casts grow with the sides of a product, the product with their square.
    assert all(is_faster(LinearShape(65536, 12288, 49152), recipe, H200, []) for recipe in COSTS)
    assert not any(is_faster(LinearShape(16384, 256, 768), recipe, H100, []) for recipe in COSTS)


@pytest.mark.parametrize("shape", [(1000, 4096, 4096), (4096, 4100, 4096), (4096, 4096, 4104)])
def test_what_the_tensor_cores_cannot_multiply_never_gains(shape):
    fast = Measured(H100, "rowwise", LinearShape(*shape), bf16_ms=2.0, float8_ms=1.0)
    assert not is_faster(LinearShape(*shape), "rowwise", H100, [fast])


def test_what_was_measured_overrules_the_roofline():
    large, small = LinearShape(16384, 4096, 4096), LinearShape(1024, 512, 512)
    table = [
        Measured(H100, "tensorwise", large, bf16_ms=1.0, float8_ms=1.1),
        Measured(H100, "tensorwise", small, bf16_ms=1.0, float8_ms=0.9),
    ]
    assert is_faster(large, "tensorwise", H100, [])
    assert not is_faster(large, "tensorwise", H100, table)
    assert not is_faster(small, "tensorwise", H100, [])
    assert is_faster(small, "tensorwise", H100, table)
    # No measurement of another recipe or device.
    assert is_faster(large, "te_current", H100, table)
    assert is_faster(large, "tensorwise", H200, table)


def test_the_nearest_measured_shape_speaks_for_one_within_a_factor_of_two():
    table = [
        Measured(H100, "rowwise", LinearShape(1024, 1024, 1024), 1.0, 2.0),
        Measured(H100, "rowwise", LinearShape(4096, 1024, 1024), 1.0, 0.5),
    ]
    assert nearest(LinearShape(1536, 1024, 1024), table) is table[0]
    assert nearest(LinearShape(3072, 1024, 1024), table) is table[1]
    assert nearest(LinearShape(2048, 4096, 1024), table) is None


@pytest.mark.parametrize(
    ("device", "tflops", "terabytes"),
    [
        ("NVIDIA H200", 989, 4.8),
        ("NVIDIA H200 NVL", 835, 4.8),
        (H100, 989, 3.35),
        ("NVIDIA H100 PCIe", 756, 2),
        ("NVIDIA H100 NVL", 835, 3.9),
    ],
)
def test_balance_is_that_of_the_device_by_name(device, tflops, terabytes):
    assert balance(device) == pytest.approx(tflops / terabytes)


@pytest.mark.parametrize(
    "device", ["", "NVIDIA GH200 480GB", "NVIDIA GB200", "NVIDIA H20", "H1000"]
)
def test_a_name_that_holds_that_of_another_device_is_not_known(device):
    assert balance(device) == UNKNOWN_BALANCE == pytest.approx(989 / 3.35)


def test_the_table_that_is_shipped_reads_and_one_of_the_benchmark_does(tmp_path):
    assert all(row.shape.fits for row in read_table())
    row = {"device": H100, "recipe": "rowwise", "M": 16, "K": 32, "N": 48}
    path = tmp_path / "table.json"
    row |= {"bf16_ms": 2, "float8_ms": 1, "date": "2026-01-01", "torch": "2.13.0"}
    path.write_text(json.dumps({"rows": [row]}))
    assert read_table(path) == [Measured(H100, "rowwise", LinearShape(16, 32, 48), 2, 1)]
