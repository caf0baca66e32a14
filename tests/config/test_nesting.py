"""Values of JSON and TOML are nested at most so deep that messages can show them."""

import pytest

from titan_dit.config import section, user_text


@pytest.mark.parametrize("depth", [user_text.MAX_DEPTH, user_text.MAX_DEPTH + 1, 500, 100_000])
@pytest.mark.parametrize("brackets", [("[", "]"), ('{"a":', "}")])
def test_a_deep_value_is_refused_and_another_one_shown(depth, brackets):
    opening, closing = brackets
    text = opening * depth + "1" + closing * depth
    if depth <= user_text.MAX_DEPTH:
        section.show(user_text.parse_json(text))
        return
    with pytest.raises(user_text.BadTextError, match="nested too deeply"):
        user_text.parse_json(text)


def test_deep_lists_and_tables_of_a_toml_are_refused():
    for text in ("a = " + "[" * 300 + "]" * 300, "[" + ".".join("a" * 300) + "]"):
        with pytest.raises(user_text.BadTextError, match="nested too deeply"):
            user_text.parse_toml(text)
