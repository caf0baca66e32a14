"""A run that goes on with another [ema] decay."""

import pytest
import torch

from titan_dit.checkpoint.run_checkpoints import Checkpoints
from titan_dit.config.operation import CheckpointConfig
from titan_dit.config.training import EMAConfig
from titan_dit.optim.ema import EMA
from titan_dit.recovery import resume

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_an_average_that_a_checkpoint_lacks_begins_at_the_weights_that_it_holds(tmp_path):
    def averaged(decays, value):
        weights = {"w": torch.nn.Parameter(torch.full((3,), value))}
        return EMA(weights, EMAConfig(decays=decays)), {"model": {"w": weights["w"].detach()}}

    ema, tensors = averaged((0.9,), 2.0)
    tensors["model"]["w"].fill_(5.0)
    folder = Checkpoints(tmp_path, CheckpointConfig(async_save=False))
    record = {"step": 1, "config": {"ema": {"decays": [0.9]}}}
    path = folder.save(1, {**tensors, "ema": ema.averages}, record)
    ema, tensors = averaged((0.9, 0.99), -1.0)
    resume.load(path, record, {**tensors, "ema": ema.averages}, ema)
    assert tensors["model"]["w"].tolist() == [5.0] * 3
    # The saved average is loaded; the new one starts at the loaded weights.
    assert ema.averages["0.9"]["w"].tolist() == [2.0] * 3
    assert ema.averages["0.99"]["w"].tolist() == [5.0] * 3


def test_a_parameter_that_was_frozen_has_an_average_that_begins_at_it(tmp_path):
    def averaged(value, *frozen):
        weights = {name: torch.nn.Parameter(torch.full((3,), value)) for name in "wv"}
        for name in frozen:
            weights[name].requires_grad_(False)
        found = {name: weight.detach() for name, weight in weights.items()}
        return EMA(weights, EMAConfig(decays=(0.9,))), {"model": found}

    ema, tensors = averaged(2.0, "v")
    assert set(ema.averages["0.9"]) == {"w"}
    for weight in tensors["model"].values():
        weight.fill_(5.0)
    folder = Checkpoints(tmp_path, CheckpointConfig(async_save=False))
    record = {"step": 1, "config": {"ema": {"decays": [0.9]}}}
    path = folder.save(1, {**tensors, "ema": ema.averages}, record)
    ema, tensors = averaged(-1.0)
    whole = {**tensors, "optimizer": {}, "ema": ema.averages}
    found, _ = resume.without_missing(path, whole)
    resume.load(path, record, found, ema)
    assert ema.averages["0.9"]["w"].tolist() == [2.0] * 3
    assert ema.averages["0.9"]["v"].tolist() == [5.0] * 3
