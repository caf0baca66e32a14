import dataclasses
import math
import subprocess
import sys
from dataclasses import dataclass
from typing import Literal

import pytest

from titan_dit.config.job import JobSection
from titan_dit.config.layout import ParallelConfig
from titan_dit.config.operation import CheckpointConfig, FaultsConfig
from titan_dit.config.section import (
    Decay,
    Finite,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    UserError,
    hints_of,
    show,
)
from titan_dit.config.training import EMAConfig, TrainingConfig
from titan_dit.optim.sections import AdamWConfig


@dataclass(frozen=True, kw_only=True)
class Everything(Section):
    section = "everything"

    count: PositiveInt = 1
    whole: NonNegativeInt = 0
    positive: PositiveFloat = 1.0
    non_negative: NonNegativeFloat = 0.0
    finite: Finite = 0.0
    fraction: Fraction = 0.5
    decay: Decay = 0.5
    flag: bool = False
    text: str = ""
    maybe: PositiveInt | None = None
    choice: Literal["a", "b"] = "a"
    numbers: tuple[Decay, ...] = ()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("count", True, "count=true must be a whole number"),
        ("count", "4", 'count="4" must be a whole number'),
        ("count", 4.0, "count=4.0 must be a whole number"),
        ("count", [4], "count=[4] must be a whole number"),
        ("count", None, "must be a whole number"),
        ("positive", "1e-3", 'positive="1e-3" must be a number'),
        ("positive", True, "positive=true must be a number"),
        ("flag", 1, "flag=1 must be true or false"),
        ("flag", "true", 'flag="true" must be true or false'),
        ("text", 7, "text=7 must be text in quotes"),
        ("text", True, "text=true must be text in quotes"),
        ("maybe", "4", 'maybe="4" must be a whole number'),
        ("maybe", 0, "maybe=0 must be at least 1"),
        ("choice", "c", 'choice="c" is not one of "a", "b"'),
        ("choice", 1, 'choice=1 is not one of "a", "b"'),
        ("choice", ["a"], "choice="),
        ("numbers", 0.5, "numbers=0.5 must be a list"),
        ("numbers", "0.5", 'numbers="0.5" must be a list'),
        ("numbers", [0.5, "x"], 'numbers[1]="x" must be a number'),
        ("numbers", [0.5, 0.1, 1], "numbers[2]=1.0 must be below 1"),
        ("count", 0, "count=0 must be at least 1"),
        ("count", -3, "count=-3 must be at least 1"),
        ("whole", -1, "whole=-1 must be at least 0"),
        ("positive", 0, "positive=0.0 must be above 0"),
        ("positive", -1e-9, "positive=-1e-09 must be above 0"),
        ("positive", math.inf, "positive=inf must be at most 1e+30"),
        ("positive", math.nan, "positive=nan must be"),
        ("non_negative", -0.1, "non_negative=-0.1 must be at least 0"),
        ("non_negative", math.inf, "non_negative=inf must be at most 1e+30"),
        ("finite", -math.inf, "finite=-inf must be at least -1e+30"),
        ("finite", math.nan, "finite=nan must be"),
        ("fraction", 1.1, "fraction=1.1 must be at most 1"),
        ("fraction", -0.1, "fraction=-0.1 must be at least 0"),
        ("fraction", math.nan, "fraction=nan must be"),
        ("decay", 1, "decay=1.0 must be below 1"),
        ("decay", math.nan, "decay=nan must be"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_section_key_and_value(key, value, words):
    with pytest.raises(UserError) as caught:
        Everything(**{key: value})
    assert str(caught.value).startswith(f"[everything] {key}")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "kept"),
    [
        ("positive", 3, 3.0),
        ("fraction", 0, 0.0),
        ("fraction", 1, 1.0),
        ("decay", 0, 0.0),
        ("finite", -7, -7.0),
        ("count", 10**12, 10**12),
        ("maybe", None, None),
        ("maybe", 3, 3),
        ("choice", "b", "b"),
        ("numbers", [0.5, 0], (0.5, 0.0)),
        ("numbers", [], ()),
        ("flag", True, True),
        ("text", "true", "true"),
    ],
)
def test_a_value_that_fits_is_kept_or_converted(key, value, kept):
    got = getattr(Everything(**{key: value}), key)
    assert got == kept
    assert type(got) is type(kept)


def test_a_section_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Everything().count = 2


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        (AdamWConfig, {"betas": [0.9]}, "[optimizer] betas=[0.9] must hold two numbers"),
        (AdamWConfig, {"betas": [0.9, 0.9, 0.9]}, "must hold two numbers"),
        (AdamWConfig, {"betas": [0.9, 1.0]}, "[optimizer] betas[1]=1.0 must be below 1"),
        (AdamWConfig, {"lr": 0}, "[optimizer] lr=0.0 must be above 0"),
        (EMAConfig, {"decays": [0.9, 0.99, 0.9]}, "[ema] decays=[0.9, 0.99, 0.9] has duplicates"),
        (EMAConfig, {"every": 0}, "[ema] every=0 must be at least 1"),
        (JobSection, {"seed": -1}, "[job] seed=-1 must be at least 0"),
        (JobSection, {"seed": 2**63}, "[job] seed=9223372036854775808 must be below"),
        (ParallelConfig, {"dp_shard": -2}, "[parallel] dp_shard=-2 must be at least -1"),
        (ParallelConfig, {"tp": 0}, "[parallel] tp=0 must be at least 1"),
        (FaultsConfig, {"max_consecutive_bad_steps": -1}, "[faults] max_consecutive_bad_steps=-1"),
        (CheckpointConfig, {"every": -5}, "[checkpoint] every=-5 must be at least 0"),
        (
            TrainingConfig,
            {"steps": 1, "global_batch_size": 4, "microbatch_size": 0},
            "[training] microbatch_size=0 must be at least 1",
        ),
    ],
)
def test_the_sections_refuse_what_makes_no_sense(section, values, words):
    with pytest.raises(UserError) as caught:
        section(**values)
    assert words in str(caught.value)


def test_bounds_survive_the_resolving_of_annotations():
    # get_type_hints drops them unless asked not to; then nothing would be checked any more.
    hint = hints_of(TrainingConfig)["max_grad_norm"]
    assert hint.__metadata__[0].least == 0
    assert set(hints_of(TrainingConfig)) == {f.name for f in dataclasses.fields(TrainingConfig)}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (3, "3"),
        (1e-8, "1e-08"),
        ('a "b"\\c\n', '"a \\"b\\"\\\\c\\n"'),
        ([0.9, 0.99], "[0.9, 0.99]"),
        (("a", False), '["a", false]'),
    ],
)
def test_values_are_shown_as_toml_writes_them(value, text):
    assert show(value) == text


def test_the_config_is_read_without_torch():
    code = (
        "import sys\n"
        "from titan_dit.config import catalog, config_file, job\n"
        "from titan_dit.ranks import failure\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
