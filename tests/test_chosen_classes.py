"""The classes of `sample --labels`, by number and by name."""

import pytest

from titan_dit.commands.sample_inputs import chosen_classes
from titan_dit.config.section import UserError

NAMES = ["tench, Tinca tinca", "Dog", "cat", "2", "dog", "tench"]


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("0,2", [0, 2]),
        ("cat", [2]),
        ("CAT, 1 ,dog,Dog", [2, 1, 4, 1]),
        ("tench, Tinca tinca,cat", [0, 2]),
        ("cat,tench", [2, 5]),
        ("cat, ", [2]),
        ("2", [2]),  # A number, although a class has this name.
    ],
)
def test_classes_are_chosen_by_number_and_by_name(text, labels):
    assert chosen_classes(text, len(NAMES), NAMES) == labels


@pytest.mark.parametrize(
    ("text", "names", "words"),
    [
        ("cta", NAMES, 'no class is named "cta". Did you mean cat?'),
        ("cat,zzzzz", NAMES[:3], "Valid: tench, Tinca tinca, Dog, cat."),
        ("zzzzz", [f"class {i}" for i in range(1000)], "and 991 more."),
        ("three", [], "numbers such as 0,1,2; the run's dataset has no class names"),
        ("DOG", NAMES, 'no class is named "DOG". Did you mean dog?'),
        ("", NAMES, 'no class is named ""'),
        ("6", NAMES, "--labels 6: the run has the classes 0 to 5"),
        ("cat,,dog", NAMES, 'no class is named ""'),
        ("-1", NAMES, "the classes 0 to 5; unconditional samples: --labels none."),
    ],
)
def test_what_is_no_class_is_an_error_that_names_one(text, names, words):
    with pytest.raises(UserError) as error:
        chosen_classes(text, 6, names)
    assert words in str(error.value)
