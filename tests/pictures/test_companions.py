"""References and masks beside pictures: whose they are, what is stored, what is refused."""

import os
import tarfile

import numpy as np
import pytest
import torch
from encoded_sets import encoded, picture
from PIL import Image
from refusals import refused
from tiny_vae import save_vae

from titan_dit.data.latents import LatentShards
from titan_dit.pictures import autoencoder
from titan_dit.pictures.picture_set import ListingOptions
from titan_dit.pictures.readers import open_input

CPU = torch.device("cpu")
HALF = np.repeat([[255, 0]], 8, 0).repeat(4, 1).astype(np.uint8)
"""A mask whose left half is white."""


def make(root, names, masks=("1",)):
    """Captioned pictures, each with a reference; some with a mask."""
    root.mkdir()
    for number, name in enumerate(names):
        picture(number).save(root / f"{name}.png")
        picture(100 + number).save(root / f"{name}.reference.png")
        (root / f"{name}.txt").write_text(f"picture {name}")
        if name in masks:
            Image.fromarray(HALF).save(root / f"{name}.mask.png")
    return root


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    return save_vae(tmp_path_factory.mktemp("vae") / "vae")


def test_every_row_has_the_latents_of_its_own_reference_and_the_weights_of_its_mask(tmp_path, vae):
    root = make(tmp_path / "in", ["0", "1", "2", "10"])
    assert encoded(root, tmp_path / "out", vae, flip=True) == []
    source = LatentShards(tmp_path / "out", verify=True)
    assert source.facts.reference.channels == 2
    assert source.facts.reference.kind == "picture"
    rows = source.read([7, 2, 3, 0])
    assert rows["latent"].shape == (4, 4, 4, 4)
    loaded = autoencoder.load(vae, CPU)
    for place, number, is_mirrored in ((0, 3, True), (1, 1, False), (2, 1, True), (3, 0, False)):
        given = torch.from_numpy(np.array(picture(100 + number))).permute(2, 0, 1)[None]
        mean, _ = loaded.encode(given.flip(-1) if is_mirrored else given)
        torch.testing.assert_close(rows["reference"][place], mean[0].half(), rtol=0, atol=2e-3)
    # Two of four columns of latents, the mirror image the other two; white without a mask.
    assert rows["mask"][1].tolist() == [[255, 255, 0, 0]] * 4
    assert rows["mask"][2].tolist() == [[0, 0, 255, 255]] * 4
    assert (rows["mask"][[0, 3]] == 255).all()
    assert source.facts.mask_mean == pytest.approx(255 * 7 / 8)
    assert source.bucket_fields(0).keys() == source.fields.keys() == rows.keys()


def test_another_reference_is_noticed_after_encoding(tmp_path, vae):
    root = make(tmp_path / "in", ["0", "1"])
    assert encoded(root, tmp_path / "out", vae) == []
    assert encoded(root, tmp_path / "out", vae) is None, "it is whole"
    before = (root / "1.reference.png").stat().st_mtime_ns
    picture(7).save(root / "1.reference.png")
    os.utime(root / "1.reference.png", ns=(before + 10**9, before + 10**9))
    assert "files have changed" in refused(lambda: encoded(root, tmp_path / "out", vae))


def test_a_mask_of_another_size_leaves_the_picture_out_by_name(tmp_path, vae):
    root = make(tmp_path / "in", ["0", "1", "2"])
    Image.fromarray(HALF[:4]).save(root / "1.mask.png")
    picture(1, size=10).save(root / "2.reference.png")
    dropped = dict(encoded(root, tmp_path / "out", vae))
    assert dropped == {
        1: "its mask 1.mask.png has 8x4 pixels, the picture 8x8. Save both in one size",
        2: "its reference 2.reference.png has 10x10 pixels, the picture 8x8. Save both in one size",
    }
    assert len(LatentShards(tmp_path / "out")) == 1


def test_masks_that_are_all_black_are_refused(tmp_path, vae):
    root = make(tmp_path / "in", ["0"], masks=())
    Image.fromarray(HALF * 0).save(root / "0.mask.png")
    said = refused(lambda: encoded(root, tmp_path / "out", vae))
    assert said.startswith("[data encode] all masks are black")


def said_of(root, **asked):
    return refused(lambda: open_input(root, ListingOptions(**asked)))


def test_companions_without_their_picture_are_refused_by_name(tmp_path):
    root = make(tmp_path / "in", ["0"])
    picture(5).save(root / "lost.mask.png")
    assert "lost.mask.png is the mask of no picture: there is no lost.*." in said_of(root)
    (root / "lost.mask.png").unlink()
    picture(5).save(root / "lost.reference.jpg")
    assert "lost.reference.jpg is the reference of no picture" in said_of(root)
    (root / "lost.reference.jpg").unlink()
    picture(5).save(root / "0.reference.jpg")
    assert "0.reference" in said_of(root)


def test_references_of_some_pictures_only_are_refused(tmp_path):
    root = make(tmp_path / "in", ["0", "1", "2"])
    (root / "1.reference.png").unlink()
    assert "2 of 3 pictures have a reference, but not 1.png" in said_of(root)


def test_companions_in_folders_of_classes_and_beside_a_metadata_file_are_found(tmp_path):
    for name in ("cat/0", "cat/1", "dog/0"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        picture(1).save(tmp_path / f"{name}.png")
        picture(2).save(tmp_path / f"{name}.reference.png")
    found = open_input(tmp_path, ListingOptions())
    assert list(found.names) == ["cat/0.png", "cat/1.png", "dog/0.png"]
    assert found.labels.tolist() == [0, 0, 1]
    assert found.companions == {
        "reference": {
            n: f"{name}.reference.png" for n, name in enumerate(("cat/0", "cat/1", "dog/0"))
        }
    }
    (tmp_path / "metadata.csv").write_text("file_name,label\ndog/0.png,3\ncat/1.png,1\n")
    found = open_input(tmp_path, ListingOptions(num_classes=4))
    assert found.companions["reference"] == {0: "dog/0.reference.png", 1: "cat/1.reference.png"}


def test_words_and_suffixes_of_companions_may_be_capitals_in_folders_and_tar_files(tmp_path):
    root = make(tmp_path / "in", ["0", "1"], masks=())
    (root / "0.reference.png").rename(root / "0.Reference.PNG")
    Image.fromarray(HALF).save(root / "1.MASK.png")
    tar = in_tar(root, tmp_path / "in.tar")
    for source, of_tar, end in ((root, "", ".png"), (tar, "in.tar:", "")):
        found = open_input(source, ListingOptions())
        assert sorted(found.names) == [f"{of_tar}{n}{end}" for n in (0, 1)]
        files = {kind: sorted(names.values()) for kind, names in found.companions.items()}
        assert files == {
            "reference": [f"{of_tar}0.Reference.PNG", f"{of_tar}1.reference.png"],
            "mask": [f"{of_tar}1.MASK.png"],
        }


def test_some_rows_of_a_set_keep_their_references_and_masks(tmp_path):
    root = make(tmp_path / "in", ["0", "1", "2"], masks=("2",))
    tar = in_tar(root, tmp_path / "in.tar")
    for source in (root, tar):
        whole = open_input(source, ListingOptions())
        rows = [2, 0, 2]
        some = whole.of_rows(rows, names=["a", "b", "c"])
        assert list(some.names) == ["a", "b", "c"]
        assert list(some.texts) == [whole.texts[row] for row in rows]
        for place, row in enumerate(rows):
            assert some.read(place) == whole.read(row)
            for kind in ("reference", "mask"):
                assert some.read_companion(kind, place) == whole.read_companion(kind, row)


def in_tar(root, file, *left_out):
    """The files of a folder as members of a tar file."""
    with tarfile.open(file, "w") as archive:
        for path in sorted(root.iterdir(), reverse=True):
            if path.name not in left_out:
                archive.add(path, path.name)
    return file


def test_tar_files_hold_references_and_masks_of_their_samples(tmp_path, vae):
    root = make(tmp_path / "in", ["0", "1", "2", "3"], masks=("1", "3"))
    tar = in_tar(root, tmp_path / "in.tar")
    found = open_input(tar, ListingOptions())
    assert list(found.names) == [f"in.tar:{n}" for n in (3, 2, 1, 0)]
    assert found.companions["mask"] == {0: "in.tar:3.mask.png", 2: "in.tar:1.mask.png"}
    assert encoded(root, tmp_path / "of_folder", vae) == []
    assert encoded(tar, tmp_path / "of_tar", vae) == []
    of_folder, of_tar = (LatentShards(tmp_path / name) for name in ("of_folder", "of_tar"))
    assert of_tar.facts.mask_mean == of_folder.facts.mask_mean == 255 * 3 / 4
    rows, others = of_folder.read([0, 1, 2, 3]), of_tar.read([3, 2, 1, 0])
    assert rows["mask"].float().mean((1, 2)).tolist() == [255, 127.5, 255, 127.5]
    assert rows.keys() == others.keys()
    for name, value in rows.items():
        torch.testing.assert_close(others[name], value, rtol=0, atol=1e-3)


def test_members_of_tar_files_that_fit_no_picture_are_refused_by_name(tmp_path, vae):
    root = make(tmp_path / "in", ["0", "1", "2"])
    tar = tmp_path / "in.tar"
    in_tar(root, tar, "1.png")
    assert "in.tar:1.reference.png is the reference of no picture" in said_of(tar)
    in_tar(root, tar, "1.reference.png")
    assert "2 of 3 pictures have a reference, but not in.tar:1." in said_of(tar)
    picture(5).save(root / "0.reference.jpg")
    in_tar(root, tar)
    assert "is the second reference of 0. Keep one." in said_of(tar)
    (root / "0.reference.jpg").unlink()
    Image.fromarray(HALF[:4]).save(root / "1.mask.png")
    (root / "2.reference.png").write_bytes(b"")
    dropped = dict(encoded(in_tar(root, tar), tmp_path / "out", vae))
    assert dropped.pop(1).startswith("its mask in.tar:1.mask.png has 8x4 pixels, the picture 8x8")
    assert dropped.pop(0).startswith("its reference in.tar:2.reference.png: ")
    assert not dropped
    assert open_input(tar, ListingOptions(gaps=True)).companions == {}
