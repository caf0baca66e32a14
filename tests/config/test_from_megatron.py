"""docs/from-megatron.md: Megatron-LM's flags, and our keys for them."""

import re
from pathlib import Path

import pytest
from small_config import keys_of_all

from titan_dit.config import catalog, config_file

PAGE = Path(__file__).parents[2] / "docs" / "from-megatron.md"
NO_FLAG_OF_TRAINING = {"--json-keys", "--append-eod", "--split-sentences"}


def rows():
    """Cells of the tables' rows: Megatron's flags, our keys."""
    lines = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if "|" in line]
    return [line for line in lines if len(line) == 2 and "`" in line[0] + line[1]]


def keys_in(cell):
    """ "section.key" of each `[section] key`, and of each `key` after it, in a cell."""
    section, found = "", []
    for span in re.findall("`([^`]+)`", cell):
        part = re.fullmatch(r"(?:\[(\w+)\] )?([a-z]\w*)(?: = .+)?", span)
        if part and (section := part[1] or section):
            found.append(f"{section}.{part[2]}")
    return found


def flags_of_megatron():
    return sorted({flag for row in rows() for flag in re.findall(r"--[a-z][\w-]+", row[0])})


def test_every_key_of_the_page_exists():
    named = [key for row in rows() for key in keys_in(row[1])]
    assert len(named) > 60
    assert set(named) <= keys_of_all()


@pytest.mark.parametrize("flag", flags_of_megatron())
def test_every_flag_of_the_page_is_answered_with_what_it_is_here(flag):
    with pytest.raises(config_file.UserError) as caught:
        config_file.load(["--config", "gpt_plays", flag, "1"], catalog.variant)
    _, _, answer = str(caught.value).partition("as in the TOML.")
    assert answer
    row = next(row for row in rows() if re.search(rf"{flag}(?![\w-])", row[0]))
    of_page = {f"--{key}" for key in keys_in(row[1])}
    of_answer = set(re.findall(r"--[a-z_]+\.[a-z_0-9]+", answer))
    # An answer without a key says why there is none.
    assert of_answer & of_page or "Leave it out" in answer or not of_answer
