"""A sampler of a user's own, as docs/adding/sampler.md shows it, and settings of samplers."""

import itertools
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from jaxtyping import Float
from points import batch_of, built
from torch import Tensor

from titan_dit.commands.flags import EvaluateFlags, PictureFlags
from titan_dit.commands.sample_pictures import progressed
from titan_dit.config.section import UserError
from titan_dit.config.training import SamplingConfig
from titan_dit.diffusion import drawing
from titan_dit.diffusion.samplers import base
from titan_dit.diffusion.samplers.base import CHOSEN, Settings, chosen, evaluates, planned
from titan_dit.diffusion.samplers.ode import Velocity, euler, heun, times
from titan_dit.diffusion.sections import RectifiedFlowConfig
from titan_dit.objectives.base import DataShare

PAGE = Path(__file__).parents[2] / "docs" / "adding" / "sampler.md"
GIVEN = {
    "itertools": itertools,
    "evaluates": evaluates,
    "times": times,
    "Float": Float,
    "Settings": Settings,
    "Tensor": Tensor,
    "Velocity": Velocity,
}


def midpoint():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(code, found := {"__name__": "own", **GIVEN})
    return found["midpoint"]


def test_the_example_of_the_docs_is_of_second_order_and_leaves_the_noise_alone():
    noise = torch.linspace(0.2, 1.5, 12, dtype=torch.float64).view(2, 3, 2)
    kept, exact = noise.clone(), 1 / (1 / noise + 0.5)
    # dx/dt = t x^2.
    coarse, fine = [
        (midpoint()(lambda x, t: t[:, None, None] * x**2, noise, Settings(steps)) - exact)
        for steps in (80, 160)
    ]
    assert coarse.abs().max() / fine.abs().max() == pytest.approx(4, rel=0.08)
    assert torch.equal(noise, kept)


def second(process, noise, settings):
    return noise


@pytest.mark.parametrize(
    ("sampler", "calls"), [(euler, 1), (heun, 2), (midpoint(), 2), (second, 1)]
)
def test_progress_counts_as_many_calls_in_a_step_as_the_sampler_makes(sampler, calls):
    asked, shown = [], []
    if sampler is not second:
        sampler(lambda x, t: asked.append(t) or x, torch.ones(1, 1, 1), Settings(5))
        assert len(asked) == 5 * calls
    job = SimpleNamespace(flags=SimpleNamespace(steps=5), sampler=sampler)
    for call in range(1, 5 * calls + 1):
        progressed(shown.append, 100, 50, job, call)
    assert shown == [100 + 50 * call // (5 * calls) for call in range(1, 5 * calls + 1)]


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "2", None])
def test_a_sampler_that_calls_the_network_no_whole_number_of_times_is_refused(number, monkeypatch):
    own = SimpleNamespace(evaluations=number)
    monkeypatch.setattr(drawing, "look_up", lambda *_: own)
    with pytest.raises(UserError, match=r"--sampler=.*evaluations=.* whole number above 0"):
        drawing.sampler_of(RectifiedFlowConfig(), "own:sampler", "--sampler")


def test_a_plan_leaves_out_new_settings_at_their_default(monkeypatch):
    # `shift` stands for a setting that is newer than `eta`.
    monkeypatch.setattr(base, "CHOSEN", ("eta", "shift"))
    assert planned(Settings(5)) == {"eta": 0.0}
    assert planned(Settings(5, eta=0.5, shift=3.0)) == {"eta": 0.5, "shift": 3.0}


def test_every_chosen_setting_is_a_field_a_key_and_a_flag_with_one_default():
    for name in CHOSEN:
        kinds = (Settings, SamplingConfig, PictureFlags, EvaluateFlags)
        defaults = [field.default for kind in kinds for field in fields(kind) if field.name == name]
        assert len(defaults) == len(kinds)
        assert len(set(defaults)) == 1


def test_previews_pass_on_every_chosen_setting(monkeypatch):
    given = []

    def sampler(process, noise, settings):
        given.append(settings)
        return noise

    monkeypatch.setattr(drawing, "sampler_of", lambda *_: sampler)
    objective, numbers = built(RectifiedFlowConfig()), torch.arange(3)
    sampling = SamplingConfig(every=1, steps=4, eta=0.25)
    labels = {"labels": batch_of(numbers).fields["label"]}
    share = DataShare(torch.device("cpu"))
    drawing.samples(
        lambda inputs, static: inputs["tokens"], objective, sampling, 0, labels, numbers, share
    )
    assert chosen(given[0]) == chosen(sampling) == {"eta": 0.25}
