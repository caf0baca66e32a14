"""`sample` of a diffusion run: pictures.

Batches are cut by the plan, not by the ranks, and each is a file in OUT.parts until the output is
whole. So any number of ranks draws the same pictures, and a stopped command goes on.
"""

from __future__ import annotations

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
    load_guide,
    prompts_of,
    read_noise,
    vae_of,
    weak_network,
)
from titan_dit.config import dotted_names
from titan_dit.config.section import UserError
from titan_dit.data.latent_facts import shown
from titan_dit.diffusion import conditions, drawing
from titan_dit.diffusion.conditions import Given
from titan_dit.diffusion.guidance import Guidance
from titan_dit.diffusion.objective import Diffusion
from titan_dit.diffusion.samplers import ode
from titan_dit.diffusion.samplers.base import Sampler
from titan_dit.execution import first_of
from titan_dit.interop.tensor_file import not_finite, write_tensors
from titan_dit.models.base import Model
from titan_dit.observe import console
from titan_dit.pictures import output
from titan_dit.pictures.autoencoder import Autoencoder, as_pixels
from titan_dit.pictures.output import draw_grid, to_pixels
from titan_dit.pictures.parts import FinishedParts
from titan_dit.ranks.process_group import Ranks
from titan_dit.system.progress import ProgressLine
from titan_dit.trained_model import TrainedModel

NUM = 100
FILES = (".safetensors", ".png", ".npz")
PARTS = ".parts"
DECODED = 16
"""Pictures that are decoded at once, whatever the batch: other numbers change bits."""


def check(flags: CommonFlags) -> None:
    """Require an output for pictures that is not there yet, unless it is a file."""
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
    labels: Int64[Tensor, " n"]
    """The class of each sample, -1 without one; the number of its prompt, or of its row."""
    captions: CaptionSource | None
    """What is drawn of a network that takes captions."""
    noise: Float[Tensor, "n c h w"] | None
    vae: Autoencoder | None
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
        keys = ("seed", "batch_size", "sampler", "steps", "eta", "cfg_scale", "cfg_channels")
        more: dict[str, Any] = {}  # Parts of older versions go on.
        if self.captions:
            more["captions"] = digest(self.captions.identity.encode())
        if flags.size is not None:
            more["shape"] = list(self.diffusion.model.sample_shape)
        return more | {
            "checkpoint": identity(self.run),
            "weights": self.run.weights,
            "suffix": self.out.suffix,
            **{key: getattr(flags, key) for key in (*keys, "cfg_rescale")},
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
        """The conditions of some samples, and those that guide in place of none."""
        device = self.run.device
        if self.captions is None:
            return {"labels": self.labels[at].to(device)}, None
        given = self.captions.read(torch.arange(len(self.labels))[at])
        negative, null = self.captions.negative, None
        if negative is not None:
            first = torch.zeros(len(self.labels[at]), dtype=torch.int64)
            null = moved(conditions.rows_of(negative, first), device)
        return moved(given, device), null

    def parts(self) -> FinishedParts:
        """The files of the finished batches, beside the output."""
        count = -(-len(self.labels) // self.flags.batch_size)
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
    with told_how_to_go_on(parts), progress:
        for number in missing:
            rows = rows_of(job, number)
            report = partial(progressed, progress, done, len(rows), job)
            parts.write(number, drawn(job, rows, report))
            done += len(rows)
            progress(done)
    ranks.gather(None)
    return parts


@contextmanager
def told_how_to_go_on(parts: FinishedParts) -> Iterator[None]:
    """On Ctrl-C print what is drawn so far and how to continue."""
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
    if flags.size is not None:
        diffusion = at_size(diffusion, flags.size, vae)
    if diffusion.captions is None:
        check_no_prompts(flags)
        names = diffusion.data.class_names
        labels = labels_of(flags.labels, flags.num or NUM, diffusion.num_classes, names)
    else:
        captions = captions or prompts_of(diffusion, flags, run.device)
        labels = captions.numbers
    noise = None
    if flags.noise is not None:
        noise, labels = read_noise(
            Path(flags.noise), diffusion, captions.numbers if captions else None
        )
    guide = None if flags.guide is None else load_guide(flags.guide, run.device, flags.trust)
    weak = None if guide is None else weak_network(guide, diffusion)
    guidance = drawing.guidance_of(flags, weak)
    return Job(run, diffusion, flags, sampler, guidance, guide, labels, captions, noise, vae)


def identity(run: TrainedModel) -> list[str]:
    """Name and digest of a network's checkpoint."""
    files = read_record(run.path)["files"]
    return [run.path.name, digest(repr(sorted(files.items())).encode())]


def described(job: Job) -> str:
    """The console line of what is drawn."""
    guide = f" against {job.guide.path}" if job.guide else ""
    vae = f", decoded by {job.vae.facts} ({job.vae.source})" if job.vae else ""
    return (
        f"sampling {len(job.labels)} from {job.run.path} ({job.run.weights}): "
        f"{job.sampler_name}, {job.flags.steps} steps, cfg_scale {job.flags.cfg_scale:g}"
        f"{guide}, seed {job.flags.seed}{vae}"
    )


def hint_of_units(job: Job) -> str | None:
    """A console warning if the latents may have been scaled before they were stored.

    It decodes stored latents. Those of fast-DiT are scaled already, and no manifest says so.
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
    first = number * job.flags.batch_size
    return range(first, min(first + job.flags.batch_size, len(job.labels)))


@torch.no_grad()
def drawn(job: Job, rows: range, report: Callable[[int], None]) -> dict[str, Tensor]:
    """The tensors of a batch that the output needs, on the CPU."""
    model, device = job.diffusion.model, job.run.device
    at = slice(rows.start, rows.stop)
    given, null = job.conditions(at)
    tokens = drawing.generate(
        Counted(job.run.network, report),
        job.diffusion,
        given,
        torch.arange(rows.start, rows.stop, device=device),
        seed=job.flags.seed,
        sampler=job.sampler,
        steps=job.flags.steps,
        eta=job.flags.eta,
        shift=job.flags.shift,
        guidance=job.guidance,
        noise=None if job.noise is None else model.tokenize(job.noise[at].to(device)),
        null=null,
    )
    samples = job.diffusion.data.to_stored_units(model.detokenize(tokens))
    check_finite(job, rows, samples, "samples")
    found = {}
    if job.keeps_latents or (job.vae is None and job.diffusion.data.value_range is None):
        found["samples"] = samples.cpu()
    if job.vae is not None:
        found["pictures"] = decoded(job, job.vae, rows, samples).cpu()
    elif job.keeps_pictures and job.diffusion.data.value_range is not None:
        found["pictures"] = to_pixels(samples, job.diffusion.data.value_range).cpu()
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


def decoded(
    job: Job, vae: Autoencoder, rows: range, samples: Float[Tensor, "n c h w"]
) -> UInt8[Tensor, "n h w 3"]:
    """Pictures of stored latents, a few at a time."""
    pictures = []
    for first in range(0, len(samples), DECODED):
        values = vae.decoded(samples[first : first + DECODED])
        check_finite(job, rows[first : first + DECODED], values, "decoded samples")
        pictures.append(as_pixels(values))
    return torch.cat(pictures).permute(0, 2, 3, 1).contiguous()


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
            (name, samples) = next(iter(joined(parts).items()))
            if name == "pictures":
                samples = samples.permute(0, 3, 1, 2).float()
            value_range = (0.0, 255.0) if name == "pictures" else None
            draw_grid(job.out, samples, job.labels.tolist(), value_range, names)
        elif job.out.suffix == ".npz":
            first = next(pictures_of(parts))
            shape = (len(job.labels), first.shape[1], first.shape[2], 3)
            output.write_npz(job.out, pictures_of(parts), job.labels, shape)
        else:
            labels, pictures = job.labels.tolist(), pictures_of(parts)
            output.write_folder(job.out, pictures, labels, names, captioned=is_captioned)
    parts.delete()


def pictures_of(parts: FinishedParts) -> Iterator[UInt8[Tensor, "b h w 3"]]:
    """The pictures of every batch."""
    return (tensors["pictures"] for tensors in parts.read())


def joined(parts: FinishedParts) -> dict[str, Tensor]:
    """All batches, joined by name."""
    batches = list(parts.read())
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def digest(data: bytes) -> str:
    """SHA-256, in hex."""
    return hashlib.sha256(data).hexdigest()


class Counted:
    """A network that reports the number of its calls after each."""

    def __init__(self, network: Model, report: Callable[[int], None]) -> None:
        self.network, self.report, self.calls = network, report, 0

    def __call__(self, inputs: Mapping[str, Tensor], static: Mapping[str, Tensor]) -> Tensor:
        """Run the network."""
        output = first_of(self.network(inputs, static))
        self.calls += 1
        self.report(self.calls)
        return output


def progressed(progress: ProgressLine, first: int, size: int, job: Job, calls: int) -> None:
    """Show the samples done: those before this batch, and the batch's share by network calls."""
    # Heun evaluates the network twice in a step; of a sampler from outside it is not known.
    evaluations = job.flags.steps * (2 if job.sampler is ode.heun else 1)
    progress(first + size * min(calls, evaluations) // evaluations)
