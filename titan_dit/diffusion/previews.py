"""Previews of a training run: what they show, their prompts, and the picture."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from jaxtyping import Int64
from safetensors import SafetensorError, safe_open
from safetensors import torch as safetensors
from torch import Tensor

from titan_dit.config.section import UserError, few, show
from titan_dit.config.training import SamplingConfig
from titan_dit.data.base import Source
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.diffusion.base import text_multiple
from titan_dit.diffusion.conditions import Captions, Given, PreviewPrompts, rows_of
from titan_dit.diffusion.drawing import FPS, PIXELS, check_autoencoder, decoder, samples
from titan_dit.diffusion.objective import Diffusion
from titan_dit.diffusion.row_conditions import references_of, rows_to_show, spread_labels
from titan_dit.objectives.base import DataShare, Forward, Preview
from titan_dit.pictures import library
from titan_dit.system import run_files
from titan_dit.system.files import write_whole

NUM = 40
"""Default number of pictures in a preview."""
PROMPTS = 10
"""Maximum number of captions of [data] that a preview shows."""


def check(objective: Diffusion, sampling: SamplingConfig) -> None:
    """Raise UserError if previews cannot be drawn, before training starts.

    A vae that did not make the latents of the data; prompts or a text encoder for a network with
    classes; a text encoder without prompts; clips without the library that writes them.
    """
    check_autoencoder(objective, sampling)
    if objective.draws_clips:
        library.video("[sampling] every: a preview of clips")
    if not objective.captions and (sampling.prompts or sampling.text_encoder):
        key = "prompts" if sampling.prompts else "text_encoder"
        raise UserError(
            f"[sampling] {key} is for networks that take captions, but [model] "
            f"name={show(objective.model.name)} takes classes. Leave it out."
        )
    if sampling.text_encoder and not sampling.prompts:
        raise UserError(
            "[sampling] text_encoder has no effect without prompts. Set prompts, or leave it "
            "out: previews show captions of [data]."
        )


def prompts_of(
    sampling: SamplingConfig,
    data: LatentFacts,
    tokens: int,
    source: Source,
    folder: Path,
    candidates: range,
) -> PreviewPrompts:
    """The prompts of [sampling] and their embeddings; without any, captions of stored rows.

    `tokens`: those of a prompt that the network takes. `candidates`: rows to take captions of.
    `folder`: of the run, which may have the embeddings. Raises UserError for another text encoder
    than that of the data.
    """
    # Imported late: the benchmarks train on machines without Pillow.
    from titan_dit.pictures.prompts import open_encoder

    prompts = sampling.prompts
    rows: tuple[int, ...] = ()
    if not prompts:
        row_of = rows_of_captions(source, candidates)
        rows = tuple(row_of.values())
        if data.text is None or not data.text.is_online:
            fields = source.read_fields(Captions.takes, list(row_of.values()))
            return PreviewPrompts(tuple(row_of), fields=fields, rows=rows)
        prompts = tuple(row_of)
    depends = [prompts, tokens, data.text and asdict(data.text), sampling.text_encoder]
    key = hashlib.sha256(json.dumps(depends).encode("utf-8", "replace")).hexdigest()
    if found := read_prompts(folder, prompts, key):
        return replace(found, rows=rows)
    where, cpu = "[sampling] text_encoder", torch.device("cpu")
    encoder = open_encoder(prompts, data, sampling.text_encoder, tokens, cpu, where)
    cut = encoder.num_cut(prompts)
    note = f"hint    {cut} of {len(prompts)} prompts of [sampling] are cut to {tokens} tokens"
    fields = encoder.fields(prompts, same=False)
    notes = (note,) if cut else ()
    return PreviewPrompts(prompts, fields=fields, notes=notes, key=key, rows=rows)


def read_prompts(folder: Path, prompts: tuple[str, ...], key: str) -> PreviewPrompts | None:
    """What `write_prompts` has written for the same prompts and data; None without it."""
    try:
        with safe_open(folder / run_files.PROMPTS, framework="pt") as file:
            about = file.metadata() or {}
            fields = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        return None
    if about.get("key") != key or {len(value) for value in fields.values()} != {len(prompts)}:
        return None
    notes = tuple(about.get("notes", "").splitlines())
    return PreviewPrompts(prompts, fields=fields, notes=notes, key=key)


def write_prompts(folder: Path, prompts: PreviewPrompts) -> None:
    """Write the prompts' embeddings to the run directory."""
    about = {"key": prompts.key, "notes": "\n".join(prompts.notes)}
    write_whole(folder / run_files.PROMPTS, safetensors.save(dict(prompts.fields), about))


def rows_of_captions(source: Source, candidates: range) -> dict[str, int]:
    """The captions of up to PROMPTS rows of `candidates` -> the row. UserError if none is text."""
    few = min(len(candidates), PROMPTS * PROMPTS)
    rows = [candidates[place * len(candidates) // few] for place in range(few)]
    row_of: dict[str, int] = {}
    for row, text in zip(rows, source.captions(rows), strict=False):
        row_of.setdefault(text, row)
    if not row_of:
        raise UserError(
            "[sampling] every: the network takes captions, and [data] holds none as text. Set "
            "[sampling] prompts, a list of them, or every = 0."
        )
    texts, num = list(row_of), min(len(row_of), PROMPTS)
    spread = [texts[place * len(texts) // num] for place in range(num)]
    return {text: row_of[text] for text in spread}


def contents(
    objective: Diffusion, sampling: SamplingConfig
) -> tuple[Int64[Tensor, " num"], Given, Sequence[str]]:
    """What a preview shows: the class or prompt of each picture, its condition, all names."""
    captions, prompts = objective.captions, objective.preview_data.prompts
    if captions is None:
        labels = preview_labels(sampling.num or NUM, objective.num_classes)
        of_classes = {"labels": labels, **references_shown(objective, len(labels))}
        return labels, of_classes, objective.data.class_names
    count = len(prompts.texts)
    num = sampling.num or count * (1 if objective.draws_clips else max(1, NUM // count))
    if num < count:
        raise UserError(
            f"[sampling] num={num} does not show all {count} prompts. Set num to at least "
            f"{count}, or fewer prompts."
        )
    places = spread_labels(num, list(range(count)))
    given: Given = rows_of(captions.given(prompts.fields), places)
    rows = [prompts.rows[place] for place in places.tolist()] if prompts.rows else None
    return places, {**given, **references_shown(objective, num, rows)}, prompts.texts


def references_shown(objective: Diffusion, num: int, rows: Sequence[int] | None = None) -> Given:
    """The references of a preview: those of the captions' `rows`, else of rows evenly spaced."""
    source = objective.preview_data.source
    if objective.data.reference is None or source is None:
        return {}
    every = rows_to_show(objective, source)
    spread = [every[place * len(every) // num] for place in range(num)]
    return references_of(objective, source, spread if rows is None else rows)


def preview_labels(num: int, num_classes: int) -> Int64[Tensor, " num"]:
    """Labels for a small grid: at most ten classes, so that each has several samples."""
    num_shown = max(1, min(10, num_classes, num // 4))
    return spread_labels(num, list(range(num_shown)))


def preview(
    forward: Forward,
    objective: Diffusion,
    sampling: SamplingConfig,
    seed: int,
    share: DataShare,
) -> Preview:
    """Draw the samples of [sampling] as one picture; data ranks draw shares, then all-gather.

    With [sampling] vae they are decoded. Clips are a contact sheet, and an MP4 each in a folder
    beside it.
    """
    device = share.device
    labels, conditions, names = contents(objective, sampling)
    num = len(labels)
    rows = -(-num // share.num_ranks)
    numbers = torch.arange(rows * share.num_ranks, device=device)
    if text_multiple(objective.model):
        # Dealt out, so that the pictures of a prompt, which are a batch, are on all ranks.
        numbers = numbers.view(rows, share.num_ranks).T.flatten()
    mine = numbers[share.rank * rows :][:rows]
    # Numbers from `num` on are padding, cut off below.
    kept = mine.clamp(max=num - 1).cpu()
    given = {name: value.to(device) for name, value in rows_of(conditions, kept).items()}
    drawn = samples(forward, objective, sampling, seed, given, mine, share)
    order = numbers.argsort()[:num]
    finite = share.gather(drawn.isfinite().flatten(1).all(1).float())[order]
    value_range = objective.data.value_range
    if sampling.vae:
        with decoder(objective, sampling, device) as vae:
            drawn, value_range = vae.decode(drawn), PIXELS
    drawn = share.gather(drawn)[order]

    def write(file: Path) -> None:
        # Imported late: the benchmarks train on machines without Pillow.
        from titan_dit.pictures import output

        if not objective.draws_clips:
            pictures = drawn.squeeze(2) if drawn.ndim == 5 else drawn
            output.draw_grid(file, pictures, labels.tolist(), value_range, names)
            return
        clips, fps = output.to_clips(drawn, value_range), objective.data.fps or FPS
        output.draw_contact_sheet(file, clips, labels.tolist(), names)
        folder = file.with_suffix("")
        folder.mkdir(exist_ok=True)
        for number, clip in enumerate(clips):
            output.write_clip(folder / f"{number:06d}.mp4", clip, fps)

    lost = (finite == 0).nonzero()[:, 0].tolist()
    note = f"samples {few(lost)} of the preview are NaN or infinite" if lost else ""
    return Preview(".png", write, note)
