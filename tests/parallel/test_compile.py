"""torch.compile: a clear error if it cannot work, and a count of recompilations."""

import functools
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import on_ranks
from tiny import graphs_alone, inputs_of, tiny_config

from titan_dit.config.layout import CompileConfig
from titan_dit.config.section import UserError
from titan_dit.models.flux2_config import Flux2Config
from titan_dit.models.joint_dit_config import JointDiTConfig
from titan_dit.models.wan_config import WanConfig
from titan_dit.models.z_image_config import ZImageConfig
from titan_dit.parallel import compile

CPU = torch.device("cpu")


@pytest.mark.compiler
def test_a_missing_compiler_is_told_although_the_cache_is_warm():
    import torch._inductor.config as inductor

    compile.check(CompileConfig(enabled=True), CPU)
    torch._dynamo.reset()
    message = r"\[compile\] enabled=true, but .*/no/such/compiler.*C\+\+.*Set .compile. enabled"
    missing = inductor.patch({"cpp.cxx": (None, "/no/such/compiler")})
    with missing, pytest.raises(UserError, match=message):
        compile.check(CompileConfig(enabled=True), CPU)
    compile.check(CompileConfig(enabled=False), CPU)
    torch._dynamo.reset()


def trial_with(folder, forbidden):
    """The trial with a compiler that lacks a flag: were probes skipped, and with which flags.

    The flags are those of the last library built, the addition's.
    """
    from torch._inductor import cpp_builder, cpu_vec_isa

    torch._dynamo.reset()
    classes = [c for c in vars(cpu_vec_isa).values() if isinstance(c, type)]
    for place in (cpp_builder, cpu_vec_isa, *classes):
        for known in vars(place).values():  # No compiler state, as in a fresh process.
            if isinstance(known, functools._lru_cache_wrapper):
                known.cache_clear()
    folder.mkdir()
    compiler = folder / "g++"
    compiler.write_text(
        f'#!/bin/sh\necho "$*" >> {folder}/calls\n'
        f'case "$*" in *{forbidden}*) echo "unknown option" >&2; exit 1;; esac\nexec g++ "$@" -O0\n'
    )
    compiler.chmod(0o755)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/cache"
    import torch._inductor.config as inductor

    settings = {"cpp.vec_isa_ok": None, "cpp_cache_precompile_headers": False}
    with inductor.patch({"cpp.cxx": (None, str(compiler)), **settings}):
        compile.check(CompileConfig(enabled=True), CPU)
        calls = (Path(folder) / "calls").read_text().splitlines()
        flags = [call for call in calls if ".so" in call][-1]
        return inductor.cpp.vec_isa_ok, str(cpu_vec_isa.pick_vec_isa()), flags


def both_trials(world, folder):
    """With a compiler that knows all flags, and with one that lacks those the first used."""
    new = trial_with(Path(folder) / "new", "no-such-flag")
    return new, trial_with(Path(folder) / "old", new[1].split()[0])


@pytest.mark.long
@pytest.mark.compiler
@pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="asks for x86's instructions")
def test_probes_are_spared_where_the_compiler_knows_what_the_cpu_has(tmp_path):
    [((spared, best, flags), old)] = on_ranks(1, both_trials, str(tmp_path))
    assert spared is True
    assert f"-m{best.split()[0]}" in flags
    spared, less, flags = old
    assert spared is None
    assert less != best
    assert best.split()[0] not in flags


def test_recompiles_are_those_of_later_steps():
    def double(x):
        return 2 * x

    step = torch.compile(double, backend="eager", dynamic=False)
    recompiles = compile.Recompiles()

    def train(of_batch, size):
        with recompiles.during(SimpleNamespace(fields={"x": torch.zeros(of_batch)})):
            step(torch.zeros(size))

    for size in (3, 3, 6, 3, 6):  # Two buckets, whose first steps compile.
        train(size, size)
    assert recompiles.count == 0
    step(torch.zeros(4))  # Between steps: a preview.
    train(3, 4)
    assert recompiles.report() is None
    train(3, 5)
    assert recompiles.count == 1
    assert "recompiled 1 graphs after the first step" in recompiles.report()
    assert recompiles.report() is None


SIZES = {"hidden_size": 24, "num_heads": 2, "in_channels": 4, "latent_size": [4, 6]}
SIZES |= {"text_tokens": 32, "text_dim": 8}
KINDS = [
    Flux2Config(num_double_layers=2, num_single_layers=3, **SIZES, rope_axes=[4, 2, 4, 2]),
    ZImageConfig(num_refiner_layers=2, num_layers=3, **SIZES),
    JointDiTConfig(num_layers=3, patch_size=1, **SIZES),
    WanConfig(num_layers=3, intermediate_size=32, latent_frames=2, **SIZES),
]


def graphs_of(_, config):
    """Graphs of two forwards and backwards."""
    with graphs_alone():
        model, start = config.build(4), compile.num_graphs()
        compile.compile_blocks(model, CompileConfig(enabled=True))
        inputs = {
            "tokens": config.tokenize(torch.randn(2, *config.sample_shape)),
            "timestep": torch.tensor([10.0, 700.0]),
            "text": torch.randn(2, 32, 8),
            "text_length": torch.tensor([3, 32]),
        }
        for _ in range(2):
            model(inputs, config.static(CPU)).sum().backward()
        return compile.num_graphs() - start


def test_blocks_of_a_kind_share_one_graph():
    for config in KINDS[::-1]:
        [found] = on_ranks(1, graphs_of, config)
        assert found == max(1, len(set(config.kinds))), config.name


def test_counting_loads_no_compiler(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    assert compile.num_graphs() == 0
    assert "torch._dynamo.utils" not in sys.modules


def test_cuda_graphs_are_refused_without_a_gpu():
    config = CompileConfig(enabled=True, cuda_graphs=True)
    with pytest.raises(UserError, match="cuda_graphs=true needs a GPU, but the device is a cpu"):
        compile.check(config, torch.device("cpu"))


def test_cuda_graphs_begin_anew_with_every_forward_of_the_model():
    """torch counts the iterations downwards, with or without a GPU."""
    from torch._inductor.cudagraph_trees import MarkStepBox

    config = tiny_config().model
    model = config.build(4)
    asked = []
    for block in model.blocks.values():
        block.compile = lambda **options: asked.append(options)
    compile.compile_blocks(model, CompileConfig(enabled=True, cuda_graphs=True))
    assert len(asked) == len(model.blocks)
    assert all(options["options"] == {"triton.cudagraphs": True} for options in asked)
    before = MarkStepBox.mark_step_counter
    for count in (1, 2):
        model(inputs_of(config), config.static(CPU))
        assert before - MarkStepBox.mark_step_counter == count
