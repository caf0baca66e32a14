"""Counts that are not rehearsed, against rehearsals."""

import pytest
from tiny import tiny_config
from tiny_joint import joint_config

from titan_dit.parallel.mesh import AxisSizes
from titan_dit.planner import hardware, rates
from titan_dit.planner.candidates import Candidate, Space
from titan_dit.planner.counts import Derived, Rehearsals
from titan_dit.planner.links import Network

MODEL = {"hidden_size": 256, "num_heads": 8, "latent_size": 64, "in_channels": 4}
START = Candidate(1, 1, 8, 1, 1, "ring", True, "auto", "1f1b", 1, 4, "none", "off")
DEVICE = hardware.device_of("h100")


@pytest.fixture(scope="module")
def setting():
    config = tiny_config(
        model=MODEL,
        data={"name": "latents", "path": "nowhere"},
        precision={"dtype": "bf16"},
        training={"global_batch_size": 64},
    )
    exact = Rehearsals(config).counts
    asked = []

    def counting(plan):
        asked.append(
            (plan.sizes.tp, plan.sizes.cp, plan.activation_checkpoint.mode, plan.microbatch_size)
        )
        return exact(plan)

    return Space(config, 8, DEVICE), exact, Derived(counting), asked


def took(work, cp):
    links = Network(AxisSizes(cp=cp, dp_shard=8 // cp), DEVICE)
    terms = rates.seconds(work, DEVICE, links, fused=False)
    return sum(seconds for term, seconds in terms.items() if term != "launches")


LAYOUTS = {
    "another size": ({"microbatch_size": 8}, 1e-9, 1e-9),
    "four slices of a ring": ({"cp": 4}, 0.05, 0.01),
    "four slices of ulysses": ({"cp": 4, "cp_method": "ulysses"}, 0.05, 0.01),
    "slices, computed again": ({"cp": 2, "mode": "selective"}, 0.05, 0.02),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_derived_counts_are_those_of_a_rehearsal(setting, name):
    changes, error_s, error_kept = LAYOUTS[name]
    space, exact, derived, _ = setting
    candidate = START._replace(**changes, dp_shard=8 // changes.get("cp", 1))
    plan = space.plan(candidate)
    mine, real = derived.counts(plan), exact(plan)
    for part in ("embed", "block", "head"):
        own, its = getattr(mine, part), getattr(real, part)
        assert own.kept == pytest.approx(its.kept, rel=error_kept)
        assert own.parameters == its.parameters
        for which in ("forward", "backward"):
            one, other = getattr(own, which), getattr(its, which)
            assert took(one, candidate.cp) == pytest.approx(
                took(other, candidate.cp), rel=error_s, abs=2e-6
            ), (part, which)
    sent = [
        sum(count * message.bytes for message, count in counts.block.forward.messages.items())
        for counts in (mine, real)
    ]
    assert sent[0] == pytest.approx(sent[1], rel=1e-9)


@pytest.mark.parametrize("changes", [{"cp": 4}, {"cp": 4, "mode": "full"}])
def test_a_text_that_stays_whole_is_counted_on_every_slice(changes):
    sizes = {"num_layers": 1, "latent_size": [8, 16], "text_tokens": 64}
    config = joint_config("wan", model=sizes, precision={"dtype": "bf16"})
    exact = Rehearsals(config).counts
    candidate = START._replace(**changes, dp_shard=2)
    plan = Space(config, 8, DEVICE).plan(candidate)
    mine, real = Derived(exact).counts(plan), exact(plan)
    assert mine.stream == real.stream
    for part in ("embed", "block", "head"):
        own, its = getattr(mine, part), getattr(real, part)
        assert own.kept == pytest.approx(its.kept, rel=1e-9), part
        for which in ("forward", "backward"):
            one, other = getattr(own, which), getattr(its, which)
            assert took(one, 4) == pytest.approx(took(other, 4), rel=1e-9), (part, which)


def test_few_rehearsals_give_all_sizes_and_slices(setting):
    space, _, derived, asked = setting
    for cp in (1, 2, 4):
        for size in (1, 2, 4, 8):
            candidate = START._replace(cp=cp, dp_shard=8 // cp, microbatch_size=size)
            derived.counts(space.plan(candidate))
    assert {(cp, size) for tp, cp, mode, size in asked if mode == "none"} <= {
        (1, 2), (1, 3), (2, 2), (2, 3),
    }  # fmt: skip
