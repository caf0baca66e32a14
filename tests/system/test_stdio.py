"""What reaches a terminal: no control characters of others, in any encoding."""

import io
import sys

import pytest

from titan_dit.observe import console
from titan_dit.system import stdio
from titan_dit.system.progress import Line

ESCAPES = {
    "a\x1b[31mb": r"a\x1b[31mb",
    "x\x1b]0;owned\x07": r"x\x1b]0;owned\x07",
    "back\x08\x7f": r"back\x08\x7f",
    "\x9b31m": r"\x9b31m",
    "\u202egnp.exe": r"\u202egnp.exe",
    "b\udcff": r"b\udcff",
    "two\u2028lines": r"two\u2028lines",
    "\u00e9t\u00e9 \u732b\u3000\u00a0\U0001f408": "\u00e9t\u00e9 \u732b\u3000\u00a0\U0001f408",
    "\U0001f468\u200d\U0001f469": "\U0001f468\u200d\U0001f469",
}


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


@pytest.mark.parametrize("text", ESCAPES)
def test_what_a_terminal_would_obey_is_escaped_by_every_way_to_print(monkeypatch, text):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", stream := io.StringIO())
    console.say(text)
    console.mention(text)
    console.say_text(text)
    stdio.write(sys.stdout, f"{text}\n")
    assert stream.getvalue().splitlines() == [ESCAPES[text]] * 4
    monkeypatch.setattr(sys, "stdout", stream := Terminal())
    stdio.write(sys.stdout, text)
    Line("stdout").show(text)
    assert stream.getvalue() == 2 * (stdio.CLEARED + ESCAPES[text])


def test_a_name_cannot_end_the_line_of_a_result(capsys):
    console.say("a\nerror: b\r")
    console.say_text("a\nb")
    assert capsys.readouterr().out == "a\\nerror: b\\r\na\nb\n"


def test_a_stream_escapes_what_its_encoding_lacks(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    stdio.prepare()
    console.say("\u00e9t\u00e9")
    assert raw.getvalue() == b"\\xe9t\\xe9\n"
