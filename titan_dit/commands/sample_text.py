"""`sample` of a language model's run: text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from titan_dit.commands.sample_flags import CommonFlags
from titan_dit.config.section import Bound, FilePath, NonNegativeFloat, PositiveInt, UserError
from titan_dit.data.codec import codec_of
from titan_dit.execution.base import first_of
from titan_dit.objectives import text_drawing
from titan_dit.objectives.next_token import NextToken
from titan_dit.observe import console
from titan_dit.system.progress import ProgressLine
from titan_dit.trained_model import TrainedModel

NUM = 1


@dataclass(frozen=True, kw_only=True)
class TextFlags(CommonFlags):
    """Prompt, length, and how a token is drawn."""

    prompt: str = ""
    """Text: what to continue. Empty begins a document. Of a run without a tokenizer, token ids."""
    length: PositiveInt = 100
    """Text: tokens to draw; it ends earlier with its document."""
    temperature: NonNegativeFloat = 1.0
    """Text: divides the logits; 0 takes the most likely token."""
    top_k: PositiveInt | None = None
    """Text: draw from the most likely tokens only. Unset: from all."""
    top_p: Annotated[float, Bound(above=0, most=1)] = 1.0
    """Text: draw from the fewest most likely tokens with this probability together."""
    tokenizer: FilePath | None = None
    """Text: tokenizer.json. Unset: [data] tokenizer of the run."""


def check(flags: CommonFlags) -> None:
    """Refuse a file that is not of text."""
    if flags.out and Path(flags.out).suffix != ".txt":
        raise UserError(f"--out {flags.out}: name a .txt file, or leave it out to print the text.")


@torch.no_grad()
def main(run: TrainedModel, objective: NextToken, flags: TextFlags) -> None:
    """Draw texts, and print or write them."""
    facts, end, num = objective.data, objective.data.end_of_document, flags.num or NUM
    codec = codec_of(facts.tokenizer if flags.tokenizer is None else flags.tokenizer)
    prompt = text_drawing.prompt_ids(flags.prompt, codec, facts, "--prompt")

    def forward(inputs: Mapping[str, Tensor], static: Mapping[str, Tensor]) -> Tensor:
        return first_of(run.network(inputs, static))

    writer = text_drawing.Writer(forward, objective.model, run.device, is_executor=False)
    size = min(flags.batch_size, writer.most_rows)
    console.say(
        f"sampling {num} from {run.path} ({run.weights}): {flags.length} tokens after "
        f"{len(prompt)}, temperature {flags.temperature:g}, seed {flags.seed}"
    )
    progress = ProgressLine(num * flags.length, "tokens")
    texts: list[str] = []
    for numbers in torch.split(torch.arange(num), size):
        report = partial(report_tokens, progress, len(texts) * flags.length, len(numbers))
        drawn = writer.extend(prompt, numbers, flags.seed, flags, end, report)
        texts += [text_drawing.written(ids, len(prompt), codec, end) for ids in drawn.tolist()]
    progress.end()
    text = text_drawing.titled(texts)
    if not flags.out:
        console.say(text.removesuffix("\n"))
        return
    out = Path(flags.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    console.say(f"wrote {out}")


def report_tokens(progress: ProgressLine, before: int, rows: int, tokens: int) -> None:
    """Show the tokens done: those of earlier batches, and of each text of this one."""
    progress(before + rows * tokens)
