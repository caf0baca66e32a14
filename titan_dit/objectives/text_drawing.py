"""Draw text from a language model: continue a prompt, token by token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.config.training import GenerationConfig
from titan_dit.data.token_windows import TokenFacts
from titan_dit.data.tokenizing.tokenizer import Codec, codec_of
from titan_dit.models.base import ModelSpec
from titan_dit.objectives.base import DataShare, Forward, Preview
from titan_dit.rng import SampleRNG
from titan_dit.system.files import write_whole


@runtime_checkable
class Choice(Protocol):
    """Settings for drawing a token: keys of [generation] and flags of `sample`."""

    @property
    def temperature(self) -> float:
        """Divides the logits; 0 takes the most likely token."""

    @property
    def top_k(self) -> int | None:
        """Draw from the most likely `top_k` tokens only."""

    @property
    def top_p(self) -> float:
        """Draw from the fewest most likely tokens whose probabilities add up to this."""


def choose(
    logits: Float[Tensor, "b v"], uniform: Float[Tensor, " b"], choice: Choice
) -> Int64[Tensor, " b"]:
    """Draw a token per row; `uniform` in (0, 1).

    By the inverse of the cumulative distribution, in the order of the ids: logits that differ by a
    rounding, as those of two layouts do, move the edges by as much, and hardly ever the token.
    """
    if not choice.temperature:
        return logits.argmax(1)
    edges = probabilities(logits, choice).cumsum(1)
    # Scaled by the last edge, which is 1 up to rounding: no draw lies beyond it.
    return torch.searchsorted(edges, uniform.double()[:, None] * edges[:, -1:], right=True)[:, 0]


def probabilities(logits: Float[Tensor, "b v"], choice: Choice) -> Float[Tensor, "b v"]:
    """The distribution to draw from, in fp64; ties at the limit of top-k all stay."""
    scaled = logits.double() / choice.temperature
    if choice.top_k is not None and choice.top_k < scaled.shape[1]:
        least = scaled.topk(choice.top_k).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, -torch.inf)
    found = scaled.softmax(1)
    if choice.top_p < 1:
        ordered, index = found.sort(dim=1, descending=True, stable=True)
        # The token that crosses top_p stays, so the first one always does.
        beyond = ordered.cumsum(1) - ordered >= choice.top_p
        found = found.masked_fill(beyond.scatter(1, index, beyond), 0)
    return found


MOST_LOGITS = 2**27
"""Maximum logits of a forward pass, 512 MiB in fp32; it limits the texts drawn at a time."""


NUM = 4
"""Default number of texts in a preview. Each token of a text takes a forward pass."""


@runtime_checkable
class Windowed(Protocol):
    """A [model] section from which text can be drawn."""

    @property
    def sequence_length(self) -> int:
        """Tokens of a window."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids; ids are below it."""

    def spec(self) -> ModelSpec:
        """Describe the network."""

    def static(self, device: torch.device) -> dict[str, Tensor]:
        """Inputs that are equal for all samples."""


@dataclass(frozen=True)
class Writer:
    """Continues prompts with a network."""

    forward: Forward
    model: Windowed
    device: torch.device
    is_executor: bool
    """`forward` is an executor's, which takes whole windows only, and whose ranks must all call it
    equally often."""

    def next_logits(self, ids: Int64[Tensor, "b t"]) -> Tensor:
        """The logits [b, v] of the token after `ids`, fp32, on the CPU.

        The window is the last `sequence_length` tokens. A shorter one is padded at the end, to
        which a causal model does not attend.
        """
        recent = ids[:, -self.model.sequence_length :]
        used = recent.shape[1]
        width = self.model.sequence_length if self.is_executor else used
        window = torch.nn.functional.pad(recent, (0, width - used))
        static = first_tokens(self.model.static(self.device), self.model.spec(), width)
        logits = self.forward({"tokens": window.to(self.device)}, static)
        # On the CPU ranks that hold equal logits draw equal tokens; sums of a GPU may differ.
        return logits[:, used - 1].float().cpu()

    def extend(
        self,
        prompt: Sequence[int],
        numbers: Int64[Tensor, " b"],
        seed: int,
        choice: Choice,
        num_tokens: int,
        end: int | None,
        report: Callable[[int], None] = lambda tokens: None,
    ) -> Int64[Tensor, "b t"]:
        """The prompt and up to `num_tokens` drawn after it, on the CPU, one row per sample number.

        Token k of sample i depends only on (seed, i, k) and the tokens before it. `end`: a token
        after which nothing more is needed. `report` gets the tokens drawn so far.
        """
        rng = SampleRNG(seed, numbers.cpu())
        ids = torch.tensor(prompt).repeat(len(numbers), 1)
        for k in range(num_tokens):
            uniform = rng.uniform("text", (1,), first=k)[:, 0]
            drawn = choose(self.next_logits(ids), uniform, choice)
            ids = torch.cat((ids, drawn[:, None]), 1)
            report(k + 1)
            has_ended = end is not None and bool((ids[:, len(prompt) :] == end).any(1).all())
            if has_ended and not self.is_executor:
                break
        return ids

    @property
    def most_rows(self) -> int:
        """Texts to draw at a time."""
        return max(1, MOST_LOGITS // (self.model.sequence_length * self.model.vocab_size))


def first_tokens(
    static: Mapping[str, Tensor], model_spec: ModelSpec, count: int
) -> dict[str, Tensor]:
    """Static inputs of the first `count` tokens."""
    dims = {name: spec.token_dim for name, spec in model_spec.static.items()}
    return {
        name: value if (dim := dims[name]) is None else value.narrow(dim, 0, count)
        for name, value in static.items()
    }


def prompt_ids(text: str, codec: Codec, facts: TokenFacts, where: str) -> list[int]:
    """The ids of a prompt; for an empty one the id that ends a document, as a text follows it.

    Raises UserError for ids outside the data's vocabulary.
    """
    try:
        ids = codec.encode(text)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if not ids and facts.end_of_document is None:
        raise UserError(
            f"{where} is empty, but the data has no token that ends a document, which would begin "
            "a text. Give a prompt."
        )
    if wrong := [number for number in ids if number >= facts.vocabulary]:
        raise UserError(
            f"{where} has the token id {wrong[0]}, but the data's are below {facts.vocabulary}. "
            "Give ids of its tokenizer."
        )
    return ids or [facts.end_of_document or 0]


def written(ids: Sequence[int], begin: int, codec: Codec, end: int | None) -> str:
    """The text of a prompt of `begin` tokens and its continuation, up to the end of a document."""
    drawn = list(ids[begin:])
    if end in drawn:
        drawn = drawn[: drawn.index(end)]
    start = [number for number in ids[:begin] if number != end]
    return codec.decode([*start, *drawn])


def titled(texts: Sequence[str]) -> str:
    """Texts one below the other, each after its number."""
    return "".join(f"--- {number}\n{text}\n" for number, text in enumerate(texts))


def preview(
    forward: Forward,
    model: Windowed,
    facts: TokenFacts,
    num: int,
    generation: GenerationConfig,
    seed: int,
    share: DataShare,
) -> Preview:
    """Continue the prompt of [generation] `num` times; data ranks draw shares, then all-gather."""
    codec, end = codec_of(facts.tokenizer), facts.end_of_document
    prompt = prompt_ids(generation.prompt, codec, facts, "[generation] prompt")
    writer = Writer(forward, model, share.device, is_executor=True)
    rows = -(-num // share.num_ranks)
    mine = torch.arange(share.rank * rows, (share.rank + 1) * rows)
    parts = [
        writer.extend(prompt, part, seed, generation, generation.max_new_tokens, end)
        for part in torch.split(mine, writer.most_rows)
    ]
    whole = share.gather(torch.cat(parts).to(share.device))[:num].tolist()

    def write(file: Path) -> None:
        texts = [written(ids, len(prompt), codec, end) for ids in whole]
        write_whole(file, titled(texts))

    return Preview(".txt", write)
