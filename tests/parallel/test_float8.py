"""float8 in one process: converted layers, their names and styles, no warnings."""

import contextlib
import logging
import re
import subprocess
import sys

import pytest
import torch
from commands import environment
from harness import on_ranks
from tiny import distance, gradients, graphs_alone, randomize, tiny_config
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from unchecked import unchecked

from titan_dit.config.layout import PrecisionConfig
from titan_dit.config.section import UserError
from titan_dit.dry_run.fake_step import fake_world
from titan_dit.models.layers import TokenLinear
from titan_dit.parallel import float8, tensor
from titan_dit.parallel.float8 import LinearShape
from titan_dit.parallel.mesh import AxisSizes, Mesh
from titan_dit.parallel.tensor_plans.dit import plan
from titan_dit.trainer import Trainer

TORCHAO = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
KINDS = ("attn.qkv", "attn.out", "mlp.up", "mlp.down")


def converted(recipe, *, rows=256, sizes=None, device_type="cpu", **keys):
    precision = {"float8": recipe, "float8_emulate": True, **keys}
    model_keys = {"hidden_size": 32, "mlp_ratio": 4.0} | keys.pop("model", {})
    precision.pop("model", None)
    config = tiny_config(precision=precision, model=model_keys)
    with torch.device("meta"):
        model = config.model.build(1)
    names = list(dict(model.named_parameters()))
    sizes = sizes or AxisSizes()
    styles = float8.apply(model, plan(True), config.precision, sizes, rows, device_type)
    assert list(dict(model.named_parameters())) == names
    return model, styles


def float8_layers(model):
    from torchao.float8.float8_linear import Float8Linear

    return {name for name, part in model.named_modules() if isinstance(part, Float8Linear)}


@pytest.mark.parametrize("recipe", TORCHAO)
def test_the_linears_of_blocks_are_converted_and_nothing_else(recipe):
    model, _ = converted(recipe, float8_layers="all")
    assert float8_layers(model) == {f"blocks.{i}.{kind}" for i in range(3) for kind in KINDS}
    assert not any(isinstance(part, TokenLinear) for part in model.modules())
    assert all(type(block.modulation) is nn.Linear for block in model.blocks.values())


def test_a_layer_that_the_tensor_cores_cannot_multiply_stays():
    # 40 is no multiple of 16, 120 neither, 160 is: but every layer has 40 on one side.
    with pytest.raises(UserError, match=r'float8="rowwise".*\(256, 40, 160\).* Set float8 = "off"'):
        converted("rowwise", float8_layers="all", model={"hidden_size": 40})
    # With tp 4 an output of 96 is 24 wide on a rank; the MLP's 128 are 32.
    model, _ = converted("rowwise", float8_layers="all", sizes=AxisSizes(tp=4))
    assert float8_layers(model) == {f"blocks.{i}.mlp.{k}" for i in range(3) for k in ("up", "down")}


def test_auto_leaves_small_layers_and_says_so_if_none_is_left(monkeypatch):
    model, _ = converted("tensorwise")
    assert not float8_layers(model)
    [line] = float8.console_lines([model], PrecisionConfig(float8="tensorwise"))
    assert re.match(r"float8  tensorwise in 0 of 12 .*no layer would be faster", line)
    monkeypatch.setattr(float8, "is_faster", lambda shape, *_: shape.outputs == 96)
    model, _ = converted("tensorwise")
    assert float8_layers(model) == {f"blocks.{i}.attn.qkv" for i in range(3)}
    [line] = float8.console_lines([model], PrecisionConfig(float8="tensorwise"))
    assert line == "float8  tensorwise in 3 of 12 block linears of this rank"
    assert float8.console_lines([model], PrecisionConfig()) == []


def test_weights_that_do_not_divide_over_the_ranks_are_gathered_as_they_are():
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor as Gathered

    model, _ = converted("tensorwise", float8_layers="all", sizes=AxisSizes(dp_shard=64))
    gathered = {n for n, p in model.named_parameters() if isinstance(p.data, Gathered)}
    # 128 outputs divide by 64 ranks, 96 and 32 do not.
    assert gathered == {f"blocks.{i}.mlp.up.weight" for i in range(3)}
    assert len(float8_layers(model)) == 12


def test_torchs_warning_of_largest_values_is_hidden_where_scales_are_gathered(monkeypatch):
    log = logging.getLogger("torch.distributed.tensor._redistribute")
    for recipe, is_hidden in (("rowwise", False), ("tensorwise", True)):
        monkeypatch.setattr(log, "filters", [])
        converted(recipe, float8_layers="all", sizes=AxisSizes(dp_shard=2, tp=2))
        words = ("from Partial(max) to Replicate", "from Shard(0) to Replicate")
        records = [logging.makeLogRecord({"msg": message}) for message in words]
        assert [bool(log.filter(record)) for record in records] == [not is_hidden, True]


@pytest.mark.parametrize(("device_type", "device"), [("cuda", "NVIDIA H200"), ("cpu", "")])
def test_layers_are_chosen_for_the_device_they_run_on(monkeypatch, device_type, device):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(float8, "is_faster", lambda shape, recipe, name, table: asked.append(name))
    chosen = PrecisionConfig(float8="rowwise")
    float8.is_converted(LinearShape(256, 32, 96), chosen, float8.device_of(device_type))
    assert asked == [device]


class Gathers(TorchDispatchMode):
    """The dtypes of all-gathers."""

    def __init__(self):
        super().__init__()
        self.formats = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "all_gather_into_tensor" in str(func):
            # torchao's float8 tensors report their original dtype.
            self.formats.append(getattr(args[0], "_data", args[0]).dtype)
        return func(*args, **(kwargs or {}))


def gathered_formats(device_type):
    """All-gathers of a forward over two tp ranks, whose collectives only have the right shapes."""
    with fake_world(0, 2):
        mesh = Mesh(AxisSizes(tp=2), "cpu")
        model, styles = converted(
            "tensorwise", float8_layers="all", sizes=mesh.sizes, device_type=device_type
        )
        tensor.apply(model, mesh.axis("tp"), styles)
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            nn.init.constant_(local.detach(), 0.01)
        inputs = {
            "tokens": torch.randn(2, 16, 4),
            "timestep": torch.rand(2),
            "labels": torch.arange(2),
        }
        config = tiny_config().model
        with Gathers() as gathers:
            model(inputs, config.static(torch.device("cpu"))).square().sum().backward()
        assert all(p.grad is not None for p in model.parameters())
    return gathers.formats


def test_tokens_travel_in_float8_where_the_ranks_can_send_it():
    with unchecked():
        on_cuda, on_cpu = map(gathered_formats, ("cuda", "cpu"))
    assert on_cuda.count(torch.float8_e4m3fn) == 2 * 3
    assert torch.float8_e4m3fn not in on_cpu


def test_torchao_is_loaded_where_it_is_used_and_in_silence(tmp_path):
    code = (
        "import sys, titan_dit.trainer\n"
        "assert 'torchao' not in sys.modules\n"
        "from titan_dit.system.quiet_torchao import load_torchao\n"
        "load_torchao()\n"
        "assert 'torchao' in sys.modules\n"
    )
    done = subprocess.run(  # A forked process could have it already.
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def compiled_step(world, emulate):
    """Loss and gradients of a compiled step in float8."""
    precision = {"dtype": "bf16", "float8": "tensorwise", "float8_layers": "all"}
    config = tiny_config(
        model={"hidden_size": 128},
        precision=precision | {"float8_emulate": emulate},
        compile={"enabled": True},
    )
    trainer = Trainer(config, world)
    randomize(trainer.parameters)
    return gradients(trainer)


def two_steps(world, emulations, how):
    with how():
        return [compiled_step(world, emulate) for emulate in emulations]


HAS_FLOAT8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
GPU = [pytest.mark.gpu, pytest.mark.skipif(not HAS_FLOAT8, reason="needs a GPU with float8")]


@pytest.mark.parametrize(
    ("device", "emulations", "how"),
    [
        # A CPU only emulates: what is asked of a GPU runs to its end.
        pytest.param("cpu", (True, True), graphs_alone, id="cpu"),
        pytest.param("cuda", (False, True), contextlib.nullcontext, id="cuda", marks=GPU),
    ],
)
def test_real_products_are_those_of_the_emulation(device, emulations, how):
    where = {"RANKS_ON": device, "LOCAL_RANK": "0"}
    # In a rank: pytest's own process checks shapes, which cannot be compiled.
    [[step, emulated]] = on_ranks(1, two_steps, emulations, how, variables=where)
    assert step[0] == pytest.approx(emulated[0], rel=1e-2)
    assert distance(step[1], emulated[1]) < 0.05
