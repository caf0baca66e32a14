"""float8 where it cannot be had: an answer before anything is built."""

from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_config

from titan_dit.parallel import float8_checks
from titan_dit.parallel.float8_checks import NEEDED, check_device, nearest_to
from titan_dit.parallel.mesh import AxisSizes
from titan_dit.section import UserError

TE = ("te_delayed", "te_current", "te_mxfp8")
TORCHAO = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def check(sizes=None, **sections):
    float8_checks.check(tiny_config(**sections), AxisSizes(**(sizes or {})))


@pytest.mark.parametrize("float8", NEEDED)
def test_a_cpu_is_refused_with_the_way_to_emulate_if_there_is_one(float8):
    precision = tiny_config(precision={"float8": float8}).precision
    with pytest.raises(UserError, match=rf'\[precision\] float8="{float8}".* Set .*"off"') as error:
        check_device(precision, False, torch.device("cpu"))
    assert ("float8_emulate = true" in str(error.value)) == (float8 in TORCHAO)


def test_emulation_and_off_run_anywhere():
    for keys in ({"float8": "off"}, {"float8": "rowwise", "float8_emulate": True}):
        check_device(tiny_config(precision=keys).precision, False, torch.device("cpu"))


@pytest.mark.parametrize(
    ("float8", "played"),
    [("off", ("off", False)), ("rowwise", ("rowwise", True))]
    + [(name, ("off", False)) for name in TE],
)
def test_a_step_is_played_again_on_a_cpu_as_near_as_it_can_be(float8, played):
    precision = tiny_config(precision={"float8": float8}).precision
    found = nearest_to(precision, torch.device("cpu"))
    assert (found.float8, found.float8_emulate) == played
    check_device(found, False, torch.device("cpu"))


@pytest.mark.parametrize(
    ("float8", "found", "able"),
    [
        ("tensorwise", (8, 0), '"off"'),
        ("rowwise", (8, 9), '"off", "tensorwise", "te_delayed", "te_current"'),
        ("te_mxfp8", (9, 0), '"rowwise_with_gw_hp", "te_delayed", "te_current"'),
    ],
)
def test_an_older_gpu_is_refused_with_what_it_can_do(monkeypatch, float8, found, able):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old GPU")
    precision = tiny_config(precision={"float8": float8}).precision
    with pytest.raises(UserError, match="Old GPU has") as error:
        check_device(precision, False, torch.device("cuda", 0))
    assert str(error.value).endswith(f"{able}.")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: NEEDED[float8])
    check_device(precision, False, torch.device("cuda", 0))


def test_fp64_is_refused():
    with pytest.raises(UserError, match=r'dtype="fp64".*float8="rowwise".* Set'):
        check(precision={"dtype": "fp64", "float8": "rowwise"})


@pytest.mark.parametrize("float8", TE)
def test_transformer_engine_without_its_package_says_how_to_install_it(monkeypatch, float8):
    monkeypatch.setattr(float8_checks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf'float8="{float8}" .*not installed.*titan_dit\[te\]'):
        check(precision={"float8": float8})


@pytest.mark.parametrize(
    ("sizes", "sections", "named"),
    [
        ({"tp": 2}, {}, "tp=2"),
        ({"pp": 2}, {}, "pp=2"),
        ({}, {"compile": {"enabled": True}}, r"\[compile\] enabled=true"),
        ({}, {"remat": {"mode": "full"}}, 'mode="full"'),
        ({}, {"remat": {"mode": "selective"}}, 'mode="selective"'),
        ({}, {"precision": {"float8_emulate": True}}, "cannot be emulated"),
    ],
)
def test_transformer_engine_is_refused_where_it_does_not_fit(monkeypatch, sizes, sections, named):
    monkeypatch.setattr(float8_checks.importlib.util, "find_spec", lambda name: SimpleNamespace())
    check(precision={"float8": "te_current"})
    sections = {**sections, "precision": {"float8": "te_current", **sections.get("precision", {})}}
    with pytest.raises(UserError, match=rf"{named}.* Set"):
        check(sizes, **sections)


def test_async_tp_needs_compiled_blocks_ranks_to_talk_to_and_cuda():
    whole = {"parallel": {"async_tp": True}, "compile": {"enabled": True}}
    check({"tp": 2}, **whole)
    for sizes, sections in (
        ({}, whole),
        ({"tp": 2}, whole | {"compile": {"enabled": False}}),
        ({"tp": 2}, whole | {"parallel": {"async_tp": True, "sequence_parallel": False}}),
    ):
        with pytest.raises(UserError, match=r"\[parallel\] async_tp=true .* Set async_tp = false"):
            check(sizes, **sections)
    with pytest.raises(UserError, match=r"needs CUDA .* Set async_tp = false"):
        check_device(tiny_config().precision, True, torch.device("cpu"))
