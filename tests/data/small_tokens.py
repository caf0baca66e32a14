"""Write small indexed datasets, and small tokenizers."""

import json

import numpy as np

from titan_dit.data.indexed_file import IndexedWriter
from titan_dit.data.sections import Tokens


def write_tokens(prefix, documents, dtype="uint16"):
    """Write documents of one sequence each; returns the prefix as the config takes it."""
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for ids in documents:
            writer.add(np.array(ids, dtype), [len(ids)], [1])
    return str(prefix)


def counting(num, sizes):
    """Documents whose ids count up: `num` + 0, 1, 2, ..."""
    ends = np.cumsum(sizes)
    return [list(range(num + end - size, num + end)) for size, end in zip(sizes, ends, strict=True)]


def tokens(*paths, **keys):
    """The [data] section."""
    return Tokens(
        **{"paths": paths, "sequence_length": 8, "vocab_size": 1000, "split": (1,)} | keys
    )


def byte_level_file(path, vocabulary=("<|endoftext|>", "a", "bc", "Ġthe")):
    """Write a tokenizer.json with the tokens of a byte-level BPE."""
    special = [{"content": vocabulary[0], "id": 0, "special": True}]
    model = {"type": "BPE", "vocab": {token: i for i, token in enumerate(vocabulary)}}
    whole = {"added_tokens": special, "pre_tokenizer": {"type": "ByteLevel"}, "model": model}
    path.write_text(json.dumps(whole))
    return str(path)
