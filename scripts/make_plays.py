"""Write titan_dit/data/plays. Run once: `python scripts/make_plays.py FOLDER`.

FOLDER holds Project Gutenberg's texts without its header, as the package shakespeare 0.6 of the
Open Knowledge Foundation has them in shksprdata/texts: hamlet_gut.txt and seven more. Needs
`titan_dit[text]`, which training on the result does not.
"""

import argparse
import json
import tempfile
from pathlib import Path

from titan_dit.commands import data_tokenize, data_train_tokenizer
from titan_dit.commands import flags as tokenize_flags
from titan_dit.commands import flags as train_flags

PLAYS = "hamlet macbeth lear othello romeo_and_juliet midsummer_nights_dream tempest julius_caesar"
TARGET = Path(__file__).resolve().parent.parent / "titan_dit" / "data" / "plays"
VOCABULARY = 2048
HELD_OUT = 0.05
"""The end of every play, from the next line on."""


def main() -> None:
    """Train the tokenizer on the beginnings; tokenize the beginnings, then the ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder_of_texts = parser.parse_args().folder
    starts, ends = [], []
    for name in PLAYS.split():
        raw = (folder_of_texts / f"{name}_gut.txt").read_bytes()
        text = raw.decode("latin-1").replace("\r\n", "\n")
        cut = text.index("\n", int(len(text) * (1 - HELD_OUT))) + 1
        starts.append(text[:cut])
        ends.append(text[cut:])
    TARGET.mkdir(exist_ok=True)
    tokenizer, prefix = TARGET / "tokenizer.json", TARGET / "plays"
    for old in (tokenizer, *TARGET.glob("plays_text_document.*")):
        old.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        training, whole = Path(folder) / "training.jsonl", Path(folder) / "whole.jsonl"
        training.write_text(lines_of(starts))
        whole.write_text(lines_of(starts + ends))
        data_train_tokenizer.main(
            train_flags.DataTrainTokenizerFlags(
                input=(str(training),), out=str(tokenizer), vocabulary=VOCABULARY
            )
        )
        data_tokenize.main(
            tokenize_flags.DataTokenizeFlags(
                input=(str(whole),),
                out=str(prefix),
                tokenizer=str(tokenizer),
                append_eod=True,
                workers=1,
            )
        )


def lines_of(texts: list[str]) -> str:
    """A JSON line for each text."""
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


if __name__ == "__main__":
    main()
