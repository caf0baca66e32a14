"""Unsupported compilation, recomputation and float8 are refused before the build."""

from types import SimpleNamespace

import pytest
from plans import check, planned
from tiny_gpt import gpt_config

from titan_dit.checks import formats
from titan_dit.checks.formats import check_compile, check_float8, check_offload, check_remat
from titan_dit.checks.parts import check_offloaded
from titan_dit.config.section import UserError
from titan_dit.optim.sections import AdamWConfig, MuonConfig
from titan_dit.plan import resolve

TE = ("te_delayed", "te_current", "te_mxfp8")
SPLIT = ("interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev")
ALL = (*SPLIT, "gpipe", "1f1b", "interleaved_1f1b")
MODES = ("none", "attention", "selective", "full")


@pytest.mark.parametrize("schedule", ALL)
def test_a_split_backward_is_not_compiled(schedule):
    def compiled(pp):
        _, plan = planned({"pp": pp}, compile={"enabled": True}, pipeline={"schedule": schedule})
        check_compile(plan)

    compiled(1)
    if schedule not in SPLIT:
        return compiled(2)
    words = r"splits the backward pass, which torch does not support for compiled blocks"
    with pytest.raises(UserError, match=rf'\[pipeline\] schedule="{schedule}" {words}'):
        compiled(2)
    return None


def test_cuda_graphs_are_for_one_gpu_and_one_forward_pass():
    graphs = {"compile": {"enabled": True, "cuda_graphs": True}}
    check(**graphs)
    with pytest.raises(UserError, match=r"^\[compile\] .* 2 ranks were started. Set cuda_graphs"):
        check({"dp_shard": 2}, **graphs)
    words = r"a step has 4. Set cuda_graphs = false, or \[training\] microbatch_size = 16"
    with pytest.raises(UserError, match=rf"^\[compile\] cuda_graphs=true .*{words}"):
        check(**graphs, training={"microbatch_size": 4})


@pytest.mark.parametrize("schedule", ALL)
@pytest.mark.parametrize("mode", MODES)
def test_a_split_backward_is_refused_where_a_block_would_run_many_times(schedule, mode):
    def recomputed(pp):
        _, plan = planned(
            {"pp": pp}, activation_checkpoint={"mode": mode}, pipeline={"schedule": schedule}
        )
        check_remat(plan)

    recomputed(1)
    if schedule in SPLIT and mode in ("selective", "full"):
        with pytest.raises(UserError, match=rf'mode="{mode}" .* schedule="{schedule}".* Set mode'):
            recomputed(2)
    else:
        recomputed(2)


@pytest.mark.parametrize("float8", ["tensorwise", "rowwise", "te_delayed"])
def test_float8_does_not_go_with_fp16(float8):
    words = (
        rf'^\[precision\] dtype="fp16" does not work with float8="{float8}".* Set dtype = "bf16"'
    )
    _, plan = planned(precision={"dtype": "fp16", "float8": float8, "float8_emulate": True})
    with pytest.raises(UserError, match=words):
        check_float8(plan)
    check_float8(planned(precision={"dtype": "fp16"})[1])


@pytest.mark.parametrize("mode", ["attention", "full"])
def test_some_modes_are_refused_in_compiled_tensor_parallel_blocks(mode):
    with pytest.raises(UserError, match=rf'mode="{mode}" .*tp=2.* Set mode = "selective"'):
        check({"tp": 2}, activation_checkpoint={"mode": mode}, compile={"enabled": True})


def test_recomputation_that_a_schedule_cannot_have_is_refused_before_anything_is_built():
    """A dry run runs the same checks."""
    with pytest.raises(UserError, match=r"\[activation_checkpoint\] mode=.selective."):
        check(
            {"pp": 2},
            model={"num_layers": 8},
            activation_checkpoint={"mode": "selective"},
            pipeline={"schedule": "zbv_zero_bubble"},
        )


def test_fp64_is_refused():
    with pytest.raises(UserError, match=r'dtype="fp64".*float8="rowwise".* Set'):
        check(precision={"dtype": "fp64", "float8": "rowwise"})


@pytest.mark.parametrize("float8", TE)
def test_transformer_engine_without_its_package_says_how_to_install_it(monkeypatch, float8):
    monkeypatch.setattr(formats.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf'float8="{float8}" .*not installed.*transformer-engine'):
        check(precision={"float8": float8})


@pytest.mark.parametrize(
    ("sizes", "sections", "named"),
    [
        ({"tp": 2}, {}, "tp=2"),
        ({"pp": 2}, {}, "pp=2"),
        ({}, {"compile": {"enabled": True}}, r"\[compile\] enabled=true"),
        ({}, {"activation_checkpoint": {"mode": "full"}}, 'mode="full"'),
        ({}, {"activation_checkpoint": {"mode": "selective"}}, 'mode="selective"'),
        ({}, {"precision": {"float8_emulate": True}}, "cannot be emulated"),
    ],
)
def test_transformer_engine_is_refused_where_it_does_not_fit(monkeypatch, sizes, sections, named):
    monkeypatch.setattr(formats.importlib.util, "find_spec", lambda name: SimpleNamespace())
    check(precision={"float8": "te_current"})
    sections = {**sections, "precision": {"float8": "te_current", **sections.get("precision", {})}}
    with pytest.raises(UserError, match=rf"{named}.* Set"):
        check_float8(planned(sizes, **sections)[1])


def test_async_tp_needs_compiled_blocks_ranks_to_talk_to_and_cuda():
    whole = {"parallel": {"async_tp": True}, "compile": {"enabled": True}}
    check({"tp": 2}, **whole)
    for sizes, sections in (
        ({}, whole),
        ({"tp": 2}, whole | {"compile": {"enabled": False}}),
        ({"tp": 2}, whole | {"parallel": {"async_tp": True, "sequence_parallel": False}}),
        ({"tp": 2}, whole | {"lora": {"rank": 2, "base": "int8"}, "checkpoint": {"init": "x"}}),
    ):
        with pytest.raises(UserError, match=r"\[parallel\] async_tp=true .* Set async_tp = false"):
            check(sizes, **sections)


ACTIVATIONS, PARAMETERS = {"offload": {"activations": True}}, {"offload": {"parameters": True}}


@pytest.mark.parametrize(
    ("parallel", "sections", "words"),
    [
        ({"pp": 2}, ACTIVATIONS | {"pipeline": {"schedule": "zbv_zero_bubble"}}, "is split"),
        ({}, ACTIVATIONS | {"activation_checkpoint": {"mode": "selective"}}, "Set enabled = true"),
        ({}, ACTIVATIONS | {"compile": {"enabled": True, "cuda_graphs": True}}, "fixed addresses"),
        ({}, PARAMETERS | {"precision": {"float8": "tensorwise"}}, 'Set float8 = "rowwise"'),
    ],
)
def test_offload_is_refused_where_it_cannot_work(parallel, sections, words):
    _, plan = planned(parallel, **sections)
    with pytest.raises(UserError, match=rf"^\[offload\] .*{words}"):
        check_offload(plan)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"dtype": "fp16"}, 'dtype="fp16"'),
        ({"dtype": "fp64"}, 'dtype="fp64"'),
        ({"float8": "rowwise"}, 'float8="rowwise"'),
    ],
)
def test_weights_in_bf16_are_refused_beside_other_formats(keys, words):
    with pytest.raises(UserError, match=rf'^\[precision\] weights="bf16" .*{words}.* Set weights'):
        planned({}, precision={"weights": "bf16"} | keys)


def test_parameters_on_the_host_are_not_sent_between_devices():
    _, plan = planned({}, **PARAMETERS)
    check_offloaded(plan, AdamWConfig())
    with pytest.raises(UserError, match=r'^\[offload\] parameters=true .*name="muon"'):
        check_offloaded(plan, MuonConfig())
    tied = gpt_config(parallel={"pp": 2}, **PARAMETERS)
    with pytest.raises(UserError, match=r"^\[offload\] parameters=true .*tied embeddings"):
        check_offloaded(resolve(tied, 2), AdamWConfig())
