"""Tokenizers of the library tokenizers: read, converted from vocabulary files, trained, applied."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from titan_dit.config import user_text
from titan_dit.config.section import UserError
from titan_dit.data.tokenizer_file import ENDS, LARGEST_ID
from titan_dit.ranks.torch_range import pip_install

GPT_SPECIAL = ("<|endoftext|>",)
BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def needed(package: str, where: str) -> Any:
    """Import an optional package; `where` is the command or key that needs it.

    Raises UserError if it is missing.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        extra = pip_install("'titan_dit[text]'")
        raise UserError(
            f"[{where}] needs the package {package}, which is not installed: "
            f"{extra}, or {pip_install('tokenizers sentencex')}"
        ) from None


def read(path: Path, where: str) -> Any:
    """The tokenizer of a tokenizer.json. Raises UserError if there is none.

    `where` is the command or section that errors name.
    """
    library = needed("tokenizers", where)
    if not path.is_file():
        raise UserError(f"[{where}] tokenizer={path}: there is no such file. Give its path.")
    user_text.check_size(path, f"[{where}] tokenizer={path}")
    try:
        made = library.Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises Exception itself.
        raise UserError(
            f"[{where}] tokenizer={path}: not a tokenizer.json ({error}). GPT-2's vocab.json and "
            "merges.txt are --vocab-file and --merge-file."
        ) from None
    check_ids(made.get_vocab(), f"[{where}] tokenizer={path}")
    return made


def check_ids(vocabulary: Mapping[str, int], where: str) -> None:
    """Raise UserError for ids above LARGEST_ID: the library allocates a list up to the largest."""
    if (largest := max(vocabulary.values(), default=0)) > LARGEST_ID:
        raise UserError(
            f"{where} has the id {largest:,}, above {LARGEST_ID:,}. Number its tokens from 0."
        )


def from_vocabulary(vocab: Path, merges: Path | None, lower: bool, where: str) -> Any:
    """GPT-2's tokenizer from vocab.json and merges.txt, or BERT's from vocab.txt.

    Raises UserError for a missing or invalid file.
    """
    library = needed("tokenizers", where)
    models = library.models
    for file in filter(None, (vocab, merges)):
        if not file.is_file():
            raise UserError(
                f"[{where}] vocab-file or merge-file {file}: there is no such file. Give its path."
            )
        user_text.check_size(file, f"[{where}] vocab-file or merge-file {file}")
    form = "With --merge-file it is GPT-2's vocab.json, without it BERT's vocab.txt."
    try:
        if merges:
            made = byte_level(models.BPE.from_file(str(vocab), str(merges)), where)
        else:
            read = models.WordPiece.from_file(str(vocab), unk_token="[UNK]")
            made = word_piece(read, lower, where)
    except Exception as error:  # The library raises Exception itself.
        raise UserError(f"[{where}] vocab-file={vocab}: {error}. {form}") from None
    if not merges and "[UNK]" not in made.get_vocab():
        raise UserError(f"[{where}] vocab-file={vocab} has no line [UNK]. Add it. {form}")
    known = made.get_vocab()
    check_ids(known, f"[{where}] vocab-file={vocab}")
    try:
        # Workers read it as JSON, which checks that the merges' parts are in the vocabulary.
        library.Tokenizer.from_str(made.to_str())
    except Exception as error:  # As above.
        raise UserError(f"[{where}] vocab-file={vocab}: {error}. {form}") from None
    made.add_special_tokens([t for t in (*GPT_SPECIAL, *BERT_SPECIAL) if t in known])
    return made


def byte_level(model: Any, where: str) -> Any:
    """A tokenizer that splits text like GPT-2's, on UTF-8 bytes."""
    library = needed("tokenizers", where)
    made = library.Tokenizer(model)
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    return made


def word_piece(model: Any, lower: bool, where: str) -> Any:
    """A tokenizer that splits text like BERT's; `lower` also removes accents."""
    library = needed("tokenizers", where)
    made = library.Tokenizer(model)
    made.normalizer = library.normalizers.BertNormalizer(lowercase=lower)
    made.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    made.decoder = library.decoders.WordPiece()
    return made


def train(
    texts: Iterator[str], kind: Literal["bpe", "wordpiece"], size: int, lower: bool, where: str
) -> Any:
    """Train a tokenizer of at most `size` tokens."""
    library = needed("tokenizers", where)
    if kind == "bpe":
        made = byte_level(library.models.BPE(), where)
        trainer = library.trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=list(GPT_SPECIAL),
            initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
    else:
        made = word_piece(library.models.WordPiece(unk_token="[UNK]"), lower, where)
        trainer = library.trainers.WordPieceTrainer(
            vocab_size=size, special_tokens=list(BERT_SPECIAL), show_progress=False
        )
    made.train_from_iterator(texts, trainer)
    return made


def text_of(tokenizer: Any) -> str:
    """The contents of its tokenizer.json."""
    found: str = tokenizer.to_str(pretty=True)
    return json.dumps(json.loads(found), ensure_ascii=False, indent=1) + "\n"


def end_of_document(tokenizer: Any, name: str | None, where: str) -> int:
    """Id of the token that ends a document: `name`, else the first known one.

    Raises UserError if there is none.
    """
    known = tokenizer.get_vocab()
    found = next((word for word in ([name] if name else ENDS) if word in known), None)
    if found is None:
        raise UserError(
            f"[{where}] append-eod: the tokenizer has no {name or ', '.join(ENDS)}. Name its token "
            "with --eod-token."
        )
    number: int = known[found]
    return number


@runtime_checkable
class Codec(Protocol):
    """A codec between text and token ids."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens around them."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""


class NumberCodec:
    """A codec of ids written as numbers, such as "17 4 4", for data without a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text; raises UserError for a word that is no number."""
        words = text.split()
        if wrong := [word for word in words if not word.isdecimal()]:
            raise UserError(
                f"the prompt holds {wrong[0]!r}, but the data names no tokenizer: write token ids, "
                'such as "17 4 4", or name the tokenizer.json.'
            )
        return [int(word) for word in words]

    def decode(self, ids: Sequence[int]) -> str:
        """The ids as numbers with spaces between them."""
        return " ".join(map(str, ids))


class TokenizerCodec:
    """A tokenizer of the library tokenizers."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = read(path, "data")

    def encode(self, text: str) -> list[int]:
        """See `Codec.encode`."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """See `Codec.decode`. Bytes that are not a whole UTF-8 character become U+FFFD."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


def codec_of(path: str) -> Codec:
    """The codec of a tokenizer.json, or of numbers if `path` is ""."""
    return TokenizerCodec(Path(path)) if path else NumberCodec()
