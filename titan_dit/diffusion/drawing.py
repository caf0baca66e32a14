"""Draw samples from a trained network: initial noise, guidance and a sampler."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64
from safetensors import SafetensorError, safe_open
from safetensors import torch as safetensors
from torch import Tensor

from titan_dit.config import catalog
from titan_dit.config.dotted_names import look_up
from titan_dit.config.section import UserError, few, show
from titan_dit.config.training import SamplingConfig
from titan_dit.data.base import Source
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.diffusion.base import Predict
from titan_dit.diffusion.conditions import (
    Captions,
    Conditions,
    Given,
    OpenedData,
    completed,
    rows_of,
)
from titan_dit.diffusion.fits import text_multiple
from titan_dit.diffusion.guidance import (
    Conditional,
    Guidance,
    LowExpert,
    by_noise_level,
    guided,
    scales,
)
from titan_dit.diffusion.objective import Diffusion
from titan_dit.diffusion.samplers import from_diffusers
from titan_dit.diffusion.samplers.base import Sampler, Settings, chosen
from titan_dit.diffusion.sections import DiffusionConfig
from titan_dit.objectives.base import DataShare, Forward, Preview
from titan_dit.pictures.autoencoder import Autoencoder
from titan_dit.rng import SampleRNG
from titan_dit.system import run_files
from titan_dit.system.files import write_whole

NUM = 40
"""Default number of pictures in a preview."""
PIXELS = (0.0, 255.0)
"""Values of black and white in decoded pictures."""
FPS = 16.0
"""Frames per second of drawn clips, if the data do not say."""


@runtime_checkable
class Drawing(Protocol):
    """Sampler settings: those of [sampling] and of the flags of `sample`."""

    @property
    def sampler(self) -> str:
        """Sampler name, "auto", or "package.module:function"."""

    @property
    def steps(self) -> int:
        """Number of sampling steps."""

    @property
    def shift(self) -> float | None:
        """Shift of a flow's times; None takes that of training."""

    @property
    def cfg_scale(self) -> float:
        """Scale of guidance; 1 is none."""

    @property
    def cfg_channels(self) -> int | None:
        """Guide only the first `cfg_channels` channels; None guides all."""

    @property
    def cfg_interval(self) -> tuple[float, ...]:
        """Guide at these noise levels only."""

    @property
    def cfg_rescale(self) -> float:
        """How far the guided prediction is rescaled to the std of the conditional one, 0 to 1."""


def sampler_of(objective: DiffusionConfig, name: str, where: str = "[sampling] sampler") -> Sampler:
    """The sampler `name` of an objective ("auto": its first); UserError if it does not fit."""
    if name.startswith(from_diffusers.PREFIX):
        return from_diffusers.sampler(name, objective.name, where)
    table = catalog.SAMPLERS.get(objective.name, {})
    if name not in table and any(name in others for others in catalog.SAMPLERS.values()):
        raise UserError(
            f"{where}={show(name)} does not fit [objective] name={show(objective.name)}. "
            f"Valid: auto, {', '.join(table)}."
        )
    if name == "auto" and not table:
        raise UserError(
            f'{where}="auto": [objective] name={show(objective.name)} has no default sampler. Set '
            'one: "package.module:function".'
        )
    found: Sampler = look_up(table, where, name_of_sampler(objective, name))
    return found


def name_of_sampler(objective: DiffusionConfig, name: str) -> str:
    """The sampler's name, with "auto" replaced by the objective's first sampler."""
    return next(iter(catalog.SAMPLERS[objective.name])) if name == "auto" else name


def spread_labels(num: int, classes: list[int]) -> Int64[Tensor, " num"]:
    """`num` labels, spread evenly over `classes` in their order."""
    index = torch.arange(num) * len(classes) // num
    return torch.tensor(classes)[index]


def labels_like(
    counts: Mapping[str, int], num: int, num_classes: int, names: Sequence[str]
) -> Int64[Tensor, " num"] | None:
    """`num` labels in the proportions of `counts`, by a class's name or number.

    Shares are rounded so that the largest remainders get one more. None if a class is unknown.
    """
    numbers = {name: number for number, name in enumerate(names)}
    numbers |= {str(number): number for number in range(num_classes) if str(number) not in numbers}
    if not counts or not set(counts) <= set(numbers):
        return None
    total, classes = sum(counts.values()), sorted(counts, key=numbers.__getitem__)
    shares = {name: counts[name] * num // total for name in classes}
    by_remainder = sorted(classes, key=lambda name: -(counts[name] * num % total))
    for name in by_remainder[: num - sum(shares.values())]:
        shares[name] += 1
    each = torch.tensor([shares[name] for name in classes])
    return torch.tensor([numbers[name] for name in classes]).repeat_interleave(each)


PROMPTS = 10
"""Maximum number of captions of [data] that a preview shows."""


def captions_of_rows(objective: Diffusion, source: Source, num: int) -> Conditions:
    """The captions of `num` rows, evenly spaced over a dataset, read when they are drawn.

    Where the run embeds captions itself, a call is collective.
    """
    captions, online = objective.captions, objective.opened.text
    assert captions is not None
    every = rows_to_show(objective, source)

    def read(numbers: Int64[Tensor, " b"]) -> Given:
        rows = (every.start + numbers.cpu() * len(every) // num).tolist()
        stored = source.read_fields(captions.stored, rows)
        found = {name: value.to(numbers.device) for name, value in stored.items()}
        return captions.given(online.embed(found) if online else found)

    return with_references(objective, source, num, read)


def rows_to_show(objective: Diffusion, source: Source) -> range:
    """The rows of which samples are drawn: with references those of the model's own size."""
    size = objective.model.sample_shape[1:]
    for bucket, rows in enumerate(source.bucket_rows):
        if objective.data.reference and source.bucket_fields(bucket)["latent"].shape[1:] == size:
            return rows
    return range(len(source))


def with_references(
    objective: Diffusion, source: Source, num: int, conditions: Conditions
) -> Conditions:
    """Conditions, with the references of `num` rows, evenly spaced over a dataset with some."""
    if objective.data.reference is None:
        return conditions
    every = rows_to_show(objective, source)

    def read(numbers: Int64[Tensor, " b"]) -> Given:
        rows = (every.start + numbers.cpu() * len(every) // num).tolist()
        found = references_of(objective, source, rows)
        given = {name: value.to(numbers.device) for name, value in found.items()}
        return {**conditions(numbers), **given}

    return read


def references_of(objective: Diffusion, source: Source, rows: Sequence[int]) -> Given:
    """The network's inputs by the references of rows of one size; {} if it is given none."""
    if objective.data.reference is None:
        return {}
    return objective.references(source.read_fields(("reference",), rows))


def prompts_of(
    sampling: SamplingConfig,
    data: LatentFacts,
    tokens: int,
    source: Source,
    folder: Path,
    shown: range,
) -> OpenedData:
    """The prompts of [sampling] and their embeddings; without any, captions of stored rows.

    `tokens`: those of a prompt that the network takes. `shown`: rows to take captions of.
    `folder`: of the run, which may have the embeddings. Raises UserError for another text encoder
    than that of the data.
    """
    # Imported late: the benchmarks train on machines without Pillow.
    from titan_dit.pictures.prompts import open_encoder

    prompts = sampling.prompts
    rows: tuple[int, ...] = ()
    if not prompts:
        row_of = rows_of_captions(source, shown)
        rows = tuple(row_of.values())
        if data.text is None or not data.text.is_online:
            fields = source.read_fields(Captions.takes, list(row_of.values()))
            return OpenedData(prompts=tuple(row_of), fields=fields, rows=rows)
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
    return OpenedData(prompts=prompts, fields=fields, notes=notes, key=key, rows=rows)


def read_prompts(folder: Path, prompts: tuple[str, ...], key: str) -> OpenedData | None:
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
    return OpenedData(prompts=prompts, fields=fields, notes=notes, key=key)


def write_prompts(folder: Path, opened: OpenedData) -> None:
    """Write the prompts' embeddings to the run directory."""
    about = {"key": opened.key, "notes": "\n".join(opened.notes)}
    write_whole(folder / run_files.PROMPTS, safetensors.save(dict(opened.fields), about))


def rows_of_captions(source: Source, shown: range) -> dict[str, int]:
    """The captions of up to PROMPTS rows of `shown` -> the row. UserError if none is text."""
    few = min(len(shown), PROMPTS * PROMPTS)
    rows = [shown[place * len(shown) // few] for place in range(few)]
    row_of: dict[str, int] = {}
    for row, text in zip(rows, source.captions(rows), strict=False):
        row_of.setdefault(text, row)
    if not row_of:
        raise UserError(
            "[sampling] every: the network takes captions, and [data] holds none as text. Set "
            "[sampling] prompts, a list of them, or every = 0."
        )
    texts, num = list(row_of), min(len(row_of), PROMPTS)
    chosen = [texts[place * len(texts) // num] for place in range(num)]
    return {text: row_of[text] for text in chosen}


def shown(
    objective: Diffusion, sampling: SamplingConfig
) -> tuple[Int64[Tensor, " num"], Given, Sequence[str]]:
    """What a preview shows: the class or prompt of each picture, its condition, all names."""
    captions, opened = objective.captions, objective.opened
    if captions is None:
        labels = preview_labels(sampling.num or NUM, objective.num_classes)
        of_classes = {"labels": labels, **references_shown(objective, len(labels))}
        return labels, of_classes, objective.data.class_names
    count = len(opened.prompts)
    num = sampling.num or count * (1 if objective.draws_clips else max(1, NUM // count))
    if num < count:
        raise UserError(
            f"[sampling] num={num} does not show all {count} prompts. Set num to at least "
            f"{count}, or fewer prompts."
        )
    places = spread_labels(num, list(range(count)))
    given: Given = rows_of(captions.given(opened.fields), places)
    rows = [opened.rows[place] for place in places.tolist()] if opened.rows else None
    return places, {**given, **references_shown(objective, num, rows)}, opened.prompts


def references_shown(objective: Diffusion, num: int, rows: Sequence[int] | None = None) -> Given:
    """The references of a preview: those of the captions' `rows`, else of rows evenly spaced."""
    source = objective.opened.source
    if objective.data.reference is None or source is None:
        return {}
    every = rows_to_show(objective, source)
    spread = [every[place * len(every) // num] for place in range(num)]
    return references_of(objective, source, spread if rows is None else rows)


def preview_labels(num: int, num_classes: int) -> Int64[Tensor, " num"]:
    """Labels for a small grid: at most ten classes, so that each has several samples."""
    shown = max(1, min(10, num_classes, num // 4))
    return spread_labels(num, list(range(shown)))


def check(objective: Diffusion, drawing: Drawing, where: str) -> None:
    """Raise UserError on settings that cannot work; `where` formats a key, "[sampling] {}"."""
    sampler = sampler_of(objective.config, drawing.sampler, where.format("sampler"))
    most, channels = objective.most_sampling_steps, objective.channels
    if most is not None and drawing.steps > most:
        raise UserError(
            f"{where.format('steps')}={drawing.steps}: the network is trained with {most} steps. "
            f"Set at most {most}."
        )
    if drawing.shift is not None and objective.shift is None:
        raise UserError(
            f"{where.format('shift')}={drawing.shift:g} is for flows, but [objective] "
            f"name={show(objective.config.name)} has no times to shift. Leave it out."
        )
    if drawing.sampler.startswith(from_diffusers.PREFIX):
        what = f"{where.format('sampler')}={show(drawing.sampler)}"
        process = objective.process(lambda x, timestep: x)
        from_diffusers.check(sampler, process, drawing.steps, what)
    if drawing.cfg_channels is not None and drawing.cfg_channels > channels:
        key = where.format("cfg_channels" if "[" in where else "cfg-channels")
        raise UserError(
            f"{key}={drawing.cfg_channels}: a latent has {channels} channels. "
            f"Set at most {channels}."
        )
    interval = drawing.cfg_interval
    if len(interval) != 2 or not interval[0] < interval[1]:
        key = where.format("cfg_interval" if "[" in where else "cfg-interval")
        raise UserError(
            f"{key}={show(interval)}: give two noise levels from 0 (data) to 1 (noise), the lower "
            "one first, such as 0.1 0.8."
        )


def guidance_of(drawing: Drawing, weak: Conditional | None = None) -> Guidance:
    """The guidance that settings ask for; `weak` is the prediction of a worse network."""
    first, last = drawing.cfg_interval
    return Guidance(
        drawing.cfg_scale, drawing.cfg_channels, (first, last), drawing.cfg_rescale, weak
    )


def generate(
    forward: Forward,
    objective: Diffusion,
    given: Given,
    numbers: Int64[Tensor, " b"],
    *,
    seed: int,
    sampler: Sampler,
    steps: int,
    shift: float | None = None,
    guidance: Guidance = Guidance(),  # noqa: B008 - frozen.
    noise: Float[Tensor, "b n d"] | None = None,
    null: Given | None = None,
    share: DataShare | None = None,
    low: LowExpert | None = None,
    **settings: Any,
) -> Float[Tensor, "b n d"]:
    """Draw one sample per row of a condition, as tokens.

    The noise of a sample depends only on `seed` and on its entry in `numbers`, not on the batch or
    the number of ranks. `noise`: initial noise instead of the seed's. `shift`: of a flow's times;
    None takes that of training. `null`: a condition of each sample to guide away from, in place of
    none. `share`: the data ranks that hold the network together and draw as many samples each.
    `low`: the network below a noise level; `forward` is the one from there up. `settings`: further
    fields of the sampler's `Settings`, such as `eta`.
    """
    device = numbers.device
    if null is None:
        null = objective.condition.null(len(numbers), device)
    channels, shape = objective.channels, objective.model.token_shape

    def predict(x: Tensor, timestep: Tensor, of: Given) -> Tensor:
        static = objective.with_text(of).static(device)
        return forward({"tokens": x, "timestep": timestep, **of}, static).float()

    def guide_by(network: Conditional, scale: float, of: Given, instead: Given) -> Predict:
        each = scales(
            scale,
            guided=channels if guidance.channels is None else guidance.channels,
            outputs=objective.config.output_channels(channels),
            pixels=shape[1] // channels,
            device=device,
        )
        return guided(network, of, instead, each, guidance, objective.noise_level)

    def draw(rows: Tensor | slice, conditions: Sequence[Given]) -> dict[str, Tensor]:
        rng = SampleRNG(seed, numbers[rows])
        of, instead = conditions
        guide = guide_by(predict, guidance.scale, of, instead)
        if low is not None:
            scale = guidance.scale if low.scale is None else low.scale
            below = guide_by(low.predict, scale, of, instead)
            guide = by_noise_level(guide, below, low.boundary, objective.noise_level)
        drawn = sampler(
            objective.process(guide),
            rng.normal("sample", shape) if noise is None else noise[rows],
            Settings(
                steps,
                fresh=lambda step: rng.normal(f"sample/{step}", shape),
                shift=(objective.shift_in(steps) or 1.0) if shift is None else shift,
                keys=lambda: rng.keys("sample/keys"),
                **settings,
            ),
        )
        return {"drawn": drawn}

    null = completed({name: value.to(device) for name, value in null.items()}, given)
    return objective.by_text_length([given, null], draw, share)["drawn"]


def samples(
    forward: Forward,
    objective: Diffusion,
    sampling: SamplingConfig,
    seed: int,
    given: Given,
    numbers: Int64[Tensor, " b"],
    share: DataShare,
) -> Float[Tensor, "b c *size"]:
    """Draw samples in stored units, as [sampling] says; `share` as in `generate`."""
    tokens = generate(
        forward,
        objective,
        given,
        numbers,
        seed=seed,
        sampler=sampler_of(objective.config, sampling.sampler),
        steps=sampling.steps,
        shift=sampling.shift,
        guidance=guidance_of(sampling),
        share=share,
        **chosen(sampling),
    )
    return objective.data.to_stored_units(objective.model.detokenize(tokens))


def preview(
    forward: Forward,
    objective: Diffusion,
    sampling: SamplingConfig,
    seed: int,
    share: DataShare,
    vae: Autoencoder | None = None,
) -> Preview:
    """Draw the samples of [sampling] as one picture; data ranks draw shares, then all-gather.

    Clips are a contact sheet, and an MP4 each in a folder beside it.
    """
    device = share.device
    labels, conditions, names = shown(objective, sampling)
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
    if vae is not None:
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
