"""`evaluate --reference`: how near the pictures that a run draws are to real ones.

Each rank holds the whole network, as in `sample`, and draws and scores its share. Drawn batches lie
in a folder beside the results until these are written: the same command goes on from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from titan_dit.checkpoint.record import read_record
from titan_dit.checkpoint.run_path import find_checkpoint
from titan_dit.checkpoint.store import location
from titan_dit.commands import results_file, sample_pictures
from titan_dit.commands.flags.evaluate import Options, ReferenceFlags
from titan_dit.commands.flags.sample import DrawingFlags, PictureFlags
from titan_dit.commands.results_file import new_file
from titan_dit.commands.sample_inputs import NO_VAE
from titan_dit.commands.sample_pictures import Job, pictures_of
from titan_dit.config.section import Section, UserError
from titan_dit.data.class_labels import few
from titan_dit.diffusion import drawing
from titan_dit.diffusion.objective import Diffusion
from titan_dit.launcher.ranks import Ranks
from titan_dit.observe import console
from titan_dit.pictures import output
from titan_dit.pictures.parts import Parts
from titan_dit.scores import features, pictures, reference, score
from titan_dit.scores.features import Features
from titan_dit.scores.pictures import Pictures
from titan_dit.scores.reference import Reference
from titan_dit.scores.score import Described
from titan_dit.trained_model import load_trained

BATCH = 250
ALL = "all"
DRAWS = "evaluation"
"""Name of the drawn pictures, if no output is named."""


def check(options: Options, keys: Sequence[str]) -> bool:
    """True if pictures are scored, False if a loss; UserError if the flags do not say which."""
    if not options.reference:
        given = [*changed(options, ReferenceFlags), *changed(options, DrawingFlags)]
        if given:
            raise UserError(
                f"--{given[0].replace('_', '-')} is for pictures: give --reference, real pictures "
                "to compare them with."
            )
        if not options.run:
            raise UserError("--run is missing: give a run directory, such as outputs/digits.")
        return False
    if bool(options.run) == bool(options.samples):
        raise UserError("--reference compares one set of pictures: give --run or --samples.")
    if keys:
        raise UserError(
            f"{keys[0]} is a key of the config, which --reference does not take: each rank draws "
            "with the whole network."
        )
    check_outputs(options)
    if options.samples and options.save_samples:
        raise UserError("--save-samples: --samples are saved already. Leave it out.")
    return True


def check_outputs(options: Options) -> None:
    """Refuse names of results before anything is drawn."""
    for name in ("out", "save_samples", "save_reference"):
        value = getattr(options, name)
        if not value:
            continue
        file, flag = Path(value), f"--{name.replace('_', '-')} {value}"
        if name != "out" and file.suffix != ".npz":
            raise UserError(f"{flag}: name a .npz file.")
        if file.is_dir():
            raise UserError(f"{flag} is a folder. Name a file.")


def changed(options: Options, kind: type[Section]) -> list[str]:
    """Flags of a kind with another value than their default."""
    return [f.name for f in dataclasses.fields(kind) if getattr(options, f.name) != f.default]


@dataclass(frozen=True)
class Scoring:
    """How two sets of pictures are compared."""

    options: Options
    network: Features
    names: Sequence[str]
    """The metrics."""

    def check(self, count: int, real: Reference | None = None) -> None:
        """Raise UserError unless the metrics are known and there are enough pictures."""
        numbers = reference.counts(real) if real else {}
        score.check(self.names, count, numbers, f"--metrics {self.options.metrics}")

    def reference(self, size: int) -> Reference:
        """The pictures of --reference, cropped to `size`, or their moments."""
        path, keeps = self.options.reference, self.options.save_reference
        score.check_network(self.network, self.names, size, f"--metrics {self.options.metrics}")
        found = reference.open_reference(path, size, self.network, self.names, "--reference")
        if keeps and (not isinstance(found, Pictures) or found.moments is not None):
            raise UserError(f"--save-reference: --reference {path} holds moments already.")
        return found

    def scores(self, drawn: Pictures, real: Reference) -> dict[str, Any] | None:
        """The metrics, on the first rank; None on the others. Collective."""
        of_real = self.described(real)
        of_drawn = score.describe(self.network, drawn, self.names)
        if of_drawn is None or of_real is None:
            return None
        return score.score(of_drawn, of_real, self.names, self.network.name)

    def described(self, real: Reference) -> Described | None:
        """The reference's features, and its moments as a file if they are to be kept."""
        found = reference.describe_reference(self.network, real, self.names)
        file = self.options.save_reference

        def save() -> None:
            if file and found is not None:
                assert isinstance(real, Pictures)
                size = real.read(range(1)).shape[1]
                with new_file("--save-reference", Path(file)) as aside, aside.open("wb") as opened:
                    reference.save_moments(opened, found, self.network, size)

        Ranks().run_on_first(save)
        return found

    def about(self, drawn: Pictures, real: Reference) -> dict[str, Any]:
        """What the scores are of. Reads the pictures again for their digests."""
        options, network = self.options, self.network
        found = {
            "samples": drawn.count,
            "samples_digest": drawn.digest(),
            "features": network.name,
            "features_digest": network.digest,
            "reference": options.reference,
        }
        if not isinstance(real, Pictures):
            return {**found, "reference_digest": self.digest_of_file()}
        found["reference_count"] = real.count
        if real.moments is None:
            return {**found, "reference_digest": real.digest()}
        moments = "mu and sigma of the file"
        if real.moments.count != reference.UNKNOWN:
            moments += f", of {real.moments.count} pictures"
        return {**found, "reference_moments": moments, "reference_digest": self.digest_of_file()}

    def digest_of_file(self) -> str:
        """SHA-256 of a reference that is a file."""
        return pictures.digest_of_file(Path(self.options.reference).expanduser())


def main(options: Options, device: torch.device) -> None:
    """Draw or read the pictures, score them, write the results. Collective."""
    network = features.load(options.features, options.feature_weights, device)
    names = [name.strip() for name in options.metrics.split(",")]
    scoring = Scoring(options, network, names)
    if options.run:
        of_run(scoring, job_of(options, device))
    else:
        of_samples(scoring)


def of_run(scoring: Scoring, job: Job) -> None:
    """Draw a run's pictures and score them. Collective."""
    ranks, num = Ranks(), len(job.labels)
    scoring.check(num)
    real = scoring.reference(size_of(job))
    scoring.check(num, real)
    if isinstance(real, Pictures):
        job, labels = like_reference(job, real)
    else:
        labels = job.flags.labels
    parts = sample_pictures.draw(job, ranks)
    ranks.run_on_first(partial(save_samples, job, parts, scoring.options))
    drawn = drawn_pictures(job, parts)
    scores = scoring.scores(drawn, real)
    # Not collective: metrics and digests of many pictures would keep the other ranks waiting.
    if scores is not None:
        report(about_run(job, labels), scoring.about(drawn, real), scores, scoring.options)
        parts.delete()


def of_samples(scoring: Scoring) -> None:
    """Score the pictures of --samples. Collective."""
    drawn = given_pictures(scoring.options)
    _, height, width, _ = drawn.read(range(1)).shape
    if height != width:
        raise UserError(
            f"--samples {scoring.options.samples}: {width} x {height} pixels. Crop them to squares."
        )
    real = scoring.reference(height)
    scoring.check(drawn.count, real)
    if (hint := hint_of_formats(drawn, real)) and Ranks().is_first:
        console.say(hint)
    scores = scoring.scores(drawn, real)
    if scores is not None:
        report({}, scoring.about(drawn, real), scores, scoring.options)


def hint_of_formats(drawn: Pictures, real: Reference) -> str | None:
    """A console warning if one set was compressed with loss and the other was not, or otherwise."""
    if not isinstance(real, Pictures) or not drawn.formats or not real.formats:
        return None
    if drawn.formats == real.formats:
        return None
    return (
        f"hint    the reference is {' and '.join(real.formats)}, the samples are "
        f"{' and '.join(drawn.formats)}: compression alone changes the scores. Compare pictures of "
        "one format"
    )


def job_of(options: Options, device: torch.device) -> Job:
    """The drawing of a run's pictures. Collective."""
    # One rank looks: a run that trains may save another checkpoint meanwhile.
    first = Ranks().run_on_first
    path = first(lambda: find_checkpoint(location(options.run), options.step))
    run = load_trained(path, options.weights, options.decay, device, options.trust)
    if not isinstance(run.objective, Diffusion):
        raise UserError(
            f"--reference: {path} was trained with {type(run.objective).__name__} and draws no "
            "pictures. Leave it out for the validation loss."
        )
    data = run.objective.data
    if data.value_range is None and (options.vae or data.vae_source) in ("", NO_VAE):
        raise UserError(
            "--reference is compared with pictures, but the run draws latents: give --vae DIR, the "
            "autoencoder that made them."
        )
    base = Path(options.out or DRAWS)
    given = {f.name: getattr(options, f.name) for f in dataclasses.fields(DrawingFlags)}
    flags = PictureFlags(
        run=options.run,
        out=options.save_samples or str(base.with_name(f"{base.stem}-samples.npz")),
        num=options.num,
        seed=options.seed,
        batch_size=options.batch_size or BATCH,
        **given,
    )
    job = sample_pictures.job_of(run, run.objective, flags)
    flag = "--save-samples" if options.save_samples else "--out"
    return dataclasses.replace(job, flag=flag)


def like_reference(job: Job, real: Pictures) -> tuple[Job, str]:
    """The job with the reference's proportions of classes, unless --labels asks for others.

    And what the results say of the labels.
    """
    if job.flags.labels == ALL and real.classes:
        diffusion, num = job.diffusion, len(job.labels)
        classes, names = diffusion.model.num_classes, diffusion.data.class_names
        labels = drawing.labels_like(real.classes, num, classes, names)
        if labels is not None:
            return dataclasses.replace(job, labels=labels), "as the reference"
        if Ranks().is_first:
            console.say(
                f"the reference has other classes than the run ({few(list(real.classes))}): all of "
                "the run's are drawn, evenly"
            )
    return job, job.flags.labels


def size_of(job: Job) -> int:
    """Width and height of the drawn pictures."""
    _, height, _ = job.diffusion.model.sample_shape
    return height * (job.vae.facts.factor if job.vae else 1)


def drawn_pictures(job: Job, parts: Parts) -> Pictures:
    """The drawn pictures, a part in memory at a time."""
    size = job.flags.batch_size
    part = lru_cache(2)(lambda number: parts.part(number)["pictures"])

    def read(rows: range) -> torch.Tensor:
        wanted = range(rows.start // size, (rows.stop - 1) // size + 1)
        whole = torch.cat([part(number) for number in wanted])
        first = rows.start - wanted[0] * size
        return whole[first : first + len(rows)]

    return Pictures(len(job.labels), read, lambda: parts.digest, f"{len(job.labels):,} drawn")


def given_pictures(options: Options) -> Pictures:
    """The pictures of --samples; those of a folder keep their size, which all share."""
    path = Path(options.samples).expanduser()
    if not path.is_dir():
        return pictures.of_npz(path, "--samples", labelled=False)
    return pictures.of_folder(path, None, "--samples")


def about_run(job: Job, labels: str) -> dict[str, Any]:
    """What the drawn pictures depend on."""
    record = read_record(job.run.path)
    kept = ("cfg_scale", "cfg_channels", "cfg_interval", "cfg_rescale", "eta")
    return {
        "checkpoint": str(job.run.path),
        "step": record["step"],
        "weights": job.run.weights,
        "sampler": job.sampler_name,
        "sampling_steps": job.flags.steps,
        **{name: getattr(job.flags, name) for name in kept},
        "guide": job.guide and str(job.guide.path),
        "labels": labels,
        "seed": job.flags.seed,
        "batch_size": job.flags.batch_size,
        "vae": job.vae and f"{job.vae.source} {job.vae.facts.digest}",
    }


def save_samples(job: Job, parts: Parts, options: Options) -> None:
    """Write the drawn pictures to --save-samples, if it is given."""
    if options.save_samples:
        first = parts.part(0)["pictures"]
        shape = (len(job.labels), first.shape[1], first.shape[2], 3)
        with parts.writing(job.out):
            output.write_npz(job.out, pictures_of(parts), job.labels, shape)


def report(
    run: dict[str, Any], about: dict[str, Any], scores: dict[str, Any], options: Options
) -> None:
    """Print the scores, and write all results as JSON."""
    what = run.get("checkpoint") or options.samples
    of_moments = f" (FID: {about['reference_moments']})" if "reference_moments" in about else ""
    console.say(
        f"{what}: {about['samples']:,} pictures against {about['reference']}{of_moments}, features "
        f"of {about['features']}"
    )
    results_file.report(run | about | scores, scores, options.out)
