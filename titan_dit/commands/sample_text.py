"""`sample` of a language model's run: text."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from titan_dit.commands import results_file
from titan_dit.commands.flags import CommonFlags, TextFlags
from titan_dit.config.section import UserError
from titan_dit.data.tokenizing.tokenizer import codec_of
from titan_dit.execution import first_of
from titan_dit.interop.tensor_file import not_finite
from titan_dit.objectives import text_drawing
from titan_dit.objectives.next_token import NextToken
from titan_dit.observe import console
from titan_dit.system.progress import ProgressLine
from titan_dit.trained_model import TrainedModel

NUM, BATCH = 1, 250


def check(flags: CommonFlags) -> None:
    """Raise UserError for a file that is not of text."""
    if flags.out and Path(flags.out).suffix != ".txt":
        raise UserError(f"--out {flags.out}: name a .txt file, or leave it out to print the text.")
    if len(flags.prompt) > 1:
        raise UserError(
            f"--prompt: {len(flags.prompt)} of them, but a language model continues one. Give one."
        )


@torch.no_grad()
def main(run: TrainedModel, objective: NextToken, flags: TextFlags) -> None:
    """Draw texts, and print or write them."""
    facts, end, num = objective.data, objective.data.end_of_document, flags.num or NUM
    codec = codec_of(facts.tokenizer if flags.tokenizer is None else flags.tokenizer)
    begins = flags.prompt[0] if flags.prompt else ""
    prompt = text_drawing.prompt_ids(begins, codec, facts, "--prompt")
    texts: list[str] = []

    def forward(inputs: Mapping[str, Tensor], static: Mapping[str, Tensor]) -> Tensor:
        logits = first_of(run.network(inputs, static))
        if lost := not_finite(logits, len(texts)):
            raise UserError(
                f"the logits of texts {lost} of {run.path} ({run.weights}) are NaN or infinite. "
                "Take another --step of the run. Nothing was written."
            )
        return logits

    writer = text_drawing.Writer(forward, objective.model, run.device, is_executor=False)
    size = min(flags.batch_size or BATCH, writer.most_rows)
    console.say(
        f"sampling {num} from {run.path} ({run.weights}): {flags.length} tokens after "
        f"{len(prompt)}, temperature {flags.temperature:g}, seed {flags.seed}"
    )
    progress = ProgressLine(num * flags.length, "tokens")
    for numbers in torch.split(torch.arange(num), size):
        report = partial(report_tokens, progress, len(texts) * flags.length, len(numbers))
        drawn = writer.extend(prompt, numbers, flags.seed, flags, flags.length, end, report)
        texts += [text_drawing.written(ids, len(prompt), codec, end) for ids in drawn.tolist()]
    progress.end()
    text = text_drawing.titled(texts)
    if not flags.out:
        console.say_text(text.removesuffix("\n"))
        return
    results_file.write("--out", Path(flags.out), text)


def report_tokens(progress: ProgressLine, before: int, rows: int, tokens: int) -> None:
    """Show the tokens done: of earlier batches, and of each text of this one."""
    progress(before + rows * tokens)
