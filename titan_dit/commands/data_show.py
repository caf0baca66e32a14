"""`python -m titan_dit data show PATH`: print a dataset's metadata and a few samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from titan_dit.commands.flags.data_show import Options
from titan_dit.commands.results_file import writing
from titan_dit.commands.token_report import prefix_of, show_tokens
from titan_dit.config.section import UserError
from titan_dit.data.class_labels import few
from titan_dit.data.folders import LatentFolder
from titan_dit.data.held_out import group_sizes
from titan_dit.data.latent_facts import LatentFacts, shown
from titan_dit.data.latents import Latents, LatentShards
from titan_dit.diffusion.objective import to_model_units
from titan_dit.observe import console
from titan_dit.pictures.grid import draw_grid
from titan_dit.rng import SampleRNG


def main(options: Options) -> None:
    """Show tokens or latents, whichever the path holds."""
    path = Path(options.path)
    if prefix := prefix_of(path):
        if options.out:
            raise UserError(f"[data show] out={options.out}: tokens are printed, not drawn.")
        show_tokens(prefix, options.num, options.tokenizer)
        return
    if options.tokenizer:
        raise UserError(f"[data show] tokenizer={options.tokenizer}: {path} holds no tokens.")
    if not path.exists():
        raise UserError(
            f"[data show] path={path}: there is no such folder, and no .bin or .idx of tokens."
        )
    show_latents(path, options)


def show_latents(path: Path, options: Options) -> None:
    """Print the metadata and draw the samples."""
    out = options.drawn
    if path.resolve() in out.resolve().parents:
        raise UserError(
            f"[data show] out={out} is inside the dataset {path}, where it would prevent opening "
            f"it. Choose another --out, such as --out {path.resolve().parent / out.name}."
        )
    source = Latents(path=str(path), verify=options.verify).open()
    num = min(options.num, len(source))
    samples = source.read([i * len(source) // num for i in range(num)])
    facts = source.facts
    mean_and_std = looks_like_mean_and_std(samples["latent"], facts)
    for name, value in describe(source).items():
        console.say(f"{name:9}{value}")
    if options.verify and isinstance(source, LatentShards):
        console.say(f"verified {len(source.shards)} shards: all SHA-256 match the manifest")
    elif options.verify:
        console.say(f"verified {len(source):,} files: all are readable")
    channels = facts.shape[0] // 2 if mean_and_std else facts.shape[0]
    if mean_and_std:
        console.say(f"the {2 * channels} channels look like a mean and a std of {channels}")
    latents = to_model_units(samples["latent"], facts, channels, SampleRNG(0, torch.arange(num)))
    console.say(f"{num} samples, as the model sees them:")
    for channel in range(min(channels, 16)):
        values = latents[:, channel]
        console.say(f"  channel {channel}: mean {values.mean():+.3f}, std {values.std():.3f}")
    shown = samples["latent"][:, :channels].float()
    with writing("--out", out):
        draw_grid(out, shown, samples["label"].tolist(), facts.value_range, facts.class_names)
    console.say(f"drew {out}")


def describe(source: LatentShards | LatentFolder) -> dict[str, object]:
    """Return a dataset's metadata under the manifest's keys."""
    facts, about = source.facts, {}
    if isinstance(source, LatentShards):
        about = {"format": source.manifest["format"], "dtype": source.manifest["dtype"]}
        origin = source.manifest["source"]
        size = sum(entry["bytes"] for entry in source.manifest["shards"])
    else:
        assert isinstance(source, LatentFolder)
        layout = {"classes": "a folder per class", "pair": "features and labels"}
        about = {"format": layout[source.listing.layout], "dtype": str(source.dtype)[6:]}
        origin = source.origin or "unknown"
        size = sum(source.path_of(row).stat().st_size for row in range(len(source)))
    return {
        **about,
        "shape": list(facts.shape),
        "count": f"{facts.count:,}",
        "classes": sizes_of_classes(source),
        "scale": shown(facts.scale),
        "shift": shown(facts.shift),
        "source": origin,
        "bytes": f"{size:,}",
        "digest": facts.digest,
    }


def sizes_of_classes(source: LatentShards | LatentFolder) -> str:
    """Format the number of classes, their first names, and the smallest and the largest class."""
    facts, found = source.facts, group_sizes(source)
    sizes = np.pad(found, (0, facts.num_classes - len(found)))
    names = facts.class_names
    ends = [
        f"{word} {names[at] if at < len(names) else at} with {int(sizes[at]):,}"
        for word, at in (("smallest", int(sizes.argmin())), ("largest", int(sizes.argmax())))
    ]
    named = f" ({few(names)})" if names else ""
    return f"{facts.num_classes:,}{named}, {', '.join(ends)}"


def looks_like_mean_and_std(stored: Shaped[Tensor, "b k h w"], facts: LatentFacts) -> bool:
    """Return True if the second half of the channels may be a std: no value is negative."""
    half = facts.shape[0] // 2
    whole = facts.shape[0] % 2 == 0 and facts.value_range is None
    return whole and bool((stored[:, half:] >= 0).all())
