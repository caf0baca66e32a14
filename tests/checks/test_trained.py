"""What the optimizer cannot train is refused before anything is built."""

from dataclasses import dataclass

import pytest
from tiny import tiny_config

from titan_dit.checks.parts import check_optimizer, optimizer_lines
from titan_dit.config.section import UserError
from titan_dit.optim.sections import AdamWConfig
from titan_dit.plan import resolve


@dataclass(frozen=True, kw_only=True)
class Whole(AdamWConfig):
    """Needs whole tensors."""

    whole_tensors = True


def parts(world=1, **sections):
    config = tiny_config(**sections)
    facts, _ = config.objective.example(config.model)
    return resolve(config, world), config.objective.build(config.model, facts), config.optimizer


def frozen(*patterns):
    return {"groups": [{"pattern": pattern, "frozen": True} for pattern in patterns]}


WHERE = "[training] frozen or [optimizer] groups"


@pytest.mark.parametrize(
    ("world", "sections", "message"),
    [
        (1, {"optimizer": frozen("*")}, f"{WHERE}: every parameter is frozen"),
        (1, {"training": {"frozen": ["nose.*"]}}, f'{WHERE}: the pattern "nose.*" matches none'),
        (
            3,
            {"optimizer": frozen("embed.*", "blocks.0.*"), "parallel": {"pp": 3}},
            f"{WHERE}: pipeline rank 0 would have frozen parameters only",
        ),
        (
            1,
            {"optimizer": {"name": "muon", "matrices": ["*.bias"]}},
            "matches no parameter with two dims",
        ),
        (1, {"optimizer": {"name": "muon", "fused_qkv": ["*.up.weight"]}}, "are not [heads, 3, 8]"),
    ],
)
def test_what_cannot_be_trained_is_one_line(world, sections, message):
    with pytest.raises(UserError) as caught:
        check_optimizer(*parts(world, **sections))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_optimizer_of_whole_tensors_takes_replicas_only():
    plan, objective, _ = parts(4, parallel={"dp_replicate": 4, "dp_shard": 1})
    check_optimizer(plan, objective, Whole())
    plan, objective, _ = parts(4, parallel={"dp_shard": 2, "tp": 2})
    with pytest.raises(UserError, match="dp_shard 2 x tp 2 splits each over 4 ranks"):
        check_optimizer(plan, objective, Whole())


def test_the_first_lines_say_what_a_group_has():
    plan, objective, config = parts(optimizer=frozen("embed.*"))
    check_optimizer(plan, objective, config)
    (line,) = optimizer_lines(plan, objective, config)
    assert line.startswith("group   embed.*: 7 tensors, ")
    assert line.endswith(" parameters, frozen")
