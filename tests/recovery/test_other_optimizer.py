"""A checkpoint of one optimizer, loaded by another."""

import pytest
import torch
from torch import nn

from titan_dit.checkpoint import checkpoint
from titan_dit.checkpoint.store import location
from titan_dit.config import config_file
from titan_dit.models.dit_config import DiTConfig
from titan_dit.optim.optimizer import apply_gradients, build_optimizer, optimizer_tensors
from titan_dit.optim.sections import AdamWConfig, MuonConfig
from titan_dit.recovery import resume

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SPEC = DiTConfig(size="S/2", latent_size=32, in_channels=4, num_classes=10).spec()
SHAPES = {"blocks.0.mlp.weight": (4, 3), "head.weight": (2, 3)}


def trained(config):
    """Tensors of a checkpoint after one step."""
    parameters = {name: nn.Parameter(torch.ones(shape)) for name, shape in SHAPES.items()}
    optimizer = build_optimizer(parameters, config, SPEC)
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, 2.0)
    apply_gradients(optimizer, 0.1, torch.tensor(False))
    model = {name: p.detach() for name, p in parameters.items()}
    return {"model": model, "optimizer": optimizer_tensors(optimizer, parameters)}


def test_what_both_optimizers_have_is_kept_and_the_rest_is_named(tmp_path):
    path = location(tmp_path / "step-00000001")
    checkpoint.write(path, trained(AdamWConfig()), {"step": 1})
    ours = trained(MuonConfig())
    momentum = ours["optimizer"]["blocks.0.mlp.weight"]["momentum_buffer"]
    assert momentum.abs().max() > 0
    tensors, lines = resume.without_missing(path, {**ours, "ema": {}})
    assert not momentum.any()  # A rollback must not keep it.
    assert {name: set(state) for name, state in tensors["optimizer"].items()} == {
        "head.weight": {"step", "exp_avg", "exp_avg_sq"}
    }
    assert lines == [f"{path} has no momentum_buffer of some parameters: zero there"]
    checkpoint.load(path, tensors)
    same, lines = resume.without_missing(path, {**trained(AdamWConfig()), "ema": {}})
    assert lines == []
    assert len(same["optimizer"]) == 2


def test_what_another_rank_lacks_is_named_too(tmp_path, monkeypatch):
    """The last stage of a pipeline may be alone with what was frozen."""
    path = location(tmp_path / "step-00000001")
    checkpoint.write(path, trained(AdamWConfig()), {"step": 1})
    others = iter(({"exp_avg"}, {"objective.1.weight"}))
    monkeypatch.setattr(resume.Ranks, "gather", lambda _, mine: [mine, next(others)])
    _, lines = resume.without_missing(path, {**trained(AdamWConfig()), "ema": {}})
    assert lines == [
        f"{path} has no exp_avg of some parameters: zero there",
        f"{path} has no objective.1.weight: as in this run before loading",
    ]


def test_another_optimizer_is_one_line_of_the_changes():
    adamw = {"optimizer": {"name": "adamw", "lr": 1.0, "betas": [0.9, 0.99]}}
    muon = {"optimizer": {"name": "muon", "lr": 2.0, "betas": [0.9, 0.99], "ns_steps": 5}}
    assert list(config_file.changes(adamw, muon)) == [
        "[optimizer] lr: 1.0 -> 2.0",
        '[optimizer] name: "adamw" -> "muon"',
    ]
