"""Speed of `data tokenize` and of the library's own encode_batch.

On the eight plays, chunk by chunk in turns, in one thread of one process, CPU time. Ours includes
reading, JSON, arrays and writing; theirs has the decoded texts in memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from titan_dit.data.indexed_file import IndexedFile, IndexedWriter
from titan_dit.data.sections import PLAYS
from titan_dit.data.tokenizing import chunks, pool
from titan_dit.data.tokenizing.chunks import TextChunk, texts_of
from titan_dit.data.tokenizing.pool import Encoder, Recipe

ROUNDS, DOCUMENT, COPIES = 7, 3000, 3
"""DOCUMENT: characters."""


def main() -> None:
    """Print both speeds and their ratio, round by round: the first has empty caches."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    pool.one_thread()
    json_text = (PLAYS / "tokenizer.json").read_text()
    library, ours = (
        Tokenizer.from_str(json_text),
        Encoder(Recipe(json_text, "<u2", ("text",), 0, None)),
    )
    file = IndexedFile(PLAYS / "plays_text_document")
    text = library.decode(file.ids.tolist()) * COPIES
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plays.jsonl"
        documents = [text[i : i + DOCUMENT] for i in range(0, len(text), DOCUMENT)]
        path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
        ratios = []
        for number in range(ROUNDS):
            theirs_s, ours_s = measured(path, library, ours)
            speeds = [len(text.encode()) / 1e6 / seconds for seconds in (theirs_s, ours_s)]
            ratios.append(speeds[1] / speeds[0])
            print(
                f"round {number}: encode_batch {speeds[0]:.2f} MB/s, data tokenize "
                f"{speeds[1]:.2f} MB/s, ratio {speeds[1] / speeds[0]:.3f}",
                flush=True,
            )
    print(f"median ratio {statistics.median(ratios):.3f}")


def measured(path: Path, library: Tokenizer, ours: Encoder) -> tuple[float, float]:
    """CPU seconds of the library and of `data tokenize` for a file; they take turns to go first."""
    seconds = {"theirs": 0.0, "ours": 0.0}
    texts: list[str] = []

    with IndexedWriter(path.with_name("out"), np.dtype("<u2")) as writer:

        def run(name: str, chunk: TextChunk) -> None:
            began = time.process_time()
            if name == "ours":
                documents = ours(chunk).by_key["text"]
                writer.add(documents.ids, documents.lengths, documents.sequences)
            else:
                library.encode_batch(texts, add_special_tokens=False)
            seconds[name] += time.process_time() - began

        read = chunks.read_chunks([path], "a benchmark")
        names = list(seconds)
        while True:
            began = time.process_time()
            found = next(read, None)
            seconds["ours"] += time.process_time() - began
            if found is None:
                break
            texts = [text[0] for text in texts_of(found[0], ("text",)) if isinstance(text, tuple)]
            for name in names:
                run(name, found[0])
            names.reverse()
    return seconds["theirs"], seconds["ours"]


if __name__ == "__main__":
    main()
