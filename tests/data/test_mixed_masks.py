"""Masks of some of several datasets: the mean of weights is 1 over the samples of an epoch."""

import pytest
import torch
from captioned_sets import write_beside, write_set

from titan_dit.data.latents import LatentShards
from titan_dit.data.mixed_latents import mixed
from titan_dit.data.sections import DatasetConfig

COUNTS = {"one": {(4, 4): 6, (4, 8): 2}, "two": {(4, 8): 4}, "three": {(4, 4): 3}}
MASKED = ("one", "three")
SHARES = {
    "once": {},
    "repeats": {"one": {"repeats": 3}, "three": {"repeats": 2}},
    "weights": {"one": {"weight": 0.5}, "two": {"weight": 0.2}, "three": {"weight": 0.3}},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root, first = tmp_path_factory.mktemp("sets"), 0
    for name, counts in COUNTS.items():
        write_set(root / name, counts, first=first, encoder=None)
        write_beside(root / name, ("mask",) if name in MASKED else (), seed=first)
        first += 100
    return root


def mixture(folders, share):
    datasets = [DatasetConfig(path=str(folders / name), **share.get(name, {})) for name in COUNTS]
    sources = [LatentShards(folders / name, verify=True) for name in COUNTS]
    return mixed(sources, datasets), sources


@pytest.mark.parametrize("kind", SHARES)
def test_the_mean_of_weights_over_the_samples_of_epochs_is_one(kind, folders):
    source, _ = mixture(folders, SHARES[kind])
    order = source.order(0, (), "shuffled", (2, 2))
    masks = [source[row]["mask"] for row in range(len(source))]
    sums = torch.tensor([mask.sum(dtype=torch.int64) for mask in masks])
    sizes = torch.tensor([mask.numel() for mask in masks])
    rows = order.rows(range(100 * order.num_rows))
    assert float(sums[rows].sum() / sizes[rows].sum()) / source.facts.mask_mean == pytest.approx(
        1, abs=2e-3
    )


def test_rows_without_masks_have_white_ones_of_their_size(folders):
    source, (one, two, three) = mixture(folders, {})
    assert source.fields["mask"].dtype == torch.uint8
    seen = []
    for bucket, rows in enumerate(source.bucket_rows):
        batch = source.read(list(rows))
        assert batch["mask"].dtype == torch.uint8
        assert batch["mask"].shape[1:] == source.bucket_fields(bucket)["mask"].shape
        for row, (dataset, [there], _) in zip(
            rows, (next(iter(source.split([row]))) for row in rows), strict=True
        ):
            mask = batch["mask"][row - rows.start]
            if dataset == 1:
                assert (mask == 255).all()
            else:
                assert mask.equal((one, two, three)[dataset][there]["mask"])
            seen.append(dataset)
    assert {*seen} == {0, 1, 2}


def test_clips_and_pictures_with_masks_mix(tmp_path):
    write_beside(write_set(tmp_path / "clips", {(2, 4, 4): 4}, encoder=None), ("mask",))
    write_set(tmp_path / "pictures", {(4, 4): 4}, first=50, encoder=None)
    names = ("clips", "pictures")
    sources = [LatentShards(tmp_path / name) for name in names]
    source = mixed(sources, [DatasetConfig(path=str(tmp_path / name)) for name in names])
    sizes = {tuple(source.read([row])["mask"].shape) for row in range(8)}
    assert sizes == {(1, 2, 4, 4), (1, 1, 4, 4)}
    mean = sources[0].facts.mask_mean
    assert source.facts.mask_mean == pytest.approx((2 * mean + 255) / 3)


def test_a_mixture_without_masks_has_none(folders):
    two = LatentShards(folders / "two")
    source = mixed([two], [DatasetConfig(path=str(folders / "two"), repeats=2)])
    assert source.facts.mask_mean is None
    assert "mask" not in source.fields
