"""Counts of [activation_checkpoint] over slices, derived, against rehearsals of them."""

import pytest
from tiny import tiny_config

from titan_dit.planner import hardware
from titan_dit.planner.candidates import Candidate, Space
from titan_dit.planner.counts import Derived, Rehearsals

START = Candidate(1, 1, 2, 4, 1, "ring", True, "auto", "1f1b", 1, 4, "none", "off")
MODES = "attention", "selective", "full"


@pytest.fixture(scope="module")
def setting():
    config = tiny_config(
        model={"hidden_size": 256, "num_heads": 8, "latent_size": 64, "in_channels": 4},
        data={"name": "latents", "path": "nowhere"},
        precision={"dtype": "bf16"},
        training={"global_batch_size": 64},
    )
    exact = Rehearsals(config).counts
    return Space(config, 8, hardware.device_of("h100")), exact, Derived(exact)


def sent(work):
    return sum(count * message.bytes for message, count in work.messages.items())


CASES = [("ring", "attention"), ("ring", "full"), ("ulysses", "selective")]
OTHERS = [(method, mode) for method in ("ring", "ulysses") for mode in MODES]
LONG = [pytest.param(*one, marks=pytest.mark.long) for one in OTHERS if one not in CASES]


@pytest.mark.parametrize(("method", "mode"), CASES + LONG)
def test_four_slices_send_and_run_again_what_the_mode_says(setting, method, mode):
    space, exact, derived = setting
    plan = space.plan(START._replace(cp_method=method, mode=mode))
    mine, real = derived.counts(plan).block, exact(plan).block
    assert sent(mine.backward) == pytest.approx(sent(real.backward), rel=1e-9)
    for one, other in ((mine.forward, real.forward), (mine.backward, real.backward)):
        assert sum(one.attention.values()) == sum(other.attention.values())
        assert one.flops == pytest.approx(other.flops, rel=2e-3)
        assert (one.operators, one.kernels) == (other.operators, other.kernels)
        assert one.moved == pytest.approx(other.moved, rel=5e-3)
        assert one.fused == pytest.approx(other.fused, rel=5e-3)
    assert mine.kept == pytest.approx(real.kept, rel=5e-3)
    assert mine.backward_peak == pytest.approx(real.backward_peak, rel=5e-3)
