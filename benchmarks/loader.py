"""Loader throughput against one .npy file per sample: `python benchmarks/loader.py`.

Three contenders read the same latents from temporary folders: a torch Dataset over the features and
labels of fast-DiT with the default collation, this loader on shards, and this loader on the .npy
files. They take turns in one run, with and without a worker; ratios are medians over turns. A batch
counts when it is ready for a step: float tokens for this loader, float latents for the Dataset.
Files are in the page cache.

`--cold` compares this loader's way of reading shards with the way of before instead: on a cold page
cache, whose state is checked before every turn, and on a warm one (cold_rows.py). Files go to a
temporary folder under --folder, which must be on a disk.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cold_rows import mapped, measure_cold
from report import finish
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from titan_dit.data import loader
from titan_dit.data.latents import LatentShards, write_shards
from titan_dit.data.order import BatchPlan, EpochOrder, RankOrder
from titan_dit.data.sections import Latents
from titan_dit.diffusion.sections import RectifiedFlowConfig
from titan_dit.models.dit_config import DiTConfig
from titan_dit.rng import SampleRNG

NUM_CLASSES = 10


class NpyPerSample(Dataset[tuple[Tensor, Tensor]]):
    """fast-DiT's dataset: features/i.npy [1, c, h, w] and labels/i.npy [1]."""

    def __init__(self, root: Path, count: int) -> None:
        self.root, self.count = root, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        latent = np.load(self.root / "features" / f"{index}.npy")
        label = np.load(self.root / "labels" / f"{index}.npy")
        return torch.from_numpy(latent), torch.from_numpy(label)


def make_datasets(root: Path, count: int, shape: tuple[int, int, int]) -> None:
    """Write the same float16 latents as .npy files and as shards."""
    latents = torch.randn(count, *shape, generator=torch.Generator().manual_seed(0)).half()
    labels = torch.arange(count) % NUM_CLASSES
    for name in ("features", "labels"):
        (root / "files" / name).mkdir(parents=True)
    for i in range(count):
        np.save(root / "files" / "features" / f"{i}.npy", latents[i][None].numpy())
        np.save(root / "files" / "labels" / f"{i}.npy", labels[i][None].numpy())
    write_shards(
        root / "shards",
        latents,
        labels,
        num_classes=NUM_CLASSES,
        source="random",
        shard_size=-(-count // 4),
    )


def plain(root: Path, count: int, batch: int, workers: int) -> Iterator[Any]:
    """Endless shuffled batches of the plain Dataset, as floats."""
    batches = DataLoader(
        NpyPerSample(root / "files", count),
        batch_size=batch,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    while True:
        for latents, labels in batches:
            yield latents.squeeze(1).float(), labels.squeeze(1)


def ours(
    path: Path, model: DiTConfig, batch: int, workers: int, *, as_before: bool = False
) -> Iterator[Any]:
    """Endless batches of this loader, as tokens; `as_before` reads shards as mapped files."""
    source = Latents(path=str(path)).open()
    if as_before:
        assert isinstance(source, LatentShards)
        source = mapped(source)
    order = RankOrder(BatchPlan(batch), EpochOrder(0, len(source)), 0, 1)
    objective, cpu = RectifiedFlowConfig().build(model, source.facts), torch.device("cpu")
    for read in loader.load(source, order, 0, objective.inspect, cpu, workers=workers):
        rng = SampleRNG(0, read.sample_numbers)
        yield objective.clean_tokens(read.fields, rng), read.fields["label"]


def measure(
    contenders: dict[str, Callable[[], Iterator[Any]]], num_batches: int, batch: int, turns: int
) -> dict[str, list[float]]:
    """Samples per second by contender and turn; workers live for one turn only."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            batches = contenders[name]()
            # Workers prefetch up to four batches: discard them, or they would be free.
            for _ in itertools.islice(batches, 6):
                pass
            began = time.perf_counter()
            for _ in itertools.islice(batches, num_batches):
                pass
            rates[name].append(num_batches * batch / (time.perf_counter() - began))
            del batches
    return rates


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=4096)
    parser.add_argument("--channels", type=int, default=4)
    parser.add_argument("--latent-size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--batches", type=int, default=24, help="timed batches per contender and turn"
    )
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--folder", help="parent of the temporary folder; default: the system's")
    parser.add_argument("--out")
    options = parser.parse_args()
    torch.set_num_threads(1)  # One thread per process, as in a worker.
    shape = (options.channels, options.latent_size, options.latent_size)
    title = f"loader {options.count} x {list(shape)} batch {options.batch}"
    if options.cold:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            where = Path(folder) / "shards"
            rows = measure_cold(where, shape, options.count, options.batch, options.turns)
        finish(f"{title}, cold and warm cache", rows, options.out)
        return
    model = DiTConfig(
        hidden_size=8,
        num_layers=1,
        num_heads=1,
        patch_size=2,
        latent_size=options.latent_size,
        in_channels=options.channels,
        num_classes=NUM_CLASSES,
    )
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        root = Path(folder)
        make_datasets(root, options.count, shape)
        for workers in (0, 1):
            rates = measure(
                {
                    "one .npy per sample": lambda w=workers: plain(
                        root, options.count, options.batch, w
                    ),
                    "shards": lambda w=workers: ours(root / "shards", model, options.batch, w),
                    "shards, mapped as before": lambda w=workers: ours(
                        root / "shards", model, options.batch, w, as_before=True
                    ),
                    "the same .npy files, this loader": lambda w=workers: ours(
                        root / "files", model, options.batch, w
                    ),
                },
                options.batches,
                options.batch,
                options.turns,
            )
            base = rates["one .npy per sample"]
            for name, turns in rates.items():
                ratios = [mine / other for mine, other in zip(turns, base, strict=True)]
                rows.append(
                    {
                        "reads": name,
                        "workers": workers,
                        "samples/s": f"{statistics.median(turns):,.0f}",
                        "/ one .npy per sample": f"{statistics.median(ratios):.1f}",
                    }
                )
    finish(title, rows, options.out)


if __name__ == "__main__":
    main()
