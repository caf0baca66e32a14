import json
import math

import pytest
import torch
from tiny import tiny_config

from titan_dit.config import config_file
from titan_dit.config.operation import FaultsConfig
from titan_dit.data.base import Batch
from titan_dit.diffusion.sections import DDPMConfig, RectifiedFlowConfig
from titan_dit.observe.run_log import RunLog
from titan_dit.recovery import bad_steps
from titan_dit.recovery.bad_steps import Guard
from titan_dit.rng import SampleRNG
from titan_dit.system import run_files

CPU = torch.device("cpu")


def alone(loss):
    return loss.float()


def verdicts(norms, every=1, guard=None, first=1, **keys):
    """The bad steps of a run with these gradient norms, and its guard."""
    guard = guard or Guard(FaultsConfig(**keys), CPU)
    bad, on_device = [], []
    for step, norm in enumerate(norms, start=first):
        verdict = guard.check(step, 8 * (step - 1), torch.tensor(norm / 2), torch.tensor(norm))
        on_device.append(bool(verdict))
        if step % every == 0 or step == first + len(norms) - 1:
            bad += guard.read(alone).bad
    assert [step.step - first for step in bad] == [
        i for i, is_bad in enumerate(on_device) if is_bad
    ]
    return bad, guard


@pytest.mark.parametrize("every", [1, 3, 100])
def test_what_is_not_finite_is_bad_whenever_one_looks(every):
    norms = [1.0, math.nan, 2.0, math.inf, -math.inf, 3.0, math.nan]
    bad, guard = verdicts(norms, every)
    assert [(step.step, step.cursor, step.kind) for step in bad] == [
        (step, 8 * (step - 1), "nonfinite") for step in (2, 4, 5, 7)
    ]
    assert (guard.nan_steps, guard.spike_steps, guard.num_consecutive) == (4, 0, 1)
    assert guard.streak == (7, 48)
    assert math.isnan(bad[0].loss)
    assert bad[1].loss == math.inf


def test_a_row_of_bad_steps_ends_with_a_good_one():
    norms = [1.0, math.nan, math.nan, 1.0, math.nan, math.nan, math.nan]
    _, guard = verdicts(norms[:6], max_consecutive_bad_steps=3)
    assert guard.streak_end is None
    _, guard = verdicts(norms, max_consecutive_bad_steps=3)
    assert (guard.num_consecutive, guard.streak, guard.streak_end) == (3, (5, 32), (7, 48))
    assert verdicts(norms, max_consecutive_bad_steps=0)[1].streak_end is None


@pytest.mark.parametrize("looked_at", [6, 7, 9, 12])
def test_it_does_not_matter_when_a_row_that_is_too_long_is_looked_at(looked_at):
    """Otherwise the rollback would depend on the metrics interval."""
    guard = Guard(FaultsConfig(max_consecutive_bad_steps=3), CPU)
    for step in range(1, looked_at + 1):
        norm = torch.tensor(math.nan if step in (4, 5, 6, 11) else 1.0)
        guard.check(step, 8 * (step - 1), norm, norm)
    bad = guard.read(alone).bad
    assert [step.step for step in bad] == [4, 5, 6]
    assert (guard.streak, guard.streak_end, guard.num_consecutive) == ((4, 24), (6, 40), 3)


def by_hand(norms, ratio, after):
    """Reference in Python floats: the steps that are spikes."""
    average, good, spikes = 0.0, 0, []
    for i, norm in enumerate(norms):
        if good >= after and norm > ratio * average:
            spikes.append(i + 1)
            continue
        good += 1
        average += (norm - average) * max(1 / good, 0.01)
    return spikes


@pytest.mark.parametrize("every", [1, 7])
def test_spikes_are_those_above_the_running_average_of_the_good_steps(every):
    generator = torch.Generator().manual_seed(0)
    norms = (1 + torch.rand(300, generator=generator)).tolist()
    for place in (5, 60, 61, 250):
        norms[place] = 9.0
    bad, guard = verdicts(norms, every, spike_ratio=3.0, spike_after=20)
    assert [step.step for step in bad] == by_hand(norms, 3.0, 20) == [61, 62, 251]
    assert {step.kind for step in bad} == {"spike"}
    assert (guard.nan_steps, guard.spike_steps) == (0, 3)


def test_nothing_is_a_spike_unless_asked_for():
    assert verdicts([1.0] * 200 + [1e9])[0] == []


def test_nan_does_not_get_into_the_average():
    norms = [1.0] * 10 + [math.nan, 1.0, 5.0]
    bad, guard = verdicts(norms, spike_ratio=3.0, spike_after=5)
    assert [step.kind for step in bad] == ["nonfinite", "spike"]
    assert guard.average.item() == 1.0


@pytest.mark.parametrize("cut", [1, 30, 61, 70])
def test_a_guard_that_is_resumed_judges_as_if_nothing_had_been(cut):
    generator = torch.Generator().manual_seed(1)
    norms = (1 + torch.rand(90, generator=generator)).tolist()
    norms[60], norms[61], norms[80] = 7.0, math.nan, 8.0
    keys = {"spike_ratio": 2.5, "spike_after": 10}
    whole, expected = verdicts(norms, **keys)
    before, guard = verdicts(norms[:cut], **keys)
    state = json.loads(json.dumps(guard.state()))
    again = Guard(FaultsConfig(**keys), CPU)
    again.load(state)
    after, again = verdicts(norms[cut:], guard=again, first=cut + 1)
    assert repr(before + after) == repr(whole)
    assert again.state() == expected.state()


@pytest.mark.parametrize("every", [1, 7])
def test_the_smoothed_loss_is_a_running_mean_over_good_steps_and_survives_a_resume(every):
    norms = (1 + torch.rand(300, generator=torch.Generator().manual_seed(2))).tolist()
    norms[20] = norms[250] = math.nan
    _, whole = verdicts(norms, every)
    _, first = verdicts(norms[:120], every)
    resumed = Guard(FaultsConfig(), CPU)
    resumed.load(json.loads(json.dumps(first.state())))
    _, resumed = verdicts(norms[120:], every, guard=resumed, first=121)
    losses = [torch.tensor(norm / 2).item() for norm in norms if math.isfinite(norm)]
    expected = 0.0
    for number, loss in enumerate(losses, start=1):
        share = 1 / min(-(-number // 4), 50)
        expected = (1 - share) * expected + share * loss
    assert whole.smooth_loss == pytest.approx(expected, rel=1e-12)
    assert resumed.smooth_loss == whole.smooth_loss
    old = first.state()
    del old["num_losses"], old["smooth_loss"]
    resumed.load(old)
    _, resumed = verdicts([4.0], guard=resumed)
    assert resumed.smooth_loss == 2.0  # A checkpoint without it begins anew.


def test_a_checkpoint_from_before_there_was_a_guard_is_taken():
    guard = Guard(FaultsConfig(), CPU)
    guard.load({"nan_steps": 3})
    assert (guard.nan_steps, guard.spike_steps, guard.num_consecutive) == (3, 0, 0)


@pytest.mark.parametrize(
    "section", [RectifiedFlowConfig(shift=3.0), DDPMConfig()], ids=lambda o: o.name
)
def test_the_timesteps_on_record_are_those_of_training(section):
    numbers, model = torch.tensor([5, 6, 9, 2**40]), tiny_config().model
    objective = section.build(model, section.example(model)[0])
    fields = {"latent": torch.randn(4, 1, 8, 8), "label": torch.zeros(4, dtype=torch.int64)}
    batch = Batch(fields, numbers, torch.ones(4), 4.0)
    expected = objective.prepare(batch, SampleRNG(7, numbers)).inputs["timestep"].tolist()
    assert bad_steps.drawn_for(objective, 7, numbers.tolist(), CPU) == {"timestep": expected}


def test_a_fault_log_is_read_without_a_line_that_was_cut_short(tmp_path):
    assert bad_steps.read_faults(tmp_path) == []
    bad, _ = verdicts([1.0, math.nan])
    line = bad_steps.line_of_bad_step(bad[0], [3, 4, 7], [0, 1, 2], {"timestep": [0.5, 1.5, 2.5]})
    log = RunLog(tmp_path, "run", is_written=True)
    log.add(run_files.FAULTS, line)
    assert (
        bad_steps.read_faults(tmp_path) == []
    )  # A run whose directory is not open writes nothing.
    config = tiny_config()
    log.open(config_file.to_tables(config), config.metrics, 0)
    log.add(run_files.FAULTS, line)
    with (tmp_path / run_files.FAULTS).open("a") as file:
        file.write('{"step": 3, "ki')
    (found,) = bad_steps.read_faults(tmp_path)
    assert found == {
        "step": 2,
        "kind": "nonfinite",
        "grad_norm": None,
        "loss": None,
        "sample_numbers": [[3, 5], [7, 8]],
        "rows": [0, 1, 2],
        "drawn": {"timestep": [0.5, 1.5, 2.5]},
    }
