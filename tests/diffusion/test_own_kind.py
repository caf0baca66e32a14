"""A kind of diffusion of a user's own, as docs/adding/objective.md shows it."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from points import batch_of, built, tokens_of

from titan_dit.config.section import UserError
from titan_dit.diffusion.drawing import generate
from titan_dit.diffusion.objective import Diffusion
from titan_dit.diffusion.rectified_flow import RectifiedFlow
from titan_dit.diffusion.samplers.ode import euler
from titan_dit.diffusion.sections import DiffusionConfig, RectifiedFlowConfig
from titan_dit.objectives.base import at_least_fp32
from titan_dit.rng import SampleRNG

PAGE = Path(__file__).parents[2] / "docs" / "adding" / "objective.md"
GIVEN = {
    "dataclass": dataclass,
    "replace": replace,
    "at_least_fp32": at_least_fp32,
    "RectifiedFlow": RectifiedFlow,
    "RectifiedFlowConfig": RectifiedFlowConfig,
}


def test_the_example_of_the_docs_draws_the_data_with_a_perfect_network():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(code, found := {"__name__": "own", **GIVEN})
    objective, numbers = built(found["CleanFlowConfig"]()), torch.arange(3)
    prepared = objective.prepare(batch_of(numbers), SampleRNG(0, numbers))
    data = tokens_of(numbers)
    assert objective.loss({"prediction": data}, prepared.targets).abs().max() == 0
    given = {"labels": numbers}
    drawn = generate(
        lambda inputs, static: data, objective, given, numbers, seed=0, sampler=euler, steps=4
    )
    torch.testing.assert_close(drawn, data, rtol=0, atol=1e-5)


def test_a_kind_without_a_member_is_refused_by_its_name():
    @dataclass(frozen=True)
    class Half(Diffusion):
        def timesteps_of(self, rng):
            return rng.uniform("t")

    class HalfConfig(DiffusionConfig):
        def build(self, model, facts):
            return Half.of(self, model, facts)

    with pytest.raises(UserError, match=r"Half .* has no corrupt, last_timestep, loss, process"):
        built(HalfConfig())


def test_a_kind_may_take_fields_of_its_own():
    class Masked(RectifiedFlow):
        takes = ("latent", "label", "mask")

    class MaskedConfig(RectifiedFlowConfig):
        def build(self, model, facts):
            return Masked.of(self, model, facts)

    assert built(MaskedConfig()).takes == ("latent", "label", "mask")
    assert built(RectifiedFlowConfig()).takes == ("latent", "label")
