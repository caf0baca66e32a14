"""Every number of derived counts against a rehearsal: peaks, tp with cp, float8, another model."""

from dataclasses import fields

import pytest
from tiny import tiny_config

from titan_dit.config import catalog, config_file
from titan_dit.planner.candidates import Candidate, Space
from titan_dit.planner.counts import Derived, Rehearsals
from titan_dit.planner.hardware import device_of
from titan_dit.planner.work import Work

START = Candidate(1, 1, 8, 1, 1, "ring", True, "auto", "1f1b", 1, 4, "none", "off")
DEVICE = device_of("h100")
PARTS = ("embed", "block", "head")
NEAR = 0.01
"""Of a number, relative to the largest of the three parts."""
TOKENS = {"sequence_length": 1024, "vocab_size": 512}
GPT = {
    "model": {"name": "gpt", "hidden_size": 256, "num_heads": 8, "num_layers": 2, **TOKENS},
    "objective": {"name": "next_token"},
    "data": {"name": "tokens", "paths": ["nowhere"], **TOKENS},
    "training": {"steps": 1, "global_batch_size": 64},
    "precision": {"dtype": "bf16"},
}
WORDS = {"sequence_length": 512, "vocab_size": 30522}
"""Sixteen samples have more logits than a device scores at a time, three have fewer."""
WIDE = GPT | {"model": GPT["model"] | WORDS, "data": GPT["data"] | WORDS}
WIDE |= {"training": {"steps": 1, "global_batch_size": 128}}
DIT = {
    "model": {"hidden_size": 256, "num_heads": 8, "latent_size": 64, "in_channels": 4},
    "data": {"name": "latents", "path": "nowhere"},
    "precision": {"dtype": "bf16"},
    "training": {"global_batch_size": 64},
}
ODD = DIT | {"model": DIT["model"] | {"latent_size": 28}}
"""196 tokens: float8 takes four samples, not two."""
TEXT = {"gpt": GPT, "wide": WIDE}


@pytest.fixture(scope="module")
def settings():
    """By model: its layouts, its rehearsals, and what is derived from them."""
    configs = {name: config_file.build(own, catalog.variant) for name, own in TEXT.items()}
    configs |= {"dit": tiny_config(**DIT), "odd": tiny_config(**ODD)}
    exact = {name: Rehearsals(config).counts for name, config in configs.items()}
    spaces = {name: Space(config, 8, DEVICE) for name, config in configs.items()}
    return {name: (spaces[name], own, Derived(own)) for name, own in exact.items()}


def numbers_of(counts):
    """(part, name) -> every number of the counts; messages are added up by axis and operation."""
    found = {("", f): getattr(counts, f) for f in ("inputs", "static", "stream", "tied")}
    for name in PARTS:
        part = getattr(counts, name)
        for f in fields(part):
            value = getattr(part, f.name)
            if isinstance(value, Work):
                found |= {(name, f"{f.name} {key}"): n for key, n in work_numbers(value).items()}
            elif f.name not in ("allocated", "storages"):  # The peaks are the highest of them.
                found[name, f.name] = value
        found[name, "small"] = part.small
    return found


def work_numbers(work):
    found = {key: getattr(work, key) for key in ("flops", "moved", "fused", "operators", "kernels")}
    found["attention calls"] = sum(work.attention.values())
    for message, count in work.messages.items():
        for what, value in (("bytes", message.bytes * count), ("calls", count)):
            key = f"{message.axis} {message.operation} {what}"
            found[key] = found.get(key, 0) + value
    return found


def differences(settings, model, **changes):
    """Numbers that are off: (part, name) -> (derived, rehearsed)."""
    space, exact, derived = settings[model]
    shards = 8 // changes.get("cp", 1) // changes.get("tp", 1)
    plan = space.plan(START._replace(**changes, dp_shard=shards))
    mine, real = numbers_of(derived.counts(plan)), numbers_of(exact(plan))
    found = {}
    for key in mine | real:
        one, other = mine.get(key, 0.0), real.get(key, 0.0)
        parts = (abs(real.get((part, key[1]), 0.0)) for part in PARTS)
        if abs(one - other) > NEAR * max(*parts, abs(other) if not key[0] else 0.0):
            found[key] = one, other
    return found


@pytest.mark.parametrize(("model", "size"), [("gpt", 8), ("wide", 16)])
def test_all_numbers_of_another_size_are_those_of_a_rehearsal(settings, model, size):
    assert differences(settings, model, microbatch_size=size) == {}


ULYSSES = {"cp": 2, "cp_method": "ulysses"}
FLOAT8 = {"float8": "tensorwise"}
RIGHT = {
    "gpt, tp and a ring": ("gpt", {"tp": 2, "cp": 2}),
    "tp and a ring": ("dit", {"tp": 2, "cp": 2}),
    "tp and ulysses": ("dit", {"tp": 2, **ULYSSES}),
    "tp, another size": ("dit", {"tp": 2, "microbatch_size": 8}),
    "float8, an odd number of tokens": ("odd", {**FLOAT8, "microbatch_size": 8}),
    "float8, a head in chunks": ("wide", {**FLOAT8, "microbatch_size": 4}),
    "gpt in float8": ("gpt", {**FLOAT8, "microbatch_size": 8}),
    "float8 with tp": ("dit", {**FLOAT8, "tp": 2, "microbatch_size": 6}),
    "gpt, a ring, computed again": ("gpt", {"cp": 2, "mode": "full"}),
    "a ring, attention again": ("dit", {"cp": 2, "mode": "attention"}),
    "tp and a ring, partly again": ("gpt", {"tp": 2, "cp": 2, "mode": "selective"}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", RIGHT)
def test_all_numbers_of_a_layout_are_those_of_a_rehearsal(settings, name):
    model, changes = RIGHT[name]
    assert differences(settings, model, **changes) == {}


EMBED = {"moved", "fused", "forward_peak"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "size", "others"),
    [("dit", 4, EMBED), ("gpt", 4, EMBED | {"static"}), ("wide", 64, EMBED | {"static"})],
)
def test_four_slices_differ_from_two_in_what_embed_does_with_its_tables(
    settings, model, size, others
):
    # Positions are sliced, a table of tokens is not: derived, both are as long as of two slices.
    # The positions of a GPT, which take bytes, are derived as those of a DiT: kept whole, too.
    off = differences(settings, model, cp=4, microbatch_size=size)
    assert {name.split()[-1] for _, name in off} <= others
    assert {part for part, _ in off} <= {"embed", ""}
