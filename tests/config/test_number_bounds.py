"""Every number of a config and of a command has bounds, by introspection."""

import math
from types import UnionType
from typing import Annotated, Union, get_args, get_origin

import pytest

from titan_dit.__main__ import COMMANDS
from titan_dit.commands import flags
from titan_dit.config import catalog, config_file
from titan_dit.config import flags as words
from titan_dit.config.section import Bound, HeightWidth, Table, UserError, conform, hints_of

MOST = {int: 2**63, float: 3e38}
"""What torch takes: int64, fp32."""


def sections():
    """Every section and every command's options, by name."""
    for section, names in catalog.SECTIONS.items():
        for name in names:
            yield f"[{section}] of {name}", catalog.variant(section, name)
    yield from config_file.plain_sections().items()
    for command in COMMANDS.keys() - {"train"}:
        yield command, flags.of_command(command)


def numbers(hint, bounds=()):
    """(kind, bounds, a type of the number alone) of every number in a type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        yield from numbers(args[0], (*bounds, *args[1:]))
    elif origin in (Union, UnionType, tuple):
        for part in args:
            yield from numbers(part, bounds)
    elif isinstance(hint, type) and issubclass(hint, Table):
        for part in hints_of(hint).values():
            yield from numbers(part)
    elif hint in MOST:
        yield hint, [bound for bound in bounds if isinstance(bound, Bound)]


FOUND = [
    (f"{where} {key}", kind, bounds)
    for where, section in sections()
    for key, hint in hints_of(section).items()
    for kind, bounds in numbers(hint)
]


def test_the_numbers_of_all_sections_and_commands_are_found():
    names = {name for name, _, _ in FOUND}
    assert len(names) > 200
    assert {"training global_batch_size", "[model] of dit num_layers", "sample num"} <= names


@pytest.mark.parametrize("kind", MOST)
def test_every_number_has_a_least_and_a_largest_value(kind):
    for name, _, bounds in (found for found in FOUND if found[1] is kind):
        above = [b.most if b.most is not None else b.below for b in bounds]
        under = [b.least if b.least is not None else b.above for b in bounds]
        assert any(limit is not None and limit <= MOST[kind] for limit in above), name
        assert any(limit is not None and limit >= -MOST[kind] for limit in under), name


HUGE = {"1e400": 10**400, "-1e400": -(10**400), "1e300": 1e300, "inf": math.inf, "nan": math.nan}


@pytest.mark.parametrize("value", HUGE.values(), ids=HUGE)
def test_a_huge_value_is_refused_in_one_line(value):
    for name, kind, bounds in FOUND:
        hint = kind
        for bound in bounds:
            hint = Annotated[hint, bound]
        with pytest.raises(UserError) as error:
            conform(value, hint, name)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("training.global_batch_size", "1e30"),
        ("model.hidden_size", "1e12"),
        ("model.num_layers", "1e9"),
        ("sampling.num", "1e15"),
        ("data.num_workers", "100000"),
        ("training.steps", "9" * 5000),
        ("training.steps", "[" * 5000),
    ],
    ids=lambda text: text[:30],
)
def test_numbers_that_were_tried_name_their_key(flag, value):
    section, key = flag.split(".")
    with pytest.raises(UserError, match=rf"\[{section}\] {key}"):
        config_file.load(["--config", "digits", f"--{flag}", value], catalog.variant)


def test_a_literal_that_python_cannot_parse_is_text():
    assert words.literal("9" * 5000) == "9" * 5000
    assert words.literal("[" * 100_000) == "[" * 100_000


@pytest.mark.parametrize("given", [8, [8], (8,), [8, 8]])
def test_one_number_is_the_height_and_the_width_of_a_square(given):
    assert conform(given, HeightWidth, "[model] latent_size") == (8, 8)


@pytest.mark.parametrize("given", [[], [1, 2, 3], "8", True, 8.5, [0, 8]])
def test_what_is_no_height_and_width_is_refused(given):
    with pytest.raises(UserError, match=r"\[model\] latent_size"):
        conform(given, HeightWidth, "[model] latent_size")
