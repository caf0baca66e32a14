"""`python -m titan_dit evaluate`: score a trained run.

Its loss on the validation set, in any layout; with --reference, how near the pictures that it
draws are to real ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from titan_dit.build import build
from titan_dit.checkpoint.record import read_record
from titan_dit.checkpoint.run_checkpoints import find_checkpoint
from titan_dit.checkpoint.saved_weights import Weights
from titan_dit.checkpoint.store import Location, location
from titan_dit.checks.device import replayable_precision
from titan_dit.commands import results_file, sample_pictures, train
from titan_dit.commands.flags import DrawingFlags, EvaluateFlags, PictureFlags, ReferenceFlags
from titan_dit.commands.results_file import new_file
from titan_dit.commands.sample_inputs import CaptionSource
from titan_dit.commands.sample_pictures import Job, pictures_of
from titan_dit.config import catalog, config_file, dotted_names, flags
from titan_dit.config.job import JobConfig
from titan_dit.config.section import Section, UserError, few
from titan_dit.data.base import Source
from titan_dit.data.latent_facts import LatentFacts
from titan_dit.data.manifest import file_digest
from titan_dit.diffusion import row_conditions
from titan_dit.diffusion.base import has_clips
from titan_dit.diffusion.objective import Diffusion
from titan_dit.diffusion.samplers.base import chosen
from titan_dit.objectives.base import DataShare, Placement
from titan_dit.observe import console
from titan_dit.opening import (
    open_objective,
    open_source,
    plan_buckets,
    plan_run,
    rows_held_out,
    rows_of_a_rank,
)
from titan_dit.parallel.mesh import Mesh, solve
from titan_dit.pictures import output
from titan_dit.pictures.parts import FinishedParts
from titan_dit.pictures.pixels import NO_VAE
from titan_dit.ranks import process_group
from titan_dit.ranks.process_group import Ranks, World
from titan_dit.scores import features, pictures, reference, score
from titan_dit.scores.features import Features
from titan_dit.scores.pictures import Pictures
from titan_dit.scores.reference import Reference
from titan_dit.scores.score import Statistics
from titan_dit.trained_model import device_of, load_trained
from titan_dit.validation.validation_set import PREFIX, ValidationSet, Validator, open_set

ALL = "all"
AS_DATA = "the captions of the data"
"""Value of `labels` in the results of a run that takes captions."""
DRAWS = "evaluation"
"""Name of the drawn pictures, if no output is named."""


def check_pictures(options: EvaluateFlags, keys: Sequence[str]) -> bool:
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
    if others := [key for key in keys if key.startswith("--") and not is_of_data(key)]:
        raise UserError(
            f"{others[0]} is a key of the config, which --reference does not take: each rank draws "
            "with the whole network. Leave it out."
        )
    if options.samples and (data := [key for key in keys if is_of_data(key)]):
        raise UserError(f"{data[0]} is for --run: --samples are read as they are. Leave it out.")
    check_outputs(options)
    if options.samples and options.save_samples:
        raise UserError("--save-samples: --samples are saved already. Leave it out.")
    return True


def is_of_data(key: str) -> bool:
    """True for a flag of [data], from which a network of captions takes them."""
    return key.startswith("--data.")


def check_outputs(options: EvaluateFlags) -> None:
    """Raise UserError for wrong names of results, before anything is drawn."""
    for name in ("out", "save_samples", "save_reference"):
        value = getattr(options, name)
        if not value:
            continue
        file, flag = Path(value), f"--{name.replace('_', '-')} {value}"
        if name != "out" and file.suffix != ".npz":
            raise UserError(f"{flag}: name a .npz file.")
        if file.is_dir():
            raise UserError(f"{flag} is a folder. Name a file.")


def changed(options: EvaluateFlags, kind: type[Section]) -> list[str]:
    """Flags of a kind with another value than their default."""
    return [f.name for f in dataclasses.fields(kind) if getattr(options, f.name) != f.default]


@dataclass(frozen=True)
class Scoring:
    """A comparison of two sets of pictures: features and metrics."""

    options: EvaluateFlags
    network: Features
    names: Sequence[str]
    """The metrics."""

    def check(self, count: int, real: Reference | None = None) -> None:
        """Raise UserError unless the metrics are known and there are enough pictures."""
        numbers = reference.counts(real) if real else {}
        score.check_metrics(self.names, count, numbers, f"--metrics {self.options.metrics}")

    def reference(self, size: int) -> Reference:
        """The pictures of --reference, cropped to `size`, or their moments."""
        path, keeps = self.options.reference, self.options.save_reference
        score.check_network(self.network, self.names, size, f"--metrics {self.options.metrics}")
        found = reference.open_reference(path, size, self.network, self.names, "--reference")
        if keeps and (not isinstance(found, Pictures) or found.moments is not None):
            raise UserError(
                f"--save-reference: --reference {path} holds moments already. Leave it out."
            )
        return found

    def scores(self, drawn: Pictures, real: Reference) -> dict[str, Any] | None:
        """The metrics, on the first rank; None on the others. Collective."""
        of_real = self.described(real)
        of_drawn = score.compute_statistics(self.network, drawn, self.names)
        if of_drawn is None or of_real is None:
            return None
        return score.score(of_drawn, of_real, self.names, self.network.name)

    def described(self, real: Reference) -> Statistics | None:
        """The reference's features, and its moments as a file if they are to be kept."""
        found = reference.reference_statistics(self.network, real, self.names)
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
        """Origin of the scores, as JSON. Reads the pictures again for their digests."""
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
        return file_digest(Path(self.options.reference).expanduser())


def score_pictures(options: EvaluateFlags, device: torch.device, keys: Sequence[str] = ()) -> None:
    """Draw or read the pictures, score them, write the results. Collective."""
    network = features.load(options.features, options.feature_weights, device)
    names = [name.strip() for name in options.metrics.split(",")]
    scoring = Scoring(options, network, names)
    if options.run:
        of_run(scoring, job_of(options, device, keys))
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
        labels = AS_DATA if job.captions else job.flags.labels
    parts = sample_pictures.draw(job, ranks)
    ranks.run_on_first(partial(save_samples, job, parts, scoring.options))
    drawn = drawn_pictures(job, parts)
    scores = scoring.scores(drawn, real)
    # Not collective: metrics and digests of many pictures would keep the other ranks waiting.
    if scores is not None:
        report_scores(about_run(job, labels), scoring.about(drawn, real), scores, scoring.options)
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
        report_scores({}, scoring.about(drawn, real), scores, scoring.options)


def hint_of_formats(drawn: Pictures, real: Reference) -> str | None:
    """Console warning if the two sets have different file formats; None if equal or unknown."""
    if not isinstance(real, Pictures) or not drawn.formats or not real.formats:
        return None
    if drawn.formats == real.formats:
        return None
    return (
        f"hint    the reference is {' and '.join(real.formats)}, the samples are "
        f"{' and '.join(drawn.formats)}: compression alone changes the scores. Compare pictures of "
        "one format"
    )


def job_of(options: EvaluateFlags, device: torch.device, keys: Sequence[str]) -> Job:
    """The drawing of a run's pictures. Collective.

    Raises UserError for a run that draws no pictures.
    """
    # One rank looks: a run that trains may save another checkpoint meanwhile.
    first = Ranks().run_on_first
    path = first(lambda: find_checkpoint(location(options.run), options.step))
    run = load_trained(path, options.weights, options.decay, device, options.trust)
    if not isinstance(run.objective, Diffusion):
        raise UserError(
            f"--reference: {path} was trained with {type(run.objective).__name__} and draws no "
            "pictures. Leave it out for the validation loss."
        )
    if has_clips(run.objective.model):
        raise UserError(
            f"--reference compares pictures, but {path} draws clips. Leave it out for the "
            "validation loss."
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
        batch_size=options.batch_size,
        **given,
    )
    captions = captions_of_rows(path, run.objective, options, keys)
    job = sample_pictures.job_of(run, run.objective, flags, captions)
    flag = "--save-samples" if options.save_samples else "--out"
    return dataclasses.replace(job, flag=flag)


def captions_of_rows(
    path: Location,
    diffusion: Diffusion,
    options: EvaluateFlags,
    keys: Sequence[str],
) -> CaptionSource | None:
    """The stored captions of rows evenly spaced over [data]; None of a run of classes. Collective.

    Raises UserError for --labels, and for captions by another text encoder.
    """
    if diffusion.captions is None:
        if keys:
            raise UserError(f"{keys[0]}: the run draws classes, and reads no data. Leave it out.")
        if diffusion.data.reference is not None:
            raise UserError(
                f"--reference: {path} draws classes from {diffusion.data.reference}, and evaluate "
                "reads references beside captions only. Set [fid] in the run, or leave --reference "
                "out for the validation loss."
            )
        return None
    if options.labels != ALL:
        raise UserError(
            f"--labels {options.labels}: the run was trained on captions, not on classes. Leave it "
            "out: the captions of its [data] are drawn."
        )
    record = Ranks().run_on_first(lambda: read_record(path))
    tables = config_file.of_record(record)
    dotted_names.check_trusted(tables, f"--run {path}", options.trust, ("data",))
    config = config_of(record, keys, Ranks().count)
    source = open_source(config)
    facts = source.facts
    if not isinstance(facts, LatentFacts) or facts.text != diffusion.data.text:
        theirs = facts.text if isinstance(facts, LatentFacts) else None
        raise UserError(
            f"[data] holds embeddings of captions by {theirs}, but {path} was trained with "
            f"{diffusion.data.text}. Restore the dataset, or give it: --data.path DIR."
        )
    diffusion.open_text(config.text)
    diffusion.place_frozen(Placement.alone(device_of(options.device)), 0)
    num, shown = options.num, row_conditions.rows_to_show(diffusion, source)
    return CaptionSource(
        numbers=shown.start + torch.arange(num) * len(shown) // num,
        read=row_conditions.captions_of_rows(diffusion, source, num),
        identity=f"{num} rows of {facts.digest} {facts.text_digest}",
    )


def like_reference(job: Job, real: Pictures) -> tuple[Job, str]:
    """The job with the reference's proportions of classes, unless --labels asks for others.

    And what the results say of the labels.
    """
    if job.captions:
        return job, AS_DATA
    if job.flags.labels == ALL and real.classes:
        diffusion, num = job.diffusion, len(job.labels)
        classes, names = diffusion.num_classes, diffusion.data.class_names
        labels = row_conditions.labels_like(real.classes, num, classes, names)
        if labels is not None:
            return dataclasses.replace(job, labels=labels), "as the reference"
        if Ranks().is_first:
            console.say(
                f"the reference has other classes than the run ({few(list(real.classes))}): all of "
                "the run's are drawn, evenly"
            )
    return job, job.flags.labels


def size_of(job: Job) -> int:
    """Width and height of the drawn pictures. Raises UserError unless they are square."""
    _, height, width = job.diffusion.model.sample_shape
    if height != width:
        raise UserError(
            f"--reference compares squares, but {job.run.path} draws samples of {height} x {width} "
            "(height x width). Evaluate its loss, without --reference."
        )
    return height * (job.vae.facts.factor if job.vae else 1)


def drawn_pictures(job: Job, parts: FinishedParts) -> Pictures:
    """The drawn pictures, a part in memory at a time."""
    size = job.batch_size
    part = lru_cache(2)(lambda number: parts.part(number)["pictures"])

    def read(rows: range) -> torch.Tensor:
        wanted = range(rows.start // size, (rows.stop - 1) // size + 1)
        whole = torch.cat([part(number) for number in wanted])
        first = rows.start - wanted[0] * size
        return whole[first : first + len(rows)]

    return Pictures(len(job.labels), read, lambda: parts.digest, f"{len(job.labels):,} drawn")


def given_pictures(options: EvaluateFlags) -> Pictures:
    """The pictures of --samples. Pictures of a folder keep their size, which must be equal."""
    path = Path(options.samples).expanduser()
    if not path.is_dir():
        return pictures.open_npz(path, "--samples", labelled=False)
    return pictures.open_folder(path, None, "--samples")


def about_run(job: Job, labels: str) -> dict[str, Any]:
    """Origin of the drawn pictures, as JSON: checkpoint, sampler, guidance, labels."""
    record = read_record(job.run.path)
    kept = ("cfg_scale", "cfg_channels", "cfg_interval", "cfg_rescale")
    return {
        "checkpoint": str(job.run.path),
        "step": record["step"],
        "weights": job.run.weights,
        "sampler": job.sampler_name,
        "sampling_steps": job.flags.steps,
        **{name: getattr(job.flags, name) for name in kept},
        **chosen(job.flags),
        "guide": job.guide and str(job.guide.path),
        "labels": labels,
        "seed": job.flags.seed,
        "batch_size": job.batch_size,
        "vae": job.vae and f"{job.vae.source} {job.vae.facts.digest}",
    }


def save_samples(job: Job, parts: FinishedParts, options: EvaluateFlags) -> None:
    """Write the drawn pictures to --save-samples, if it is given."""
    if options.save_samples:
        first = parts.part(0)["pictures"]
        shape = (len(job.labels), first.shape[1], first.shape[2], 3)
        with parts.writing(job.out):
            output.write_npz(job.out, pictures_of(parts), job.labels, shape)


def report_scores(
    run: dict[str, Any], about: dict[str, Any], scores: dict[str, Any], options: EvaluateFlags
) -> None:
    """Print the scores, and write all results as JSON."""
    what = run.get("checkpoint") or options.samples
    of_moments = f" (FID: {about['reference_moments']})" if "reference_moments" in about else ""
    console.say(
        f"{what}: {about['samples']:,} pictures against {about['reference']}{of_moments}, features "
        f"of {about['features']}"
    )
    results_file.report(run | about | scores, scores, options.out)


OF_RUN = ("job", "model", "objective", "data", "text", "precision", "ema", "validation")
"""Sections that the run decides. Layout, compilation and the rest are those of the command line."""
IMPORTED = ("model", "objective", "data", "parallel")
"""Sections whose names may be imported from the run's modules."""
BATCH = 16
WHAT_MODEL_IS = ("tensor_plan",)
"""Keys of [parallel] that belong to the model."""


def main(options: EvaluateFlags, keys: Sequence[str]) -> None:
    """Launch the ranks, or be one of them."""
    if options.out and Path(options.out).suffix != ".json":
        raise UserError(f"--out {options.out}: name a .json file.")
    scores_pictures = check_pictures(options, keys)
    train.start_ranks(gpus=(options.device or "cuda") == "cuda")
    with process_group.start(device_of(options.device).type) as world:
        if scores_pictures:
            score_pictures(options, world.device, keys)
            return
        found = evaluate(options, keys, world)
        if world.is_first:
            report(found, options.out)


def evaluate(options: EvaluateFlags, keys: Sequence[str], world: World) -> dict[str, Any]:
    """The results: what was scored, and `validation_loss` and others. Collective."""
    first = Ranks().run_on_first
    path = first(lambda: find_checkpoint(location(options.run), options.step))
    batch_size = options.batch_size or BATCH
    record = first(lambda: read_record(path))
    tables = config_file.of_record(record)
    dotted_names.check_trusted(tables, f"--run {path}", options.trust, IMPORTED)
    config = config_of(record, keys, world.size)
    if world.is_first:
        own = ("model", "objective", "data")
        for line in dotted_names.origins({name: getattr(config, name) for name in own}):
            console.say(line)
    size = solve(config.parallel, world.size)
    # A pipeline runs as many microbatches at once as it has stages.
    config = replace(
        config,
        precision=replayable_precision(config.precision, world.device),
        training=replace(
            config.training,
            microbatch_size=batch_size,
            global_batch_size=batch_size * size.pp * size.data,
        ),
    )
    plan = plan_run(config, world.size, device=world.device)
    source = open_source(config)
    plan = plan_buckets(config, plan, source)
    objective = open_objective(config, plan, source)
    validation = validation_set(path, record, config, source)
    mesh = Mesh(plan.sizes, world.device.type)
    built = build(plan, objective, mesh, world.device)
    tensors = {name: p.detach() for name, p in built.parameters.items()}
    saved = Weights(path, record, options.weights, options.decay)
    saved.load(tensors)
    share = DataShare(world.device, mesh.data_rank, mesh.sizes.data, mesh.gather_over_data)
    found = Validator(
        validation_set=validation,
        objective=objective,
        executor=built.executor,
        share=share,
        seed=config.job.seed,
        batch_sizes=rows_of_a_rank(plan, source),
    ).losses()
    about = {"checkpoint": str(path), "step": record["step"], "weights": saved.what}
    where = {
        "samples": len(validation.rows),
        "layout": str(mesh.sizes),
        "device": world.device.type,
    }
    return about | where | found


def config_of(record: Mapping[str, Any], keys: Sequence[str], num_ranks: int) -> JobConfig:
    """The run's model, objective, data and precision, with the keys of the command line."""
    tables = config_file.of_record(record)
    kept = {name: dict(tables[name]) for name in OF_RUN if name in tables}
    parallel = tables.get("parallel", {})
    kept["parallel"] = {key: parallel[key] for key in WHAT_MODEL_IS if key in parallel}
    kept["training"] = {"steps": 1, "global_batch_size": num_ranks}
    kept.get("job", {}).pop("hooks", None)
    kept.setdefault("validation", {})["every"] = 0
    given = flags.split(["--config", "the run's", *keys], (*OF_RUN, "parallel", "pipeline"))[1]
    config = config_file.build(
        config_file.overridden(kept, given, catalog.variant), catalog.variant
    )
    return replace(config, job=config.job.settled())


def validation_set(
    path: Location, record: Mapping[str, Any], config: JobConfig, source: Source
) -> ValidationSet:
    """The validation set of the run, or of --validation.path. Collective."""
    validation = config.validation
    if not (validation.path or config.data.has_validation_part):
        check_held_out(path, record, validation.held_out_of(has_part=False), source)
    held_out = rows_held_out(config, source)
    enabled = replace(validation, every=1)
    found = open_set(enabled, config.data, source, held_out, config.job, config.text)
    assert found is not None
    return found


def check_held_out(path: Location, record: Mapping[str, Any], num: int, source: Source) -> None:
    """Raise UserError for rows of [data] that the run has trained on."""
    before = config_file.of_record(record).get("validation", {})
    of_run = 0 if before.get("path") else before.get("samples", 0)
    if not of_run:
        raise UserError(
            f"--run {path} has held out no samples of its [data] to score. Give another dataset: "
            "--validation.path DIR. Pictures that it draws are scored by --reference DIR."
        )
    if num != of_run:
        raise UserError(
            f"--validation.samples {num}: {path} has held out {of_run} samples and trained on all "
            "others. Leave it out, or give another dataset: --validation.path DIR."
        )
    if source.facts.digest != record["data"].get("digest", ""):
        raise UserError(
            f"[data] differs from the dataset that {path} was trained on (another digest), so its "
            "held-out samples are not known. Restore it, or give --validation.path DIR."
        )


def report(found: Mapping[str, Any], out: str | None) -> None:
    """Print the results, and write them as JSON."""
    console.say(
        f"{found['checkpoint']} ({found['weights']}): {found['samples']:,} samples, "
        f"{found['layout']} on {found['device']}"
    )
    scores = {name: value for name, value in found.items() if name.startswith(PREFIX)}
    results_file.report(found, scores, out)
