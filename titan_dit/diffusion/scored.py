"""Pictures that are scored during training: their size, their conditions, and drawing them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack

from jaxtyping import Bool, Int64, UInt8
from torch import Tensor

from titan_dit.config.section import UserError
from titan_dit.config.training import SamplingConfig
from titan_dit.diffusion.conditions import Conditions, Given
from titan_dit.diffusion.drawing import autoencoder_of, check_autoencoder, decoder, samples
from titan_dit.diffusion.objective import Diffusion
from titan_dit.diffusion.row_conditions import (
    captions_of_rows,
    labels_like,
    spread_labels,
    with_references,
)
from titan_dit.objectives.base import DataShare, Forward
from titan_dit.pictures.autoencoder import Autoencoder


def picture_size(objective: Diffusion, sampling: SamplingConfig) -> int:
    """Height of a latent, times the autoencoder's factor.

    Raises UserError for pictures that are not square, and for a [sampling] vae that does not
    fit.
    """
    check_autoencoder(objective, sampling)
    _, height, width = objective.model.sample_shape
    if height != width:
        raise UserError(
            f"[fid] compares squares, but the network draws samples of {height} x {width} "
            "(height x width). Set [fid] every = 0."
        )
    if objective.data.value_range is not None:
        return height
    if not sampling.vae:
        raise UserError(
            "[fid] needs pictures, but the run trains on latents: set [sampling] vae, "
            "the autoencoder that decodes them."
        )
    return height * autoencoder_of(objective, sampling).facts.factor


def knows_classes(objective: Diffusion, like: Mapping[str, int]) -> bool:
    """True if all keys of `like` are classes of the data, by name or number.

    True of a network that takes captions: it is asked for no classes.
    """
    if objective.captions:
        return True
    names = objective.data.class_names
    return labels_like(like, 1, objective.num_classes, names) is not None


def conditions_like(objective: Diffusion, num: int, like: Mapping[str, int]) -> Conditions:
    """Labels in the proportions of `like`; evenly over all classes if one is unknown.

    Of a network that takes captions: those of rows evenly spaced over the data.
    """
    if objective.captions:
        assert objective.preview_data.source is not None
        return captions_of_rows(objective, objective.preview_data.source, num)
    classes = objective.num_classes
    found = labels_like(like, num, classes, objective.data.class_names)
    spread = spread_labels(num, list(range(classes))) if found is None else found

    def labels(numbers: Int64[Tensor, " b"]) -> Given:
        return {"labels": spread.to(numbers.device)[numbers]}

    if objective.data.reference is None:
        return labels
    assert objective.preview_data.source is not None
    return with_references(objective, objective.preview_data.source, num, labels)


def pictures(
    forward: Forward,
    objective: Diffusion,
    sampling: SamplingConfig,
    seed: int,
    conditions: Conditions,
    batches: Iterable[Int64[Tensor, " b"]],
    share: DataShare,
) -> Iterator[tuple[UInt8[Tensor, "b h w 3"], Bool[Tensor, " b"]]]:
    """Draw pictures, decoded if they are latents, and whether each sample is finite."""
    # Imported late: the benchmarks train on machines without Pillow.
    from titan_dit.pictures import output

    value_range = objective.data.value_range
    with ExitStack() as stack:
        vae: Autoencoder | None = None
        for numbers in batches:
            if vae is None and not value_range:
                vae = stack.enter_context(decoder(objective, sampling, numbers.device))
            of_batch = conditions(numbers)
            drawn = samples(forward, objective, sampling, seed, of_batch, numbers, share)
            finite = drawn.isfinite().flatten(1).all(1)
            if vae is None:
                yield output.to_pixels(drawn, value_range), finite
            else:
                yield vae.decode(drawn).permute(0, 2, 3, 1), finite
