"""Inputs of `sample` and `evaluate` by flag.

Labels, prompts, noise, VAE, --guide, --low, --reference.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from titan_dit.checkpoint.run_checkpoints import find_checkpoint
from titan_dit.checkpoint.store import location
from titan_dit.commands.flags import PictureFlags
from titan_dit.config import user_text
from titan_dit.config.did_you_mean import nearest
from titan_dit.config.section import Named, UserError, show
from titan_dit.data.files import BadFileError
from titan_dit.data.latent_facts import LatentFacts, shown
from titan_dit.data.packing.images import read_image
from titan_dit.diffusion.base import SizedModel, has_clips, has_reference_tokens
from titan_dit.diffusion.conditions import Given, rows_of
from titan_dit.diffusion.guidance import Conditional, LowExpert
from titan_dit.diffusion.objective import Diffusion
from titan_dit.diffusion.row_conditions import spread_labels
from titan_dit.execution import first_of
from titan_dit.interop.tensor_file import check_finite, check_labels, read_tensors
from titan_dit.observe import console
from titan_dit.pictures import autoencoder
from titan_dit.pictures.autoencoder import Autoencoder
from titan_dit.pictures.encode import first_frames
from titan_dit.pictures.pixels import NO_VAE, Pixels
from titan_dit.pictures.prompts import open_encoder
from titan_dit.ranks.process_group import Ranks
from titan_dit.trained_model import TrainedModel, load_trained


def chosen_classes(text: str, num_classes: int, names: Sequence[str]) -> list[int]:
    """Labels of a list such as "3,dog"; a number is always a label.

    A name may hold commas itself ("tench, Tinca tinca"): the longest name that fits is taken. Case
    does not matter unless two names differ in nothing else. Raises UserError for an unknown name or
    a label out of range.
    """
    words, found = text.strip(" ,").split(","), list[int]()
    exactly = {name: label for label, name in enumerate(names)}
    times = Counter(name.casefold() for name in names)
    folded = {n.casefold(): label for n, label in exactly.items() if times[n.casefold()] == 1}
    while words:
        for count in range(len(words), 0, -1):
            word = ",".join(words[:count]).strip()
            label = exactly.get(word, folded.get(word.casefold()))
            if count == 1 and word.removeprefix("-").isdecimal():
                label = int(word)
            if label is not None:
                break
        else:
            raise unknown(text, word, names)
        if not 0 <= label < num_classes:
            raise UserError(
                f"--labels {label}: the run has the classes 0 to {num_classes - 1}; "
                "unconditional samples: --labels none."
            )
        found.append(label)
        words = words[count:]
    return found


def unknown(text: str, word: str, names: Sequence[str]) -> UserError:
    """The error for a word that is no class."""
    if not names:
        return UserError(
            f'--labels {text}: give "all", "none" or numbers such as 0,1,2; the run\'s dataset has '
            "no class names."
        )
    few = names if len(names) <= 10 else [*names[:9], f"and {len(names) - 9:,} more"]
    close = nearest(word, names)
    hint = close if "Did you mean" in close else f" Valid: {', '.join(few)}."
    return UserError(f'--labels {text}: no class is named "{word}".{hint} Numbers do, too.')


KEPT = 1000
"""Prompts whose embeddings are kept; of more they are made batch by batch."""


@dataclass(frozen=True)
class CaptionSource:
    """The captions that are drawn: prompts, or captions of stored rows."""

    numbers: Int64[Tensor, " n"]
    """The prompt, or the row of the dataset, of each sample."""
    read: Callable[[Int64[Tensor, " b"]], Given]
    """Numbers of samples -> their conditions, on the CPU."""
    identity: str
    """All that the conditions depend on, as text."""
    names: tuple[str, ...] = ()
    """The prompts; empty for rows."""
    negative: Given | None = None
    """The condition to guide away from, one row; None is the empty prompt."""


def read_prompts(flags: PictureFlags) -> tuple[str, ...]:
    """The prompts: of --prompt, then of --prompts. Raises UserError for a blank line."""
    found = list(flags.prompt)
    if flags.prompts is not None:
        where = f"--prompts {flags.prompts}"
        text = user_text.read(Path(flags.prompts), where)
        if not text.strip():
            raise UserError(f"{where}: holds no prompts. Write one per line.")
        lines = text.removesuffix("\n").split("\n")
        for number, line in enumerate(lines, 1):
            if not line.strip():
                raise UserError(
                    f"{where}, line {number}: is blank. Delete it; the empty prompt is --prompt ''."
                )
            found.append(line.removesuffix("\r"))
    return tuple(found)


def prompts_of(diffusion: Diffusion, flags: PictureFlags, device: torch.device) -> CaptionSource:
    """The captions of --prompt and --prompts, --num of each. Collective.

    Raises UserError if there are none, for flags of classes, and for another text encoder than that
    of the run's captions.
    """
    captions = diffusion.captions
    assert captions is not None
    if flags.labels != "all":
        raise UserError(
            f"--labels {flags.labels}: the run was trained on captions, not on classes. Give "
            "--prompt TEXT, or --prompts FILE."
        )
    prompts = read_prompts(flags)
    if not prompts:
        raise UserError(
            "the run was trained on captions: give --prompt TEXT, which may stand several times, "
            "or --prompts FILE with one per line."
        )
    if flags.negative is not None and (flags.guide or flags.cfg_scale == 1):
        other = "--guide" if flags.guide else "--cfg-scale 1"
        raise UserError(f"--negative has no effect with {other}. Leave one of them out.")
    also = () if flags.negative is None else (flags.negative,)
    encoder = open_encoder(
        (*prompts, *also),
        diffusion.data,
        flags.text_encoder,
        captions.tokens,
        device,
        "--text-encoder",
    )
    if (cut := encoder.num_cut((*prompts, *also))) and Ranks().is_first:
        console.say(
            f"{cut} of {len(prompts) + len(also)} prompts are cut to {captions.tokens} tokens"
        )
    numbers = torch.arange(len(prompts)).repeat_interleave(flags.num or 1)

    negative = None if flags.negative is None else captions.given(encoder.fields(also))
    identity = repr((prompts, flags.negative, diffusion.data.text))
    if len(prompts) <= KEPT:  # The encoder's memory is free before anything is drawn.
        whole = captions.given(encoder.fields(prompts))
        kept = partial(row_of_each, whole, numbers)
        return CaptionSource(numbers, kept, identity, prompts, negative)

    def read(samples: Int64[Tensor, " b"]) -> Given:
        chosen = [prompts[number] for number in numbers[samples].tolist()]
        return captions.given(encoder.fields(chosen))

    return CaptionSource(numbers, read, identity, prompts, negative)


def row_of_each(whole: Given, numbers: Int64[Tensor, " n"], samples: Int64[Tensor, " b"]) -> Given:
    """The conditions of some samples; `numbers`: the row of each in `whole`."""
    return rows_of(whole, numbers[samples])


def check_no_prompts(flags: PictureFlags) -> None:
    """Raise UserError for the flags of captions."""
    for name in ("prompt", "prompts", "negative", "text_encoder"):
        if getattr(flags, name) not in (None, ()):
            flag = name.replace("_", "-")
            raise UserError(
                f"--{flag}: the run was trained on classes, not on captions. Give --labels."
            )


def at_size(diffusion: Diffusion, flags: PictureFlags, vae: Autoencoder | None) -> Diffusion:
    """The objective for samples of --size and --frames.

    Raises UserError if the network cannot draw them.
    """
    given = {"--size": flags.size, "--frames": flags.frames}
    where = " ".join(f"{flag} {value}" for flag, value in given.items() if value is not None)
    if not where:
        return diffusion
    shape = list(diffusion.model.sample_shape[1:])
    factor, frames_factor = factors_of(diffusion.data, vae, where)
    if flags.size is not None:
        multiple = factor * (getattr(diffusion.model, "patch_size", None) or 1)
        shape[-2:] = (side // factor for side in sides_of(flags.size, multiple))
    if flags.frames is not None:
        if not has_clips(diffusion.model):
            raise UserError(f"--frames {flags.frames}: the run draws pictures. Leave it out.")
        shape[0] = latent_frames(flags.frames, frames_factor)
    try:
        return diffusion.at_size(*shape)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def factors_of(data: LatentFacts, vae: Autoencoder | None, where: str) -> tuple[int, int]:
    """Pixels per latent along a side, and frames per latent frame after the first.

    Raises UserError if the autoencoder is not known.
    """
    if data.value_range is not None:
        return 1, 1
    facts = vae.facts if vae else data.vae
    if facts is None:
        raise UserError(
            f"{where} is in pixels, but the autoencoder of the run's latents is not recorded: "
            "give it, --vae DIR."
        )
    return facts.factor, facts.frames_factor


def latent_frames(frames: int, factor: int) -> int:
    """Latent frames of --frames. Raises UserError unless it is a multiple of `factor`, plus 1."""
    if (frames - 1) % factor:
        below = (frames - 1) // factor * factor + 1
        raise UserError(
            f"--frames {frames}: the autoencoder makes a latent frame of the first frame and of "
            f"each {factor} after it. Give {factor} k + 1 frames: {below} or {below + factor}."
        )
    return (frames - 1) // factor + 1


def sides_of(size: str, multiple: int) -> tuple[int, int]:
    """Height and width of --size, in pixels. Raises UserError for no multiples of `multiple`."""
    where = f"--size {size}"
    found = re.fullmatch(r"(\d{1,6})x(\d{1,6})", size)
    if found is None:
        raise UserError(f"{where}: give width x height in pixels, such as 1024x768.")
    width, height = int(found[1]), int(found[2])
    if width % multiple or height % multiple or not width or not height:
        fits = "x".join(str(max(1, side // multiple) * multiple) for side in (width, height))
        raise UserError(
            f"{where}: the sides must be multiples of {multiple}, the pixels per token, such as "
            f"{fits}."
        )
    return height, width


def labels_of(text: str, num: int, num_classes: int, names: Sequence[str]) -> Int64[Tensor, " num"]:
    """Spread the classes of --labels over `num` samples; -1 is unconditional."""
    word = text if text in names else text.lower()
    if word == "none":
        return torch.full((num,), -1)
    every = word == "all"
    classes = range(num_classes) if every else chosen_classes(text, num_classes, names)
    return spread_labels(num, list(classes))


def read_noise(
    path: Path, diffusion: Diffusion, numbers: Int64[Tensor, " n"] | None = None
) -> tuple[Float[Tensor, "n c *size"], Int64[Tensor, " n"]]:
    """Read the initial noise and the labels (-1: unconditional) from a file.

    `numbers`: what is drawn of a network that takes captions, in place of labels. Raises UserError
    for other shapes.
    """
    tensors = read_tensors(path, "--noise", ("noise", *(("labels",) if numbers is None else ())))
    noise, labels = tensors["noise"], tensors["labels"] if numbers is None else numbers
    what = "labels" if numbers is None else "the prompts are"
    if tuple(noise.shape[1:]) != diffusion.model.sample_shape or noise.shape[:1] != labels.shape:
        raise UserError(
            f"--noise {path}: noise is {list(noise.shape)} and {what} {list(labels.shape)}; the "
            f"network takes [n, {', '.join(map(str, diffusion.model.sample_shape))}] and [n]."
        )
    check_finite(path, "--noise", {"noise": noise})
    if numbers is not None:
        return noise.float(), numbers
    check_labels(path, "--noise", labels, diffusion.num_classes)
    labels = labels.long()
    return noise.float(), labels.where(labels < diffusion.num_classes, -1)


def vae_of(diffusion: Diffusion, flags: PictureFlags, device: torch.device) -> Autoencoder | None:
    """The autoencoder of --vae, else the recorded one if the output needs pictures.

    Raises UserError for a missing or a needless one.
    """
    data, suffix = diffusion.data, Path(flags.out).suffix
    if flags.vae == NO_VAE or data.value_range is not None:
        if flags.vae not in ("", NO_VAE):
            raise UserError(
                f"--vae {flags.vae}: the run was trained on pixels, not on latents. Leave it out."
            )
        needs = suffix in ("", ".npz") and data.value_range is None
    elif flags.vae or (data.vae is not None and suffix != ".safetensors"):
        try:
            vae = autoencoder.load(flags.vae or data.vae_source, device)
        except UserError as error:
            if flags.vae:
                raise
            raise UserError(
                f"{error} It made the run's latents. If it is somewhere else now: --vae DIR."
            ) from None
        vae.check_fits(data, "--vae", diffusion.model.sample_shape[0])
        return vae
    else:
        needs = suffix in ("", ".npz")
    if needs:
        what = "a folder of pictures" if not suffix else "a .npz"
        raise UserError(
            f"--out {flags.out}: {what} needs an autoencoder, because the run's samples are "
            "latents: give --vae DIR, or write a .safetensors file."
        )
    return None


def reference_of(
    diffusion: Diffusion, flags: PictureFlags, vae: Autoencoder | None, device: torch.device
) -> Given:
    """The network's inputs by --reference, one row; {} if it is given no references.

    Raises UserError for a picture that cannot be read, and for one too many or too few.
    """
    data, where = diffusion.data, f"--reference {flags.reference}"
    if data.reference is None:
        if flags.reference is not None:
            raise UserError(f"{where}: the network is given no references. Leave it out.")
        return {}
    if flags.reference is None:
        raise UserError(
            f"the network is given {data.reference}: `sample --reference FILE` draws with one."
        )
    encoder: Autoencoder | Pixels
    if data.value_range is not None:
        encoder = Pixels(device)
    elif vae is not None:
        encoder = vae
    elif flags.vae not in ("", NO_VAE) or data.vae_source:
        source = data.vae_source if flags.vae in ("", NO_VAE) else flags.vae
        encoder = autoencoder.load(source, device)
        encoder.check_fits(data, "--vae", diffusion.channels)
    else:
        raise UserError(f"{where} is encoded by the autoencoder of the run's latents: --vae DIR.")
    height, width = (side * encoder.facts.factor for side in diffusion.model.sample_shape[-2:])
    try:
        picture = read_image(Path(flags.reference), (width, height), (3, height, width))
    except BadFileError as error:
        raise UserError(f"{where}: {error}.") from None
    pixels = picture[None].to(device)
    if has_clips(diffusion.model):
        frames = 1 + (diffusion.model.sample_shape[1] - 1) * encoder.facts.frames_factor
        pixels = pixels[:, :, None].expand(-1, -1, frames, -1, -1)
        pixels = first_frames(pixels) if frames > 1 else pixels
    return diffusion.references({"reference": encoder.encode(pixels)[0]})


MEANING = ("name", "prediction", "noise_schedule", "steps", "direction", "time_scale")
"""Keys of [objective] that say what a prediction means; the two networks must agree on them."""


def load_other(
    run: str,
    flag: str,
    device: torch.device,
    trust: bool,
    weights: str = "ema",
    decay: float | None = None,
) -> TrainedModel:
    """The newest checkpoint of a second run; `flag` names it: --guide or --low. Collective."""
    path = Ranks().run_on_first(lambda: find_checkpoint(location(run), None, flag))
    return load_trained(path, weights, decay, device, trust)


def weak_network(weak: TrainedModel, diffusion: Diffusion) -> Conditional:
    """The prediction of --guide's network for tokens of `diffusion`, the objective of --run.

    Raises UserError on a misfit.
    """
    theirs = resized_like(weak.diffusion("--guide"), diffusion)
    check_guide(f"--guide {weak.path}", diffusion, theirs)
    return prediction_of(weak, theirs, diffusion)


def resized_like(theirs: Diffusion, ours: Diffusion) -> Diffusion:
    """The other run's objective for samples of our size, if its network takes any."""
    if not isinstance(theirs.model, SizedModel) or has_clips(theirs.model) != has_clips(ours.model):
        return theirs
    return theirs.at_size(*ours.model.sample_shape[1:])


def prediction_of(weak: TrainedModel, theirs: Diffusion, diffusion: Diffusion) -> Conditional:
    """The prediction of another run's network for the tokens of `diffusion`.

    Outputs beyond the latent's channels, such as a learned variance, are not used.
    """
    channels = diffusion.model.sample_shape[0]
    outputs = diffusion.config.output_channels(channels)

    def predict(x: Tensor, timestep: Tensor, given: Given) -> Tensor:
        latents = diffusion.model.detokenize(x)
        inputs = {"tokens": theirs.model.tokenize(latents), "timestep": timestep, **given}
        static = theirs.with_text(given).static(weak.device)
        found = theirs.model.detokenize(first_of(weak.network(inputs, static)).float())
        found = found[:, :channels]
        if outputs > channels:  # Scale 1 there: the other network's values count.
            found = torch.cat((found, *[torch.zeros_like(found)] * (outputs // channels - 1)), 1)
        return diffusion.model.tokenize(found)

    return predict


def low_expert(low: TrainedModel, diffusion: Diffusion, flags: PictureFlags) -> LowExpert:
    """The network of --low for tokens of `diffusion`, the objective of --run.

    Raises UserError for a run of other samples, captions, units or predictions, or that was trained
    on the noise levels of --run.
    """
    theirs = resized_like(low.diffusion("--low"), diffusion)
    guide = f"--low {low.path}"
    other = "Give the second network of the same data and [objective]."
    check_guide(guide, diffusion, theirs, other)
    if latents_of(diffusion) != latents_of(theirs):
        raise UserError(
            f"{guide} was trained on {latents_of(theirs)}, but --run on {latents_of(diffusion)}: "
            f"the one cannot go on where the other stops. {other}"
        )
    outputs = [d.config.output_channels(d.channels) for d in (theirs, diffusion)]
    if outputs[0] != outputs[1]:
        raise UserError(
            f"{guide} predicts {outputs[0]} channels, but --run {outputs[1]}: one of them learns a "
            f"variance. {other}"
        )
    boundary = boundary_of(diffusion, theirs, flags.boundary)
    return LowExpert(prediction_of(low, theirs, diffusion), boundary, flags.low_cfg_scale)


def boundary_of(high: Diffusion, low: Diffusion, wanted: float | None) -> float:
    """--boundary, or where the noise levels of both runs meet. Raises UserError if it misfits."""
    (low_first, low_last), (first, last) = (
        (float(getattr(d.config, "t_min", 0.0)), float(getattr(d.config, "t_max", 1.0)))
        for d in (low, high)
    )
    trained = (
        f"the other run was trained on t from {first:g} to {last:g}, --low from {low_first:g} to "
        f"{low_last:g}"
    )
    if low_first >= last:
        raise UserError(f"--low: {trained}. --low draws the low noise levels: exchange them.")
    if wanted is None and low_last != first:
        raise UserError(f"--low: {trained}, which do not meet. Give --boundary, such as 0.875.")
    boundary = first if wanted is None else wanted
    if last <= boundary or low_first >= boundary:
        raise UserError(
            f"--boundary {boundary:g}: {trained}. The other run draws from there up, --low below. "
            "Give a boundary between the noise levels of both."
        )
    if (first > boundary or low_last < boundary) and Ranks().is_first:
        console.say(f"hint    --boundary {boundary:g}: {trained}")
    return boundary


OTHER_GUIDE = "Give a weaker network of the same data and [objective]."


def check_guide(guide: str, ours: Diffusion, theirs: Diffusion, other: str = OTHER_GUIDE) -> None:
    """Raise UserError for a network of other samples or of another prediction.

    `guide`: flag and run, for messages; `other`: their advice.
    """
    shapes = ours.model.sample_shape, theirs.model.sample_shape
    if shapes[0] != shapes[1] or conditions_of(ours) != conditions_of(theirs):
        raise UserError(
            f"{guide} draws samples of {list(shapes[1])} with {conditions_of(theirs)}, but "
            f"--run of {list(shapes[0])} with {conditions_of(ours)}. {other}"
        )
    # Of other latents what is stored is not known: some are stored scaled.
    if ours.data.vae and theirs.data.vae and latents_of(ours) != latents_of(theirs):
        raise UserError(
            f"{guide} was trained on {latents_of(theirs)}, but --run on "
            f"{latents_of(ours)}: their predictions cannot be compared. {other}"
        )
    names = ours.data.class_names
    for number, (own, name) in enumerate(zip(names, theirs.data.class_names, strict=False)):
        # Other words may mean the same class; the same word at another number does not.
        if name != own and name in names:
            raise UserError(
                f"{guide} has {show(name)} as class {number}, but --run as class "
                f"{names.index(name)}: its labels mean something else. {other}"
            )
    a, b = keys_of(ours.config), keys_of(theirs.config)
    for key in MEANING:
        if a.get(key) != b.get(key):
            raise UserError(
                f"{guide} was trained with [objective] {key}={show(b.get(key))}, but "
                f"--run with {show(a.get(key))}: their predictions cannot be compared. "
                f"{other}"
            )


def conditions_of(diffusion: Diffusion) -> str:
    """Description of a network's conditions."""
    references = ""
    if reference := diffusion.data.reference:
        how = "tokens" if has_reference_tokens(diffusion.model) else "channels"
        references = f" and {reference} as {how}"
    if diffusion.captions is None:
        return f"{diffusion.num_classes} classes{references}"
    text = f"captions of {diffusion.captions.tokens} tokens by {diffusion.data.text}"
    return text + references


def latents_of(diffusion: Diffusion) -> str:
    """Description of the latents that a network was trained on."""
    data = diffusion.data
    return f"latents of {data.vae} with scale {shown(data.scale)} and shift {shown(data.shift)}"


def keys_of(section: Named) -> Mapping[str, Any]:
    """The keys of an [objective] section."""
    return {"name": section.name, **asdict(section)}
