"""The classes of --labels, by number or by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from titan_dit.config.did_you_mean import nearest
from titan_dit.config.section import UserError


def chosen_classes(text: str, num_classes: int, names: Sequence[str]) -> list[int]:
    """Labels of a list such as "3,dog"; a number is always a label.

    A name may hold commas itself ("tench, Tinca tinca"): the longest name that fits is taken. Case
    does not matter unless two names differ in nothing else.
    """
    words, found = text.strip(" ,").split(","), list[int]()
    exactly = {name: label for label, name in enumerate(names)}
    times = Counter(name.casefold() for name in names)
    folded = {n.casefold(): label for n, label in exactly.items() if times[n.casefold()] == 1}
    while words:
        for count in range(len(words), 0, -1):
            word = ",".join(words[:count]).strip()
            label = exactly.get(word, folded.get(word.casefold()))
            if count == 1 and word.removeprefix("-").isdecimal():
                label = int(word)
            if label is not None:
                break
        else:
            raise unknown(text, word, names)
        if not 0 <= label < num_classes:
            raise UserError(
                f"--labels {label}: the run has the classes 0 to {num_classes - 1}; "
                "unconditional samples: --labels none."
            )
        found.append(label)
        words = words[count:]
    return found


def unknown(text: str, word: str, names: Sequence[str]) -> UserError:
    """The error for a word that is no class."""
    if not names:
        return UserError(
            f'--labels {text}: give "all", "none" or numbers such as 0,1,2; the run\'s dataset has '
            "no class names."
        )
    few = names if len(names) <= 10 else [*names[:9], f"and {len(names) - 9:,} more"]
    close = nearest(word, names)
    hint = close if "Did you mean" in close else f" Valid: {', '.join(few)}."
    return UserError(f'--labels {text}: no class is named "{word}".{hint} Numbers do, too.')
