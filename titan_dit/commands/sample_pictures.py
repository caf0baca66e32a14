"""`sample` of a diffusion run: pictures.

Batches are cut by the plan, not by the ranks, and each is a file in OUT.parts until the output is
whole. So any number of ranks draws the same pictures, and a stopped command goes on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from titan_dit.checkpoint.record import read_record
from titan_dit.commands.flags import CommonFlags, PictureFlags
from titan_dit.commands.sample_inputs import (
    CaptionSource,
    at_size,
    check_no_prompts,
    labels_of,
    load_other,
    low_expert,
    prompts_of,
    read_noise,
    reference_of,
    vae_of,
    weak_network,
)
from titan_dit.config import dotted_names
from titan_dit.config.section import UserError
from titan_dit.data.latent_facts import shown
from titan_dit.diffusion import conditions, drawing
from titan_dit.diffusion.conditions import Given
from titan_dit.diffusion.guidance import Guidance, LowExpert
from titan_dit.diffusion.objective import Diffusion
from titan_dit.diffusion.samplers.base import Sampler, chosen, planned
from titan_dit.execution import Output, first_of
from titan_dit.interop.tensor_file import not_finite, write_tensors
from titan_dit.observe import console
from titan_dit.pictures import library, output
from titan_dit.pictures.autoencoder import Autoencoder, as_pixels
from titan_dit.pictures.output import draw_grid, to_clips, to_pixels
from titan_dit.pictures.parts import FinishedParts
from titan_dit.ranks.process_group import Ranks
from titan_dit.system.progress import ProgressLine
from titan_dit.trained_model import TrainedModel

NUM, BATCH = 100, 250
FILES = (".safetensors", ".png", ".npz")
PARTS = ".parts"
DECODED = 16
"""Pictures that are decoded at once, whatever the batch: other numbers change bits."""


def check(flags: CommonFlags) -> None:
    """Raise UserError unless --out takes pictures and is not there yet; a file may be replaced."""
    out = Path(flags.out)
    if not flags.out or out.suffix not in (*FILES, ""):
        raise UserError(
            f"--out {flags.out}: name a {', '.join(FILES[:-1])} or {FILES[-1]} file, or a folder."
        )
    if not out.suffix and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} exists. Choose another name, or delete it.")


@dataclass(frozen=True)
class Job:
    """Everything that decides the drawn pictures, and their output."""

    run: TrainedModel
    diffusion: Diffusion
    flags: PictureFlags
    sampler: Sampler
    guidance: Guidance
    guide: TrainedModel | None
    """The network of --guide."""
    low: TrainedModel | None
    """The network of --low."""
    expert: LowExpert | None
    """The prediction, noise-level boundary and guidance scale of `low`."""
    labels: Int64[Tensor, " n"]
    """The class of each sample, -1 without one; the number of its prompt, or of its row."""
    captions: CaptionSource | None
    """Captions to draw; None for a class-conditional network."""
    noise: Float[Tensor, "n c *size"] | None
    vae: Autoencoder | None
    reference: Given
    """The network's inputs by --reference, one row; empty if it is given none."""
    flag: str = "--out"
    """Names the output in errors."""

    @property
    def out(self) -> Path:
        """The file or the folder."""
        return Path(self.flags.out)

    @property
    def sampler_name(self) -> str:
        """Name of the sampler, as --sampler takes it."""
        return drawing.name_of_sampler(self.diffusion.config, self.flags.sampler)

    @property
    def has_clips(self) -> bool:
        """See `Diffusion.draws_clips`."""
        return self.diffusion.draws_clips

    @property
    def fps(self) -> float:
        """Frames per second of clips."""
        return self.flags.fps or self.diffusion.data.fps or drawing.FPS

    @property
    def batch_size(self) -> int:
        """Samples that are drawn at once.

        A clip counts as several: it has the tokens of many pictures.
        """
        return self.flags.batch_size or (1 if self.has_clips else BATCH)

    @property
    def keeps_latents(self) -> bool:
        """True if the output holds samples in stored units."""
        return self.out.suffix == ".safetensors"

    @property
    def keeps_pictures(self) -> bool:
        """True if the output holds pictures of 8 bits."""
        return not self.keeps_latents or self.vae is not None

    def plan(self) -> dict[str, Any]:
        """Everything that the bits of the samples depend on."""
        flags = self.flags
        keys = ("seed", "sampler", "steps", "cfg_scale", "cfg_channels", "cfg_rescale")
        more: dict[str, Any] = {}  # Parts of older versions go on.
        if self.captions:
            more["captions"] = digest(self.captions.identity.encode())
        if flags.size is not None or flags.frames is not None:
            more["shape"] = list(self.diffusion.model.sample_shape)
        if flags.reference is not None:
            more["reference"] = digest(Path(flags.reference).read_bytes())
        if self.low and self.expert:
            more["low"] = [*identity(self.low), self.expert.boundary, self.expert.scale]
        return more | {
            "checkpoint": identity(self.run),
            "weights": self.run.weights,
            "batch_size": self.batch_size,
            "suffix": self.out.suffix,
            **{key: getattr(flags, key) for key in keys},
            **planned(flags),
            "guide": self.guide and identity(self.guide),
            "cfg_interval": list(flags.cfg_interval),
            "shift": self.diffusion.shift_in(flags.steps) if flags.shift is None else flags.shift,
            "labels": digest(self.labels.numpy().tobytes()),
            "noise": "" if self.noise is None else digest(self.noise.numpy().tobytes()),
            "vae": self.vae and self.vae.facts.digest,
            "num": len(self.labels),
        }

    @property
    def names(self) -> Sequence[str]:
        """Names of the classes, or the prompts."""
        return self.captions.names if self.captions else self.diffusion.data.class_names

    def conditions(self, at: slice) -> tuple[Given, Given | None]:
        """(the conditions of some samples, the conditions that guide in place of none)."""
        device = self.run.device
        num = len(self.labels[at])
        reference = {name: value.expand(num, -1, -1) for name, value in self.reference.items()}
        if self.captions is None:
            return {"labels": self.labels[at].to(device), **reference}, None
        given = {**self.captions.read(torch.arange(len(self.labels))[at]), **reference}
        negative, null = self.captions.negative, None
        if negative is not None:
            first = torch.zeros(len(self.labels[at]), dtype=torch.int64)
            null = moved(conditions.rows_of(negative, first), device)
        return moved(given, device), null

    def parts(self) -> FinishedParts:
        """The files of the finished batches, beside the output."""
        count = -(-len(self.labels) // self.batch_size)
        return FinishedParts(
            self.out.with_name(self.out.name + PARTS), self.plan(), count, self.flag
        )


def moved(given: Given, device: torch.device) -> Given:
    """A condition on a device."""
    return {name: value.to(device) for name, value in given.items()}


def main(run: TrainedModel, diffusion: Diffusion, flags: PictureFlags) -> None:
    """Draw this rank's batches; the first rank writes the output. Collective."""
    ranks = Ranks()
    job = job_of(run, diffusion, flags)
    parts = draw(job, ranks)
    ranks.run_on_first(partial(write, job, parts))
    if ranks.is_first:
        console.say(f"wrote {job.out}")


def draw(job: Job, ranks: Ranks) -> FinishedParts:
    """Draw the batches that are missing. Collective; all are there when it returns."""
    parts = job.parts()
    if ranks.is_first:
        for line in dotted_names.origins({"sampler": job.sampler}):
            console.say(line)
        console.say(described(job))
        if hint := hint_of_units(job):
            console.say(hint)
    ranks.run_on_first(parts.open)
    missing = parts.missing(ranks.rank, ranks.count)
    if ranks.is_first and (found := parts.count - len(parts.missing())):
        console.say(f"{found} of {parts.count} batches are in {parts.folder}; drawing the others")
    progress = ProgressLine(sum(len(rows_of(job, number)) for number in missing), "samples")
    done = 0
    with advice_on_interrupt(parts), progress:
        for number in missing:
            rows = rows_of(job, number)
            report = partial(progressed, progress, done, len(rows), job)
            parts.write(number, drawn(job, rows, report))
            done += len(rows)
            progress(done)
    ranks.gather(None)
    return parts


@contextmanager
def advice_on_interrupt(parts: FinishedParts) -> Iterator[None]:
    """On Ctrl-C print the number of finished batches and how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        if Ranks().is_first:
            done = parts.count - len(parts.missing())
            console.say(
                f"stopped: {done} of {parts.count} batches are in {parts.folder}. The same command "
                "goes on."
            )
        raise


def job_of(
    run: TrainedModel,
    diffusion: Diffusion,
    flags: PictureFlags,
    captions: CaptionSource | None = None,
) -> Job:
    """Check the flags and load what they name.

    `captions`: what to draw of a network that takes captions; None: the prompts of the flags.
    """
    drawing.check(diffusion, flags, "--{}")
    sampler = drawing.sampler_of(diffusion.config, flags.sampler, "--sampler")
    # What is checked at once comes before a text encoder is loaded.
    vae = vae_of(diffusion, flags, run.device)
    diffusion = at_size(diffusion, flags, vae)
    check_clips(diffusion, flags)
    of_rows = captions is not None
    if diffusion.captions is None:
        check_no_prompts(flags)
        names = diffusion.data.class_names
        labels = labels_of(flags.labels, flags.num or NUM, diffusion.num_classes, names)
    else:
        captions = captions or prompts_of(diffusion, flags, run.device)
        labels = captions.numbers
    reference = {} if of_rows else reference_of(diffusion, flags, vae, run.device)
    noise = None
    if flags.noise is not None:
        noise, labels = read_noise(
            Path(flags.noise), diffusion, captions.numbers if captions else None
        )
    other = partial(load_other, device=run.device, trust=flags.trust)
    guide = None if flags.guide is None else other(flags.guide, "--guide")
    low = None
    if flags.low is not None:
        low = other(flags.low, "--low", weights=flags.weights, decay=flags.decay)
    weak = None if guide is None else weak_network(guide, diffusion)
    return Job(
        run=run,
        diffusion=diffusion,
        flags=flags,
        sampler=sampler,
        guidance=drawing.guidance_of(flags, weak),
        guide=guide,
        low=low,
        expert=None if low is None else low_expert(low, diffusion, flags),
        labels=labels,
        captions=captions,
        noise=noise,
        vae=vae,
        reference=reference,
    )


def check_clips(diffusion: Diffusion, flags: PictureFlags) -> None:
    """Raise UserError for flags of clips that do not fit the run.

    Flags of clips for pictures, an output that holds no clips, and one of two experts alone.
    """
    for flag, key in (("--boundary", "boundary"), ("--low-cfg-scale", "low_cfg_scale")):
        if flags.low is None and getattr(flags, key) is not None:
            raise UserError(f"{flag} is for two networks: give the second one, --low RUN.")
    if not diffusion.draws_clips:
        for flag, is_given in (("--fps", flags.fps), ("--keep-frames", flags.keep_frames)):
            if is_given:
                raise UserError(f"{flag} is for clips, but pictures are drawn. Leave it out.")
    elif flags.out.endswith(".npz"):
        raise UserError(
            f"--out {flags.out}: ADM's evaluator reads pictures, but the run draws clips. Name a "
            "folder for MP4 files, a .png for a contact sheet, or a .safetensors file."
        )
    elif not Path(flags.out).suffix:
        library.video(f"--out {flags.out}: a folder of clips")


def identity(run: TrainedModel) -> list[str]:
    """Name and digest of a network's checkpoint."""
    files = read_record(run.path)["files"]
    return [run.path.name, digest(repr(sorted(files.items())).encode())]


def described(job: Job) -> str:
    """The console line about the run, the sampler and the number of samples."""
    guide = f" against {job.guide.path}" if job.guide else ""
    if job.low and job.expert:
        guide += f", below t = {job.expert.boundary:g} from {job.low.path}"
    vae = f", decoded by {job.vae.facts} ({job.vae.source})" if job.vae else ""
    return (
        f"sampling {len(job.labels)} from {job.run.path} ({job.run.weights}): "
        f"{job.sampler_name}, {job.flags.steps} steps, cfg_scale {job.flags.cfg_scale:g}"
        f"{guide}, seed {job.flags.seed}{vae}"
    )


def hint_of_units(job: Job) -> str | None:
    """Console warning if the latents may have been scaled before they were stored, else None.

    It decodes stored latents. The latents of fast-DiT are scaled already, and no manifest says so.
    """
    data, vae = job.diffusion.data, job.vae
    if vae is None or data.vae or (data.scale, data.shift) != (1.0, 0.0):
        return None
    if (vae.scale, vae.shift) == (1.0, 0.0):
        return None
    return (
        f"hint    the run's latents have scale 1, but those of {vae.source} {shown(vae.scale)}: if "
        "they were scaled before they were stored, as fast-DiT's are, the pictures are wrong. "
        "Write a .safetensors file, and decode samples / scale + shift"
    )


def rows_of(job: Job, number: int) -> range:
    """The sample numbers of a batch."""
    first = number * job.batch_size
    return range(first, min(first + job.batch_size, len(job.labels)))


@torch.no_grad()
def drawn(job: Job, rows: range, report: Callable[[int], None]) -> dict[str, Tensor]:
    """The tensors of a batch that the output needs, on the CPU."""
    model, device = job.diffusion.model, job.run.device
    at = slice(rows.start, rows.stop)
    given, null = job.conditions(at)
    calls, low = Calls(report), job.expert
    tokens = drawing.generate(
        calls.counted(job.run.network),
        job.diffusion,
        given,
        torch.arange(rows.start, rows.stop, device=device),
        seed=job.flags.seed,
        sampler=job.sampler,
        steps=job.flags.steps,
        shift=job.flags.shift,
        guidance=job.guidance,
        noise=None if job.noise is None else model.tokenize(job.noise[at].to(device)),
        null=null,
        low=low and dataclasses.replace(low, predict=calls.counted(low.predict)),
        **chosen(job.flags),
    )
    samples = job.diffusion.data.to_stored_units(model.detokenize(tokens))
    check_finite(job, rows, samples, "samples")
    found = {}
    if job.keeps_latents or (job.vae is None and job.diffusion.data.value_range is None):
        found["samples"] = samples.cpu()
    if job.vae is not None:
        found["pictures"] = decoded(job, job.vae, rows, samples).cpu()
    elif job.keeps_pictures and job.diffusion.data.value_range is not None:
        found["pictures"] = pixels_of(job, samples, job.diffusion.data.value_range).cpu()
    return found


def check_finite(job: Job, rows: range, values: Float[Tensor, "n ..."], what: str) -> None:
    """Raise UserError that names the samples that are NaN or infinite."""
    if lost := not_finite(values, rows.start):
        raise UserError(
            f"{what} {lost} of {job.run.path} ({job.run.weights}) are NaN or infinite: "
            f"{job.sampler_name}, {job.flags.steps} steps, cfg_scale {job.flags.cfg_scale:g}. "
            "Lower --cfg-scale, raise --steps, or take another --step of the run. Nothing was "
            "written."
        )


def pixels_of(
    job: Job, samples: Float[Tensor, "n c *size"], value_range: tuple[float, float] | None
) -> UInt8[Tensor, "n *shape"]:
    """Pictures [n, h, w, 3] of samples, or clips [n, f, 3, h, w]."""
    if job.has_clips:
        return to_clips(samples, value_range).contiguous()
    return to_pixels(samples.squeeze(2) if samples.ndim == 5 else samples, value_range)


def decoded(
    job: Job, vae: Autoencoder, rows: range, samples: Float[Tensor, "n c *size"]
) -> UInt8[Tensor, "n *shape"]:
    """Pictures [n, h, w, 3] of stored latents, a few at a time, or clips [n, f, 3, h, w]."""
    pictures, at_once = [], 1 if job.has_clips else DECODED
    for first in range(0, len(samples), at_once):
        values = vae.decoded(samples[first : first + at_once])
        check_finite(job, rows[first : first + at_once], values, "decoded samples")
        pictures.append(as_pixels(values))
    whole = torch.cat(pictures)
    if job.has_clips:
        return whole.transpose(1, 2).contiguous()
    return (whole.squeeze(2) if whole.ndim == 5 else whole).permute(0, 2, 3, 1).contiguous()


def write(job: Job, parts: FinishedParts) -> None:
    """Join the batches to the output, and delete them."""
    names, is_captioned = job.names, job.captions is not None
    with parts.writing(job.out):
        job.out.parent.mkdir(parents=True, exist_ok=True)
        if job.keeps_latents:
            tensors, metadata = joined(parts), {}
            if is_captioned:
                metadata["prompts"] = json.dumps(names, ensure_ascii=False)
            numbers = {"prompt" if is_captioned else "labels": job.labels}
            write_tensors(job.out, {**tensors, **numbers}, metadata)
        elif job.out.suffix == ".png":
            draw_png(job, joined(parts))
        elif job.out.suffix == ".npz":
            first = next(pictures_of(parts))
            shape = (len(job.labels), first.shape[1], first.shape[2], 3)
            output.write_npz(job.out, pictures_of(parts), job.labels, shape)
        elif job.has_clips:
            output.write_clips(
                job.out,
                pictures_of(parts),
                job.labels.tolist(),
                names,
                fps=job.fps,
                captioned=is_captioned,
                frames=job.flags.keep_frames,
            )
        else:
            labels, pictures = job.labels.tolist(), pictures_of(parts)
            output.write_folder(job.out, pictures, labels, names, captioned=is_captioned)
    parts.delete()


def draw_png(job: Job, tensors: Mapping[str, Tensor]) -> None:
    """Draw the grid of pictures, or of latents without an autoencoder; of clips, some frames."""
    labels, pixels = job.labels.tolist(), tensors.get("pictures")
    if job.has_clips:
        clips = to_clips(tensors["samples"], None) if pixels is None else pixels
        output.draw_contact_sheet(job.out, clips, labels, job.names)
        return
    pixels = pixels_of(job, tensors["samples"], None) if pixels is None else pixels
    draw_grid(job.out, pixels.permute(0, 3, 1, 2), labels, drawing.PIXELS, job.names)


def pictures_of(parts: FinishedParts) -> Iterator[UInt8[Tensor, "b *shape"]]:
    """The pictures, or clips, of every batch."""
    return (tensors["pictures"] for tensors in parts.read())


def joined(parts: FinishedParts) -> dict[str, Tensor]:
    """All batches, joined by name."""
    batches = list(parts.read())
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def digest(data: bytes) -> str:
    """SHA-256, in hex."""
    return hashlib.sha256(data).hexdigest()


class Calls:
    """Reports the number of calls of networks after each."""

    def __init__(self, report: Callable[[int], None]) -> None:
        self.report, self.number = report, 0

    def counted(self, network: Callable[..., Output]) -> Callable[..., Tensor]:
        """Wrap a network's forward so that its calls are counted."""

        def run(*given: Any) -> Tensor:
            output = first_of(network(*given))
            self.number += 1
            self.report(self.number)
            return output

        return run


def progressed(progress: ProgressLine, first: int, size: int, job: Job, calls: int) -> None:
    """Show the samples done: all of earlier batches, and this batch's share by network calls."""
    # A sampler from outside may not say how often it calls the network.
    evaluations = job.flags.steps * getattr(job.sampler, "evaluations", 1)
    progress(first + size * min(calls, evaluations) // evaluations)
