"""Text of users: each way in which Python fails is one line with the file and the line."""

import pytest

from titan_dit.config import flags, toml_text, user_text
from titan_dit.config.section import UserError
from titan_dit.config.user_text import BadTextError

DEEP, LONG = "[" * 100_000 + "]" * 100_000, "9" * 5000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": }', "not JSON (Expecting value"),
        (DEEP, "not JSON (nested too deeply)"),
        (LONG, "not JSON (a number of too many digits)"),
        (b"\xff\xfe{}", "not UTF-8"),
    ],
)
def test_json_fails_in_one_way(text, reason):
    with pytest.raises(BadTextError) as caught:
        user_text.parse_json(text)
    assert str(caught.value).startswith(reason)


def test_a_key_that_stands_twice_is_refused_where_one_is_meant():
    assert user_text.parse_json('{"a": 1, "a": 2}') == {"a": 2}
    with pytest.raises(BadTextError, match=r"^the key 'a' stands twice"):
        user_text.parse_json('{"a": 1, "a": 2}', unique=True)


@pytest.mark.parametrize(
    ("text", "reason"), [(f"a={DEEP}", "nested too deeply"), (f"a={LONG}", "too many digits")]
)
def test_toml_fails_in_one_line(tmp_path, text, reason):
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(UserError, match=rf"a\.toml is not valid TOML: .*{reason}\.$"):
        toml_text.parse(tmp_path / "a.toml")
    value = text.removeprefix("a=")
    assert flags.literal(value) == value  # Text, whose key then says what it must be.


def test_a_file_is_read_up_to_a_limit_and_without_a_byte_order_mark(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbfabc")
    assert user_text.read(file, "a") == "abc"
    with pytest.raises(UserError, match=r"^a is larger than 5 bytes"):
        user_text.read(file, "a", 5)
    file.write_bytes(b"abc\xe9")
    with pytest.raises(UserError, match=r"^a is not UTF-8 \(byte 4\)\. Save it as UTF-8"):
        user_text.read(file, "a")
    with pytest.raises(UserError, match=r"^a cannot be read: No such file"):
        user_text.read(tmp_path / "none", "a")


def test_lines_are_read_up_to_a_limit(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\xef\xbb\xbfone\r\n\ntwo\xc2\x85three\n")
    assert list(user_text.lines(file, "a", 20, "")) == [(1, "one\r\n"), (3, "two\x85three\n")]
    with pytest.raises(UserError, match=r"^a, line 3: longer than 9 bytes\. Raise it\.$"):
        list(user_text.lines(file, "a", 9, "Raise it."))
    file.write_bytes(b"one\n\xff\n")
    with pytest.raises(UserError, match=r"^a, line 2: not UTF-8"):
        list(user_text.lines(file, "a", 20, ""))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("a.png,a cat, on a mat", r"row 2 \(line 3\): 3 fields for 2 columns"),
        ("a.png", r"row 2 \(line 3\): 1 fields for 2 columns"),
        ('a.png,"a cat', "line 3: not CSV"),
        ('a.png,"a" cat', "line 3: not CSV"),
    ],
)
def test_a_row_of_csv_has_a_field_for_each_column(tmp_path, row, said):
    file = tmp_path / "a.csv"
    file.write_text(
        f'file_name, text\nb.png, "a ""mat"", a\nline"\n{row}\n'.replace("a\nline", "a")
    )
    with pytest.raises(UserError, match=f"^a, {said}"):
        list(user_text.read_csv(file, "a", 1000, "", ("text",)))
    file.write_text('file_name, text\nb.png, "a ""mat"", a\nline"\n\n')
    rows = list(user_text.read_csv(file, "a", 1000, "", ("text",)))
    assert rows == [(1, {"file_name": "b.png", "text": 'a "mat", a\nline'})]


def test_a_field_of_csv_is_as_long_as_a_row_may_be(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("text\n" + "x" * 200_000 + "\n")
    [(_, row)] = user_text.read_csv(file, "a", 1 << 20, "", ("text",))
    assert len(row["text"]) == 200_000
    with pytest.raises(UserError, match=r"^a, line 2: longer than 150,000 bytes\. Raise it$"):
        list(user_text.read_csv(file, "a", 150_000, "Raise it", ("text",)))
