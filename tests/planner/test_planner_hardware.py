"""Devices as data: their files, and what is said about wrong ones."""

from dataclasses import replace

import pytest
from hand_made import EASY, easy

from titan_dit.config.section import UserError
from titan_dit.dry_run.report import DEVICES_GIB
from titan_dit.observe.meter import PEAK_BF16_TFLOPS, PEAK_FP16_TFLOPS
from titan_dit.planner.hardware import (
    FOLDER,
    check_device,
    device_of,
    names,
    numbers,
    write,
)

GPUS = ("a100_40", "a100_80", "b200", "h100", "h20", "h200", "v100_16")


def said(name):
    with pytest.raises(UserError) as caught:
        device_of(str(name))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def changed(tmp_path):
    """Write h100.toml with a text replaced; returns the path."""

    def write_changed(old, new):
        text = (FOLDER / "h100.toml").read_text()
        assert text.count(old) == 1
        path = tmp_path / "mine.toml"
        path.write_text(text.replace(old, new))
        return path

    return write_changed


def test_the_package_has_these_devices():
    assert names() == tuple(sorted((*GPUS, "cpu")))


def unsourced(device):
    """Numbers without an entry in `sources`, neither of their own nor of their table."""
    return [
        key
        for key, _, _ in numbers(device)
        if key not in device.sources and key.partition(".")[0] not in device.sources
    ]


@pytest.mark.parametrize("name", names())
def test_every_number_of_a_device_has_a_source(name):
    device = device_of(name)
    assert device.name == name
    assert unsourced(device) == []
    keys = {key for key, _, _ in numbers(device)}
    tables = {key.partition(".")[0] for key in keys}
    assert set(device.sources) <= keys | tables


def test_a_number_without_a_source_is_found():
    device = device_of("h100")
    sources = {key: text for key, text in device.sources.items() if key != "efficiency.node"}
    assert unsourced(replace(device, sources=sources)) == ["efficiency.node"]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("a100_40", "A100, 40 GB"),
        ("a100_80", "A100, H100, 80 GB"),
        ("h100", "A100, H100, 80 GB"),
        ("h20", "H20, 96 GB"),
        ("h200", "H200, 141 GB"),
        ("b200", "B200, 180 GB"),
    ],
)
def test_memory_is_that_of_the_dry_run(name, row):
    assert device_of(name).memory_gib == DEVICES_GIB[row]


@pytest.mark.parametrize("name", GPUS)
def test_peaks_are_those_of_mfu(name):
    known, peaks = name.partition("_")[0].upper(), device_of(name).peak_tflops
    assert peaks.get("bf16") == PEAK_BF16_TFLOPS.get(known)
    assert peaks["fp16"] == PEAK_FP16_TFLOPS.get(known, PEAK_BF16_TFLOPS.get(known))


def test_a_group_has_the_link_of_the_next_smaller_known_size():
    device = device_of("v100_16")
    assert [device.inner(ranks) for ranks in (1, 2, 3, 4, 6, 8)] == [25, 25, 25, 100, 100, 150]


@pytest.mark.parametrize("name", names())
def test_a_written_device_is_read_back_equal(name, tmp_path):
    device = replace(device_of(name), versions={"torch": "2.13"}, rows={"dp 8 x tp 2": "1.0 ms"})
    path = tmp_path / "sub" / "mine.toml"
    write(device, path)
    assert device_of(str(path)) == device
    assert hash(device_of(str(path))) == hash(device)


def test_devices_that_differ_are_told_apart():
    assert easy(inner=0.5) != EASY
    assert {EASY: 1, easy(): 2, easy(inner=0.5): 3} == {EASY: 2, easy(inner=0.5): 3}


def test_an_unknown_device_names_the_known_ones():
    assert said("h10O") == (
        "--device h10O: unknown device. Did you mean h100? Known: a100_40, a100_80, b200, cpu, "
        "h100, h20, h200, v100_16, or the path of a .toml file."
    )
    assert "Did you mean a100_40 or a100_80?" in said("A100")
    assert "Did you mean" not in said("mi300x")
    assert said("other.toml").startswith("--device other.toml: no such file. Known devices: a100")


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("launch_us = 6.0\n", "", "launch_us is missing. Write launch_us = 6.0, as h100 has it."),
        ("moved = 0.6\n", "", "[efficiency] moved is missing. Write moved = 0.6, as h100"),
        ("launch_us = 6.0", "lunch_us = 6.0", "lunch_us: unknown key. Did you mean launch_us?"),
        ("moved =", "copied =", "[efficiency] copied: unknown key. Valid: attention, inner,"),
        ("attention = 0.6\n", "attention = 1.2\n", "attention=1.2 must be at most 1."),
        ("inner = 0.78", "inner = 0.0", "inner=0.0 must be above 0."),
        ("allocator = 1.08", "allocator = 0.9", "allocator=0.9 must be at least 1."),
        ("allocator = 1.08", "allocator = nan", "allocator=nan must be"),
        ("bf16 = 989.0", "bf16 = 0", "[peak_tflops] bf16=0.0 must be above 0."),
        ("bf16 = 989.0", "bfloat = 9", "[peak_tflops] bfloat: unknown format. Did you mean"),
        ("2 = 450.0", "4 = 450.0", "[inner_gb_per_s] has no link for 2 ranks. Write 2 = 450.0"),
        ("2 = 450.0", "2 = 450.0\n9 = 1.0", "[inner_gb_per_s] 9: a group inside a node has 2 to"),
        ("2 = 450.0", "two = 450.0", "[inner_gb_per_s] two is not the number of ranks"),
        ("[inner_gb_per_s]\n2 = 450.0\n", "", "[inner_gb_per_s] is missing. Write the table; h100"),
        ("nic_gb_per_s = 50.0", "nic_gb_per_s = 0", "nics_per_node=8 needs nic_gb_per_s above 0."),
        ("gpus_per_node = 8\n", "gpus_per_node = 0\n", "gpus_per_node=0 must be at least 1."),
        ("error = 0.14\n", 'error = "14%"\n', 'error="14%" must be a number.'),
        ("error = 0.14\n", "error = 0.14\noverhead = 3\n[old]", "is not valid TOML"),
    ],
)
def test_wrong_files_are_refused_in_one_line(changed, old, new, text):
    path = changed(old, new)
    if text == "is not valid TOML":
        path.write_text("error = 0.14\noverhead\n")
    message = said(path)
    assert text in message
    assert message.startswith(str(path))


def test_a_number_in_place_of_a_table_is_refused(tmp_path):
    path = tmp_path / "mine.toml"
    lines = (FOLDER / "h100.toml").read_text().split("[overhead]")[0].splitlines()
    path.write_text("\n".join(["overhead = 3", *lines]))
    assert f"{path}: overhead=3 must be a table: write [overhead]." in said(path)


def test_an_efficiency_above_1_is_no_fit(tmp_path):
    with pytest.raises(UserError, match=r"efficiency\.node=1\.2 must be at most 1"):
        check_device(easy(node=1.2), "the fit")
    with pytest.raises(UserError, match=r"mine\.toml: efficiency\.products=1\.2 must be at most 1"):
        write(easy(products=1.2), tmp_path / "mine.toml")
    assert not list(tmp_path.iterdir())


def test_a_format_that_a_device_lacks_is_refused():
    with pytest.raises(
        UserError, match=r'a100_80 has no float8.* Set \[precision\] float8 = "off"'
    ):
        device_of("a100_80").peak("float8")
    with pytest.raises(UserError, match=r'v100_16 has no bf16.* dtype = "fp32" or "fp16"'):
        device_of("v100_16").peak("bf16")
    assert device_of("h100").peak("fp32") == 67e12
