import json

import numpy as np
import pytest
import torch
from folders_of_files import class_folders, pair, pictures, save

from titan_dit.config.section import UserError
from titan_dit.data import listing
from titan_dit.data.latents import write_shards
from titan_dit.data.listing import Names, layout_of, list_folder, natural


def refused(root, **how):
    with pytest.raises(UserError) as caught:
        list_folder(root, **how)
    assert str(caught.value).startswith("[data] ")
    assert str(root) in str(caught.value)
    return str(caught.value)


def shards(root):
    zeros = torch.zeros(2, 4, 8, 8)
    write_shards(root, zeros, torch.zeros(2).long(), num_classes=1, source="test")


def test_numbers_are_labels_and_files_come_in_natural_order(tmp_path):
    class_folders(tmp_path, each=12)
    (tmp_path / "0001" / ".hidden").touch()
    found = list_folder(tmp_path)
    assert (found.layout, found.kind, found.num_classes) == ("classes", "latents", 3)
    assert list(found.names)[:12] == [f"0000/{i}.npy" for i in range(12)]
    assert found.labels.tolist() == [0] * 12 + [1] * 12 + [2] * 12
    assert found.class_names == ()


def test_names_are_numbered_in_sorted_order_or_as_the_manifest_lists_them(tmp_path):
    class_folders(tmp_path, classes=("dog", "cat", "emu"), each=1)
    found = list_folder(tmp_path)
    assert found.class_names == ("cat", "dog", "emu")
    assert list(found.names) == ["cat/0.npy", "dog/0.npy", "emu/0.npy"]
    manifest = {"format": "titan_dit.folder/1", "classes": ["emu", "cat", "dog"]}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    found = list_folder(tmp_path)
    assert found.class_names == ("emu", "cat", "dog")
    assert list(found.names) == ["emu/0.npy", "cat/0.npy", "dog/0.npy"]
    assert found.labels.tolist() == [0, 1, 2]


@pytest.mark.parametrize("prefix", ["", "imagenet256_"])
def test_the_features_and_labels_of_fast_dit_are_one_dataset(tmp_path, prefix):
    _, labels = pair(tmp_path, prefix)
    found = list_folder(tmp_path)
    assert (found.layout, found.num_classes) == ("pair", 3)
    assert list(found.names) == [f"{prefix}features/{i}.npy" for i in range(12)]
    assert torch.equal(found.labels, labels)


def stray(root):
    (root / "README.txt").touch()


def gap(root):
    class_folders(root, classes=("0000", "0001", "0004"))


def twice(root):
    class_folders(root, classes=("0", "00", "1"))


def empty(root):
    class_folders(root)
    (root / "0003").mkdir()


def deep(root):
    class_folders(root)
    save(root / "0001" / "more" / "0.npy", torch.zeros(4, 8, 8))


def other_file(root):
    class_folders(root)
    (root / "0001" / "notes.txt").touch()


def same_stem(root):
    class_folders(root)
    save(root / "0001" / "0.pt", torch.zeros(4, 8, 8))


def mixed_kinds(root):
    class_folders(root)
    pictures(root, classes=("0003",))


def beside(root):
    class_folders(root)
    stray(root)


def loose(root):
    save(root / "0.npy", torch.zeros(4, 8, 8))


def lone_feature(root):
    pair(root)
    (root / "labels" / "3.npy").unlink()


def lone_label(root):
    pair(root)
    (root / "features" / "3.npy").unlink()


def no_labels(root):
    pair(root)
    (root / "labels").rename(root.parent / "labels")


def bad_label(root):
    pair(root)
    np.save(root / "labels" / "5.npy", np.array([-2]))


def cut_label(root):
    pair(root)
    (root / "labels" / "5.npy").write_bytes(b"\x93NUMPY")


def label_gap(root):
    pair(root)
    np.save(root / "labels" / "5.npy", np.array([900]))


def huge_label(root):
    pair(root)
    np.save(root / "labels" / "5.npy", np.array([2**31 - 1]))


def impossible_label(root):
    pair(root)
    np.save(root / "labels" / "5.npy", np.array([10**12]))


def huge_folder(root):
    class_folders(root, classes=("0", "99999999"))


def impossible_folder(root):
    class_folders(root, classes=("0", "9" * 40))


def odd_name(root):
    class_folders(root, classes=("0000", "0001", "0003", "tmp"))


def odd_number(root):
    class_folders(root, classes=("cat", "dog", "7"))


def unfinished(root):
    (root / "pack.json").write_text('{"plan": "x"}')
    (root / "set-00000.safetensors").touch()


def pair_and_classes(root):
    pair(root)
    class_folders(root)


def two_pairs(root):
    pair(root, "a_")
    pair(root, "b_")


def shards_and_classes(root):
    shards(root)
    class_folders(root)


def shards_and_pair(root):
    shards(root)
    pair(root)


BAD = {
    gap: ("no samples of 2 classes: 2, 3", "Add them", "--num-classes"),
    twice: ("0 and 00 are both class 0",),
    empty: ("empty class folders: 0003",),
    deep: ("0001: more is neither a latent",),
    other_file: ("0001: notes.txt is neither",),
    same_stem: ("0001: 0.npy and 0.pt are the same sample",),
    mixed_kinds: ("latents (0000/0.npy) and images (0003/0.png): two datasets in one folder",),
    beside: ("README.txt is outside the class folders",),
    loose: ("no dataset found", "It holds 0.npy"),
    lone_feature: ("features/3.npy has no file of the same name in labels",),
    lone_label: ("labels/3.npy has no file of the same name in features",),
    no_labels: ("found features, but no labels",),
    bad_label: ("labels/5.npy: holds -2, not a class number",),
    cut_label: ("labels/5.npy: not a readable .npy file",),
    label_gap: ("no samples of 897 classes: 3, 4, 5, 6 and 893 more",),
    huge_label: ("no samples of 2,147,483,644 classes: 3, 4, 5, 6 and 2,147,483,640 more",),
    impossible_label: ("labels/5.npy: holds 1000000000000, not a class number",),
    huge_folder: ("no samples of 99,999,998 classes: 1, 2, 3, 4 and 99,999,994 more",),
    impossible_folder: ("is too large for a class number",),
    odd_name: ("numbers (0000, 0001, 0003), but tmp is not", '"classes" in manifest.json'),
    odd_number: ("names (cat, dog), but 7 is not",),
    unfinished: ("packing is unfinished. Run the same `data pack` command again",),
    pair_and_classes: ("the pair features and labels and the class folders 0000, 0001, 0002",),
    two_pairs: ("the pair a_features and a_labels and the pair b_features and b_labels",),
    shards_and_classes: ("the shards of manifest.json and the class folders 0000", "two datasets"),
    shards_and_pair: ("the pair features and labels and the shards of manifest.json",),
}


@pytest.mark.parametrize("make", BAD)
def test_a_folder_that_is_no_dataset_is_told_why(tmp_path, make):
    (tmp_path / "set").mkdir()
    make(tmp_path / "set")
    message = refused(tmp_path / "set")
    for words in BAD[make]:
        assert words in message


def test_a_picture_of_a_dataset_beside_its_shards_is_no_dataset(tmp_path):
    shards(tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "how.txt").touch()
    assert layout_of(tmp_path) == "shards"


def test_who_says_how_many_classes_there_are_may_lack_some(tmp_path):
    class_folders(tmp_path / "numbers", classes=("0000", "0004"))
    found = list_folder(tmp_path / "numbers", num_classes=10)
    assert (found.num_classes, found.labels.unique().tolist()) == (10, [0, 4])
    pair(tmp_path / "pair")
    np.save(tmp_path / "pair" / "labels" / "5.npy", np.array([7]))
    assert list_folder(tmp_path / "pair", num_classes=8).num_classes == 8
    assert "num_classes=7, but there are 8 classes" in refused(tmp_path / "pair", num_classes=7)
    class_folders(tmp_path / "names", classes=("a", "c"))
    found = list_folder(tmp_path / "names", num_classes=3, classes=("a", "b", "c"))
    assert (found.num_classes, found.labels.unique().tolist()) == (3, [0, 2])


def test_names_and_a_number_of_classes_must_agree(tmp_path):
    class_folders(tmp_path / "names", classes=("a", "b", "c"))
    for how in ({"num_classes": 1000}, {"num_classes": 10, "classes": ("a", "b", "c")}):
        assert "List the names of all classes" in refused(tmp_path / "names", **how)
    pair(tmp_path / "pair")
    assert "List the names of all classes" in refused(
        tmp_path / "pair", num_classes=4, classes=("a", "b", "c")
    )
    assert list_folder(tmp_path / "names", num_classes=3).num_classes == 3


def test_options_that_contradict_the_manifest_are_refused(tmp_path):
    class_folders(tmp_path, classes=("a", "b"))
    manifest = {"format": "titan_dit.folder/1", "classes": ["b", "a"], "num_classes": 2}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert "classes is a, b, but manifest.json says b, a" in refused(tmp_path, classes=("a", "b"))
    assert "num_classes is 3, but manifest.json says 2" in refused(tmp_path, num_classes=3)
    assert list_folder(tmp_path, num_classes=2, classes=["b", "a"]).class_names == ("b", "a")


def test_the_classes_of_a_list_and_the_folders_must_be_the_same(tmp_path):
    class_folders(tmp_path, classes=("a", "b"))
    assert "no samples of 1 classes: c" in refused(tmp_path, classes=("a", "b", "c"))
    message = refused(tmp_path, classes=("a", "x"))
    assert "the folders b are not among the 2 listed classes" in message


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ({"scal": 1}, "unknown key scal"),
        ({"scale": "x"}, "scale"),
        ({"scale": 0}, "scale=0"),
        ({"classes": ["a", "a"]}, "'a' twice"),
        ({"format": "titan_dit.folder/2"}, "titan_dit.folder/1"),
    ],
)
def test_a_manifest_with_mistakes_is_refused(tmp_path, manifest, words):
    class_folders(tmp_path)
    text = json.dumps({"format": "titan_dit.folder/1"} | manifest)
    (tmp_path / "manifest.json").write_text(text)
    assert words in refused(tmp_path)


def test_many_names_are_kept_in_one_block_in_natural_order():
    names = Names(["a/10.npy", "ü/2.npy", "b/\udcff.npy"])
    assert list(names) == ["a/10.npy", "ü/2.npy", "b/\udcff.npy"]
    assert [names[-1], names[-3]] == ["b/\udcff.npy", "a/10.npy"]
    for outside in (3, -4):
        with pytest.raises(IndexError):
            names[outside]
    assert sorted(["10.npy", "9.npy", "a2b10", "a2b9", "2.npy"], key=natural) == [
        *("2.npy", "9.npy", "10.npy", "a2b9", "a2b10")
    ]


def test_many_labels_are_announced(tmp_path, monkeypatch, capsys):
    pair(tmp_path, count=3)
    paths = [tmp_path / "labels" / f"{i % 3}.npy" for i in range(listing.MANY_LABELS + 1)]
    labels = listing.read_labels(paths)
    assert torch.equal(labels, torch.arange(len(paths)) % 3)
    assert "reading 20,001 label files" in capsys.readouterr().err
