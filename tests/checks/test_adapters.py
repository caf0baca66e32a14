"""Checks of [lora]."""

import re

import pytest
from tiny import tiny_config
from tiny_gpt import gpt_config

from titan_dit.checks.parts import check_lora, check_optimizer, num_trained, optimizer_lines
from titan_dit.config.section import UserError
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.plan import resolve

INIT = {"init": "outputs/base"}


def checked(checkpoint=INIT, resuming=False, made=tiny_config, **sections):
    config = made(checkpoint=checkpoint, **sections)
    plan = resolve(config, 1, resuming)
    check_lora(config, plan)
    return config, plan


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"lora": {"rank": 4}, "checkpoint": {}}, "[lora] rank=4 adapts trained weights"),
        ({"lora": {"alpha": 4.0}}, "[lora] rank=0 trains without adapters"),
        ({"lora": {"rank": 4, "targets": ["blocks.*.nose"]}}, 'targets: "blocks.*.nose" matches'),
        ({"lora": {"rank": 4, "trained": ["embed.nose"]}}, 'trained: "embed.nose" matches none'),
        (
            {"lora": {"rank": 4}, "precision": {"float8": "rowwise"}},
            'with [precision] float8="rowwise"',
        ),
        ({"lora": {"rank": 4, "targets": []}}, "[lora] targets=[] adapts nothing"),
        ({"lora": {"base": "int8"}}, '[lora] base="int8" holds frozen weights, but rank=0'),
        ({"lora": {"rank": 4, "base": "int4"}}, "[lora] base"),
        (
            {"lora": {"rank": 4, "base": "nf4", "trained": ["blocks.*.out.weight"]}},
            '[lora] trained names blocks.0.attn.out.weight, which base="nf4" quantises',
        ),
        (
            {"lora": {"rank": 4, "targets": ["head.*"]}, "made": gpt_config},
            "[lora] targets: head.out shares its weight with embed.token.weight",
        ),
        (
            {
                "lora": {"rank": 4, "trained": ["embed.*"]},
                "training": {"frozen": ["embed.label.*"]},
            },
            "[lora] trained: embed.label.table.weight would be frozen",
        ),
    ],
)
def test_what_cannot_be_adapted_is_one_line(sections, message):
    with pytest.raises(UserError, match=re.escape(message)):
        checked(**sections)


def test_a_started_run_needs_no_init():
    checked(checkpoint={}, resuming=True, lora={"rank": 4})
    checked(checkpoint={"resume": "outputs/other"}, lora={"rank": 4})


def test_adapters_and_named_parameters_are_trained_and_counted():
    lora = {"rank": 4, "targets": ["blocks.*.attn.out"], "trained": ["embed.label.*"]}
    config, plan = checked(lora=lora)
    facts = LatentFacts(shape=(1, 8, 8), count=9, num_classes=10)
    objective = config.objective.build(config.model, facts)
    check_optimizer(plan, objective, config.optimizer)
    # 3 layers of 32 x 32, and a table of 11 rows.
    trained = 3 * 4 * (32 + 32) + 11 * 32
    lines = list(optimizer_lines(plan, objective, config.optimizer))
    assert f"lora    rank 4, scale 1: 3 layers, {trained:,} trained parameters" in lines
    assert num_trained(plan, objective, config.optimizer) == trained
    names = ["blocks.0.attn.out.lora_A", "blocks.0.attn.out.weight", "embed.label.table.weight"]
    assert plan.trained(names, ()) == {names[0], names[2]}


def test_every_pipeline_rank_needs_an_adapter():
    lora = {"rank": 4, "targets": ["blocks.0.*"]}
    config = tiny_config(checkpoint=INIT, lora=lora, parallel={"pp": 2})
    plan = resolve(config, 2)
    facts = LatentFacts(shape=(1, 8, 8), count=9, num_classes=10)
    objective = config.objective.build(config.model, facts)
    with pytest.raises(UserError, match=r"\[lora\] targets: pipeline rank 1 would have frozen"):
        check_optimizer(plan, objective, config.optimizer)
