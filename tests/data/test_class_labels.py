import numpy as np
import pytest
import torch
from folders_of_files import class_folders, pair
from refusals import refused_folder

from titan_dit.data import listing
from titan_dit.data.listing import list_folder


def gap(root):
    class_folders(root, classes=("0000", "0001", "0004"))


def twice(root):
    class_folders(root, classes=("0", "00", "1"))


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


BAD = {
    gap: ("no samples of 2 classes: 2, 3", "Add them", "--num-classes"),
    twice: ("0 and 00 are both class 0",),
    bad_label: ("labels/5.npy: holds -2, not a class number",),
    cut_label: ("labels/5.npy: not a readable .npy file",),
    label_gap: ("no samples of 897 classes: 3, 4, 5, 6 and 893 more",),
    huge_label: ("no samples of 2,147,483,644 classes: 3, 4, 5, 6 and 2,147,483,640 more",),
    impossible_label: ("labels/5.npy: holds 1000000000000, not a class number",),
    huge_folder: ("no samples of 99,999,998 classes: 1, 2, 3, 4 and 99,999,994 more",),
    impossible_folder: ("is too large for a class number",),
    odd_name: ("numbers (0000, 0001, 0003), but tmp is not", '"classes" in manifest.json'),
    odd_number: ("names (cat, dog), but 7 is not",),
}


@pytest.mark.parametrize("make", BAD)
def test_labels_without_samples_and_ambiguous_classes_are_refused(tmp_path, make):
    (tmp_path / "set").mkdir()
    make(tmp_path / "set")
    message = refused_folder(tmp_path / "set")
    for words in BAD[make]:
        assert words in message


def test_who_says_how_many_classes_there_are_may_lack_some(tmp_path):
    class_folders(tmp_path / "numbers", classes=("0000", "0004"))
    found = list_folder(tmp_path / "numbers", num_classes=10)
    assert (found.num_classes, found.labels.unique().tolist()) == (10, [0, 4])
    pair(tmp_path / "pair")
    np.save(tmp_path / "pair" / "labels" / "5.npy", np.array([7]))
    assert list_folder(tmp_path / "pair", num_classes=8).num_classes == 8
    assert "num_classes=7, but there are 8 classes" in refused_folder(
        tmp_path / "pair", num_classes=7
    )
    class_folders(tmp_path / "names", classes=("a", "c"))
    found = list_folder(tmp_path / "names", num_classes=3, classes=("a", "b", "c"))
    assert (found.num_classes, found.labels.unique().tolist()) == (3, [0, 2])


def test_names_and_a_number_of_classes_must_agree(tmp_path):
    class_folders(tmp_path / "names", classes=("a", "b", "c"))
    for how in ({"num_classes": 1000}, {"num_classes": 10, "classes": ("a", "b", "c")}):
        assert "List the names of all classes" in refused_folder(tmp_path / "names", **how)
    pair(tmp_path / "pair")
    assert "List the names of all classes" in refused_folder(
        tmp_path / "pair", num_classes=4, classes=("a", "b", "c")
    )
    assert list_folder(tmp_path / "names", num_classes=3).num_classes == 3


def test_the_classes_of_a_list_and_the_folders_must_be_the_same(tmp_path):
    class_folders(tmp_path, classes=("a", "b"))
    assert "no samples of 1 classes: c" in refused_folder(tmp_path, classes=("a", "b", "c"))
    message = refused_folder(tmp_path, classes=("a", "x"))
    assert "the folders b are not among the 2 listed classes" in message


def test_many_labels_are_announced(tmp_path, monkeypatch, capsys):
    pair(tmp_path, count=3)
    paths = [tmp_path / "labels" / f"{i % 3}.npy" for i in range(listing.MANY_LABELS + 1)]
    labels = listing.read_labels(paths)
    assert torch.equal(labels, torch.arange(len(paths)) % 3)
    assert "reading 20,001 label files" in capsys.readouterr().err
