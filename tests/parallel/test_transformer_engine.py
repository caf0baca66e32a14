"""Our side of Transformer Engine, with a stub: importing it needs a GPU."""

import contextlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tiny import tiny_config
from torch import nn

from titan_dit.config.section import UserError
from titan_dit.parallel import transformer_engine
from titan_dit.parallel.float8 import apply
from titan_dit.parallel.mesh import AxisSizes
from titan_dit.parallel.tensor_plans.dit import plan


@pytest.fixture
def seen(monkeypatch):
    """The calls that the stub received."""
    log = {"autocast": [], "inside": 0, "calls": 0}

    class Linear(nn.Linear):
        def __init__(self, inputs, outputs, bias, params_dtype, device):
            super().__init__(inputs, outputs, bias, device, params_dtype)

        def forward(self, x):
            assert log["inside"] == 1
            log["calls"] += 1
            return super().forward(x)

    @contextlib.contextmanager
    def autocast(enabled, recipe):
        log["autocast"].append(enabled)
        log["inside"] += 1
        yield
        log["inside"] -= 1

    formats = SimpleNamespace(HYBRID="hybrid", E4M3="e4m3")
    recipe = SimpleNamespace(Format=formats, Float8CurrentScaling=dict)
    modules = {
        "transformer_engine": ModuleType("transformer_engine"),
        "transformer_engine.common": ModuleType("transformer_engine.common"),
        "transformer_engine.common.recipe": recipe,
        "transformer_engine.pytorch": SimpleNamespace(Linear=Linear, autocast=autocast),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    log["Linear"] = Linear
    return log


def test_block_linears_run_inside_one_autocast_with_the_parameters_they_had(seen):
    config = tiny_config(precision={"float8": "te_current", "float8_layers": "all"})
    model = config.model.build(1)
    before = dict(model.named_parameters())
    apply(model, plan(True), config.precision, AxisSizes(), 256, "cpu")
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    theirs = {name for name, part in model.named_modules() if isinstance(part, seen["Linear"])}
    kinds = ("attn.qkv", "attn.out", "mlp.up", "mlp.down")
    assert theirs == {f"blocks.{i}.{kind}" for i in range(3) for kind in kinds}
    inputs = {
        "tokens": torch.randn(2, *config.model.token_shape),
        "timestep": torch.rand(2),
        "labels": torch.arange(2),
    }
    model(inputs, config.model.static(torch.device("cpu")))
    assert seen["calls"] == 12
    # Once per forward: the amaxes of delayed scaling are all-reduced at its end.
    assert seen["autocast"] == [True]


def test_a_broken_installation_is_a_user_error(monkeypatch):
    def broken(name):
        raise OSError("libcublas.so.12: cannot open shared object file")

    monkeypatch.setattr(transformer_engine.importlib, "import_module", broken)
    with pytest.raises(UserError, match=r"cannot be imported \(OSError: libcublas.*float8 = "):
        transformer_engine.load("transformer_engine.pytorch", "te_current")
