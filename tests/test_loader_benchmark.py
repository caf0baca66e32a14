"""benchmarks/loader.py on a tiny dataset."""

import itertools
import sys
from types import SimpleNamespace

import torch
from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import loader

from titan_dit.models.dit_config import DiTConfig

MODEL = DiTConfig(
    hidden_size=8,
    num_layers=1,
    num_heads=1,
    patch_size=2,
    latent_size=4,
    in_channels=1,
    num_classes=10,
)


def test_all_contenders_read_the_same_samples(tmp_path):
    loader.make_datasets(tmp_path, 12, (1, 4, 4))
    stored = torch.randn(12, 1, 4, 4, generator=torch.Generator().manual_seed(0)).half().float()
    read = [next(loader.plain(tmp_path, 12, 12, 0))]
    for name in ("shards", "files"):
        tokens, labels = next(loader.ours(tmp_path / name, MODEL, 12, 0))
        read.append((MODEL.detokenize(tokens), labels))
    for latents, labels in read:
        pairs = zip(latents.flatten(1).tolist(), labels.tolist(), strict=True)
        assert sorted(pairs) == sorted(
            (x, i % 10) for i, x in enumerate(stored.flatten(1).tolist())
        )


def test_the_rate_is_that_of_the_timed_batches_and_everyone_goes_first(monkeypatch):
    """Fake clock: a batch of `a` takes 1 s, of `b` 4 s; the first six of a turn are not timed."""
    now, order = [0.0], []
    monkeypatch.setattr(loader, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def contender(name, seconds):
        def batches():
            order.append(name)
            for number in itertools.count():
                now[0] += 100 if number < 6 else seconds
                yield None

        return batches

    contenders = {"a": contender("a", 1), "b": contender("b", 4)}
    rates = loader.measure(contenders, num_batches=3, batch=8, turns=2)
    assert rates == {"a": [8.0, 8.0], "b": [2.0, 2.0]}
    assert order == ["a", "b", "b", "a"]
