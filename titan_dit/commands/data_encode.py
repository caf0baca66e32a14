"""`python -m titan_dit data encode`: pictures or clips to shards of latents, by an autoencoder.

    python -m titan_dit data encode --input PICTURES --out SET --vae DIR --image-size 256
    NGPU=8 python -m titan_dit data encode ...

Without NGPU one process runs per GPU, or up to two on a CPU. Under another launcher, such as
torchrun, each rank is this command.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch

from titan_dit.commands import train
from titan_dit.commands.data_pack import read_classes, summary
from titan_dit.commands.flags import DataEncodeFlags
from titan_dit.config.section import UserError, few
from titan_dit.data.latent_facts import ONLINE, shown
from titan_dit.data.manifest import read_json
from titan_dit.data.packing.output import (
    DROPPED,
    PICTURES,
    Drops,
    check_output,
    claimed,
    classes_without_samples,
    num_converted,
)
from titan_dit.observe import console
from titan_dit.pictures import autoencoder, encode, text_encoder, text_job
from titan_dit.pictures.autoencoder import Autoencoder
from titan_dit.pictures.bucket_job import BucketJob, make_bucket_job
from titan_dit.pictures.clip_job import ClipJob, ClipOptions, make_clip_job
from titan_dit.pictures.encode import Waited
from titan_dit.pictures.encode_job import EncodeJob, EncodeOptions, make_job
from titan_dit.pictures.features import PictureFeatures, parse_grid
from titan_dit.pictures.kept_looks import KeptLooks
from titan_dit.pictures.picture_set import ListingOptions, PictureSet, captions_in
from titan_dit.pictures.picture_sizes import Size, check_image_size, check_lengths, check_multiples
from titan_dit.pictures.pixels import NO_VAE, Pixels, check_stored
from titan_dit.pictures.readers import open_input
from titan_dit.pictures.report import by_bucket, read_report
from titan_dit.pictures.survey import Keeps, Looks, Survey, survey_share
from titan_dit.pictures.text_encoder import TextEncoder
from titan_dit.ranks import process_group
from titan_dit.ranks.process_group import Ranks
from titan_dit.system.files import reason_of
from titan_dit.system.launched_as import LaunchedAs
from titan_dit.system.progress import ProgressLine, count
from titan_dit.trained_model import device_of

T = TypeVar("T")
MOST_WORKERS = 16


def main(options: DataEncodeFlags) -> None:
    """Launch the ranks, or be one of them."""
    options.sizes()  # Refused before anything starts.
    options.lengths()
    options.check_text()
    options.check_features()
    options.check_prefix()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    train.start_ranks(gpus=device == "cuda", cores=train.num_cores())
    with process_group.start(device_of(device).type) as world:
        run(options, world.device)


def run(options: DataEncodeFlags, device: torch.device) -> None:
    """Encode this rank's chunks; the first rank writes the manifest. Collective.

    Raises UserError if ranks found other files.
    """
    ranks = Ranks.with_own_group()
    source, output = Path(options.input), Path(options.out)
    classes = read_classes(options.classes, EncodeJob.command)
    asked = ListingOptions(
        classes=classes,
        num_classes=options.num_classes,
        no_caption=options.no_caption,
        caption_prefix=options.caption_prefix,
        split=options.split,
        max_text_bytes=options.max_text_bytes,
        max_file_bytes=options.max_file_bytes,
        max_rows=options.max_rows,
        clips=options.frames is not None,
    )
    pictures = open_input(source, asked)
    if options.first_frame and "reference" in pictures.companions:
        raise UserError(
            f"[data encode] --first-frame true: {source} holds references of pictures, too. Encode "
            "clips and pictures with references apart."
        )
    encoder = text_encoder_of(options, pictures, device, ranks)
    vae = vae_of(options, device)
    features = features_of(options, device, ranks)
    plan = plan_of(options, pictures, vae, ranks, features)
    if len(set(ranks.gather(plan.digest))) > 1:
        raise UserError(
            f"[data encode] input={source}: ranks found other pictures or another autoencoder. "
            "Give all of them the same files."
        )
    encode_pictures(plan, vae, output, ranks, options, features)
    if encoder is not None:
        encode_captions(options, encoder, ranks)


def vae_of(options: DataEncodeFlags, device: torch.device) -> Autoencoder | Pixels:
    """The autoencoder, or the pixels themselves. Raises UserError."""
    if options.vae == NO_VAE:
        check_stored(options.posterior, options.dtype, options.units)
        return Pixels(device)
    vae = autoencoder.load(options.vae, device, dtype=options.vae_dtype, tiles=options.vae_tiles)
    vae.check_encodes("--vae")
    return vae


def features_of(
    options: DataEncodeFlags, device: torch.device, ranks: Ranks
) -> PictureFeatures | None:
    """The network of --features, or None. Prints the keys of [repa] for it. Raises UserError."""
    if options.features is None:
        return None
    assert options.image_size
    grid = None if options.features_grid is None else parse_grid(options.features_grid)
    size = options.image_size, options.image_size
    found = PictureFeatures.load(options.features, device, size, grid)
    if ranks.is_first:
        rows, columns = found.grid
        console.say(
            f"features of {found.name}: grid {rows} x {columns}, [repa] dim = {found.dim}; "
            f"{count(found.num_bytes)}B of float16 each row"
        )
    return found


def encode_pictures(
    plan: EncodeJob,
    vae: Autoencoder | Pixels,
    output: Path,
    ranks: Ranks,
    options: DataEncodeFlags,
    features: PictureFeatures | None = None,
) -> None:
    """Encode this rank's chunks of pictures; the first rank writes the manifest. Collective."""
    pictures = plan.pictures
    with ExitStack() as stack:
        todo = ranks.run_on_first(lambda: begin(plan, output, stack, options.verify))
        if todo is None:
            if ranks.is_first:
                report_done(output)
            return
        if ranks.is_first:
            by = f" by {vae.facts}" if vae.entry else ""
            what = "pictures"
            if isinstance(plan, ClipJob):
                what = f"clips and pictures of {len(plan.listed):,} files"
            console.say(
                f"encoding {len(pictures):,} {what} ({pictures.kind}) of "
                f"{pictures.num_classes:,} classes into {plan.num_chunks:,} shards of "
                f"{plan.dtype} {shapes_of(plan)}{by}, {ranks.count} ranks"
            )
        waited = encode_share(plan, vae, output, todo, ranks, options.workers, features)
        found = ranks.run_on_first(lambda: encode.finish(plan, output))
    if ranks.is_first:
        report(plan, output, *found)
        if vae.entry:
            console.say(f"the autoencoder waited for decoded pictures {waited} of the time")


def text_encoder_of(
    options: DataEncodeFlags, pictures: PictureSet, device: torch.device, ranks: Ranks
) -> TextEncoder | None:
    """The text encoder, None without --text-encoder; prints the size of the embeddings.

    Raises UserError for what would fail after the pictures are encoded.
    """
    if options.text_encoder is None:
        return None
    output, left_out = Path(options.out), pictures.left_out
    text_job.check_name(output)
    kept = [row for row in range(len(pictures)) if row not in left_out]
    texts = [pictures.texts[row] for row in kept] if pictures.texts else []
    names = [pictures.names[row] for row in kept]
    text_job.check_captions(texts, names, options.no_caption == "empty")
    encoder = text_encoder.load(
        options.text_encoder,
        device,
        layers=options.layers(),
        template=options.text_template,
        max_tokens=options.text_tokens,
        padding=options.text_padding,
    ).without_unused()
    text_job.check_same_encoder(output, encoder, options.text_dtype)
    if options.text_dtype != ONLINE:
        text_job.stored(encoder.encode([""])[0], options.text_dtype, "")
    if ranks.is_first:
        found = text_job.Tokenized.of(
            encoder, text_job.distinct([captions_in(text) for text in texts])[0]
        )
        num = len(found.ends) - 1
        console.say(f"{num:,} captions and the empty one: {size_of(found, encoder, options)}")
    return encoder


def size_of(found: text_job.Tokenized, encoder: TextEncoder, options: DataEncodeFlags) -> str:
    """Tokens of captions with the empty one, and the size of their embeddings, for the console."""
    tokens = f"{found.num_embedded(encoder):,} tokens"
    if options.text_dtype != ONLINE:
        size = found.num_bytes(encoder, options.text_dtype)
        what = f"{size:,} bytes of {options.text_dtype}"
        return f"{tokens}, whose embeddings take {count(size)}B ({what})"
    size = found.num_bytes(encoder, "float16")
    return f"{tokens}, whose ids are stored alone; embeddings would take {count(size)}B in float16"


def encode_captions(options: DataEncodeFlags, encoder: TextEncoder, ranks: Ranks) -> None:
    """Encode this rank's files of captions; the first rank completes the manifest. Collective."""
    output = Path(options.out)
    job = text_job.make_text_job(
        output,
        encoder,
        tokens=options.text_tokens,
        dtype=options.text_dtype,
        batch_size=options.batch_size,
    )
    with ExitStack() as stack:
        todo = ranks.run_on_first(lambda: text_job.begin(job, stack))
        if todo is None:
            if ranks.is_first:
                console.say(f"the captions of {output} are already encoded")
            return
        mine = todo[ranks.rank :: ranks.count]
        total = sum(len(job.chunks[chunk]) for chunk in todo)
        progress = ProgressLine(total, "captions")

        def encode_mine() -> None:
            with progress:
                text_job.encode_texts(job, mine, lambda num: progress.add(num * ranks.count))

        on_all(ranks, encode_mine)
        text = ranks.run_on_first(lambda: text_job.finish(job))
    if ranks.is_first:
        if text["cut"]:
            console.say(f"cut {text['cut']:,} captions to {encoder.max_tokens:,} tokens")
        what = "token ids" if options.text_dtype == ONLINE else "embeddings"
        console.say(
            f"wrote the {what} of {text['captions'] - 1:,} captions and the empty one by "
            f"{job.facts()} to {output}"
        )


def plan_of(
    options: DataEncodeFlags,
    pictures: PictureSet,
    vae: Autoencoder | Pixels,
    ranks: Ranks,
    features: PictureFeatures | None = None,
) -> EncodeJob:
    """Plan the shards; for buckets and clips, look at all files first. Collective.

    Raises UserError for what the autoencoder cannot encode, before it looks at files, and for
    --features of clips.
    """
    check_sizes(options, vae)
    source, output = Path(options.input), Path(options.out)
    is_of_pixels = isinstance(vae, Pixels)
    how = EncodeOptions(
        flip=options.flip,
        posterior="mean" if is_of_pixels else options.posterior,
        units=options.units,
        dtype="uint8" if is_of_pixels else options.dtype,
        batch_size=options.batch_size,
        shard_size=options.shard_size,
        text=options.source,
        max_pixels=options.max_pixels,
        first_frame=options.first_frame,
        features=features,
    )
    if options.frames is not None or vae.is_of_clips:
        if features:
            raise UserError(
                f"[data encode] --features are of pictures, but {vae.source} encodes clips. Leave "
                "them out, or give an autoencoder of pictures."
            )
        return plan_of_clips(options, pictures, vae, ranks, how)
    if options.image_size is not None:
        return make_job(pictures, source, output, vae, how, image_size=options.image_size)
    survey = survey_of(pictures, ranks, threads_of(options.workers))
    return make_bucket_job(pictures, source, output, vae, how, sizes=options.sizes(), survey=survey)


def check_sizes(options: DataEncodeFlags, vae: Autoencoder | Pixels) -> None:
    """Raise UserError for a size, or a number of frames, that the autoencoder cannot encode."""
    if options.image_size is not None:
        check_image_size(options.image_size, vae.facts.factor, vae.source)
    check_multiples(options.sizes(), vae.facts.factor, vae.source)
    check_lengths(options.lengths(), vae.facts.frames_factor, vae.source)


def plan_of_clips(
    options: DataEncodeFlags,
    pictures: PictureSet,
    vae: Autoencoder | Pixels,
    ranks: Ranks,
    how: EncodeOptions,
) -> EncodeJob:
    """Plan the shards of clips; looks at all files first. Collective."""
    sizes = options.sizes()
    if options.image_size is not None:
        sizes = (Size(options.image_size, options.image_size),)
    asked = ClipOptions(
        lengths=options.lengths() or (1,),
        fps=options.fps,
        choice=options.clip,
        scenes=options.scenes,
        max_pixels=options.max_pixels,
    )
    root, output = Path(options.input), Path(options.out)
    kept = KeptLooks.opened(output, root, asked.key(), ranks.rank) if options.frames else None
    survey = survey_of(pictures, ranks, threads_of(options.workers), asked, kept)
    ranks.run_on_first(lambda: kept.join() if kept else None)
    return make_clip_job(pictures, root, output, vae, how, sizes=sizes, survey=survey, asked=asked)


def threads_of(workers: int | None) -> int:
    """Threads of a rank that read pictures."""
    local = LaunchedAs.here().local_world_size
    return workers or max(1, min(MOST_WORKERS, train.num_cores() // local))


def survey_of(
    pictures: PictureSet,
    ranks: Ranks,
    threads: int,
    videos: Looks | None = None,
    kept: Keeps | None = None,
) -> Survey:
    """The sizes of all pictures, and the clips of `videos`. Collective.

    Each rank reads its share of the headers, and decodes its share of the videos, except those that
    are `kept`.
    """
    progress = ProgressLine(len(pictures), "files" if videos else "pictures", what="measured")

    def share() -> Survey:
        with progress:
            return survey_share(
                pictures,
                threads,
                lambda count: progress.add(count * ranks.count),
                ranks.rank,
                ranks.count,
                videos,
                kept,
            )

    return Survey.joined(on_all(ranks, share))


def on_all(ranks: Ranks, action: Callable[[], T]) -> list[T]:
    """The results of all ranks. If some raise UserError, all raise the first one. Collective.

    Unlike `Ranks.run_on_all`, another error is a bug and keeps its traceback.
    """
    result, failure = None, ""
    try:
        result = action()
    except UserError as error:
        failure = str(error)
    outcomes: list[tuple[Any, str]] = ranks.gather((result, failure))
    if failures := [text for _, text in outcomes if text]:
        raise UserError(failures[0])
    return [value for value, _ in outcomes]


def shapes_of(plan: EncodeJob) -> str:
    """The shape of rows, or the number of buckets that have pictures, for the console."""
    if not isinstance(plan, BucketJob):
        return str(list(plan.shape))
    return f"in {len({bucket for bucket, _ in plan.chunks})} buckets"


def begin(
    plan: EncodeJob, output: Path, stack: ExitStack, verify: bool = False
) -> list[int] | None:
    """Claim the output until `stack` ends; the missing chunks, None if it is whole.

    Raises UserError if the output cannot be opened.
    """
    check_output(plan, output)
    try:
        output.mkdir(parents=True, exist_ok=True)
        stack.enter_context(claimed(plan, output))
        return encode.missing_chunks(plan, output, verify)
    except OSError as error:
        raise UserError(f"[data encode] out={output}: {reason_of(error)}.") from None


def encode_share(
    plan: EncodeJob,
    vae: Autoencoder | Pixels,
    output: Path,
    todo: list[int],
    ranks: Ranks,
    workers: int | None,
    features: PictureFeatures | None,
) -> Waited:
    """Encode this rank's chunks; a UserError of one rank is raised on all. Collective.

    Returns how long the ranks waited for decoded pictures.
    """
    mine = todo[ranks.rank :: ranks.count]
    total = len(plan.pictures)
    left, own = (sum(len(plan.rows(chunk)) for chunk in chunks) for chunks in (todo, mine))
    threads = threads_of(workers)
    progress = ProgressLine(total, "pictures", resumes=True)
    counts = [0, 0]

    def report(done: int, dropped: int) -> None:
        counts[0] += done
        counts[1] += dropped
        # Of all ranks, which work at the same speed.
        progress(total - left + counts[0] * left // own, f"dropped {counts[1]:,}" * bool(counts[1]))

    progress(total - left)

    def encode_mine() -> Waited:
        with progress:
            return encode.encode_chunks(plan, vae, output, mine, threads, report, features)

    return Waited.joined(on_all(ranks, encode_mine))


def report(
    plan: EncodeJob, output: Path, dropped: Drops, mean: list[float], std: list[float]
) -> None:
    """Print what was written and dropped."""
    for line in summary([reason for _, reason in dropped]):
        console.say(line)
    if dropped:
        console.say(f"dropped pictures are listed in {output / DROPPED}")
    if lost := classes_without_samples(plan, dropped):
        names = plan.pictures.class_names
        lost_names = few([names[i] if names else i for i in lost])
        console.say(f"warning: all pictures of these classes were dropped: {lost_names}")
    if not plan.pictures.texts:
        console.say("the pictures have no captions")
    elif empty := plan.pictures.num_uncaptioned:
        console.say(f"{empty:,} pictures have an empty caption")
    if beside := plan.pictures.beside:
        console.say(f"{len(beside):,} other files were not read: {few([x for x, _ in beside])}")
    if plan.survey is not None:
        report_files(plan, output)
    what = "latents" if plan.about["vae"] else "pixels"
    console.say(f"{what}: mean {shown(tuple(mean))}, std {shown(tuple(std))} of each channel")
    if num := num_converted(output):
        console.say(f"converted the colours of {num:,} pictures to sRGB, by their ICC profiles")
    manifest = read_json(output)
    console.say(f"wrote {manifest['count']:,} rows to {output}")


def report_files(plan: EncodeJob, output: Path) -> None:
    """Print the buckets, and the numbers of used and dropped files."""
    lines = list(read_report(output))
    for bucket, about in by_bucket(lines).items():
        console.say(f"bucket {bucket}: {about}")
    if isinstance(plan, ClipJob):
        lost = sum(bool(line.reason) for line in lines)
        console.say(
            f"{len(lines):,} files: {len(lines) - lost:,} encoded, {lost:,} left out; "
            f"{sum(len(line.frames) for line in lines):,} clips of videos"
        )
    console.say(f"{output / PICTURES} lists every file: data report {output}")


def report_done(output: Path) -> None:
    """Print that nothing was left to do."""
    console.say(f"{output} is already encoded")
    if num := read_json(output)["dropped"]:
        console.say(f"{num:,} pictures were dropped ({output / DROPPED})")
