"""Folders with NAME.txt beside NAME.jpg: whose caption is which, and what is refused by name."""

import json
import os

import pytest
from encoded_sets import encoded, picture
from refusals import refused
from tiny_vae import save_vae

from titan_dit.data.files import BadFileError
from titan_dit.data.latents import LatentShards
from titan_dit.pictures.picture_set import ListingOptions
from titan_dit.pictures.readers import open_input

FLAT = {"1.png": "one", "2.JPG": "two\n", "10.webp": "\ufeffzehn Bäume "}


def make(root, captions):
    """A picture for each name, and its caption beside it unless that is None."""
    for number, (name, text) in enumerate(captions.items()):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        kind = {"jpg": "JPEG", "webp": "WEBP"}.get(file.suffix[1:].lower(), "PNG")
        picture(number).save(file, format=kind)
        if text is not None:
            file.with_suffix(".txt").write_text(text)
    return root


def listed(root, **asked):
    return open_input(root, ListingOptions(**asked))


def said_of(root, **asked):
    return refused(lambda: listed(root, **asked))


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    return save_vae(tmp_path_factory.mktemp("vae") / "vae")


def test_a_flat_folder_has_a_caption_for_each_picture_in_natural_order(tmp_path):
    found = listed(make(tmp_path / "in", FLAT))
    assert list(found.names) == ["1.png", "2.JPG", "10.webp"]
    assert list(found.texts) == ["one", "two", "zehn Bäume"]
    assert found.labels.tolist() == [0, 0, 0]
    assert (found.num_classes, found.captioned, found.kind) == (
        1,
        True,
        "a folder of captioned pictures",
    )
    assert found.read(1) == (tmp_path / "in" / "2.JPG").read_bytes()
    assert found.stamp(1)[0] == len(found.read(1))


def test_folders_at_any_depth_are_no_classes(tmp_path):
    names = {"b/9.png": "nine", "b/10.png": "ten", "a/c/1.png": "deep", "top.png": "top"}
    found = listed(make(tmp_path / "in", names))
    assert list(found.names) == ["a/c/1.png", "b/9.png", "b/10.png", "top.png"]
    assert list(found.texts) == ["deep", "nine", "ten", "top"]
    assert set(found.labels.tolist()) == {0}
    one_deep = listed(make(tmp_path / "one", {"0/a.png": "a", "7/b.png": "b"}))
    assert list(one_deep.texts) == ["a", "b"]
    assert one_deep.num_classes == 1


def test_a_folder_for_each_class_without_captions_stays_one(tmp_path):
    found = listed(make(tmp_path / "in", {"cat/1.png": None, "dog/1.png": None}))
    assert (found.kind, found.class_names) == ("a folder per class", ("cat", "dog"))
    (tmp_path / "in" / "dog" / "notes.txt").write_text("no picture has this name")
    assert "dog: notes.txt is neither a latent" in said_of(tmp_path / "in")


def test_pictures_without_a_caption_are_refused_by_name(tmp_path):
    root = make(tmp_path / "in", FLAT | {"3.png": None, "4.png": " \n"})
    assert said_of(root) == (
        f"[data encode] input={root}: 2 of 5 pictures have no caption: 3.png, 4.png. Add it "
        "(NAME.txt beside NAME.jpg), or choose --no-caption skip or --no-caption empty."
    )
    assert listed(root, no_caption="skip").left_out == {2: "no caption", 3: "no caption"}
    kept = listed(root, no_caption="empty")
    assert (list(kept.texts)[2:4], kept.left_out) == (["", ""], {})
    bare = make(tmp_path / "bare", {"1.png": None})
    assert "1 of 1 pictures have no caption: 1.png" in said_of(bare)
    assert said_of(bare).endswith("For classes, make a folder for each one.")
    assert listed(bare, no_caption="empty").num_classes == 1


def test_a_prefix_stands_in_front_of_every_caption_and_for_a_missing_one(tmp_path):
    root = make(tmp_path / "in", {"1.png": "one", "2.png": None, "3.png": "three"})
    rows = [{"file_name": f"{n}.png"} for n in range(1, 4)]
    rows[0]["text"], rows[2]["text"] = ["a one", "1"], "three"
    prefix = "sks, "
    skipped = listed(root, caption_prefix=prefix, no_caption="skip")
    assert list(skipped.texts) == ["sks, one", "", "sks, three"]
    assert skipped.left_out == {1: "no caption"}
    empty = listed(root, caption_prefix=prefix, no_caption="empty")
    assert list(empty.texts) == ["sks, one", "sks", "sks, three"]
    assert list(listed(root, no_caption="empty").texts) == ["one", "", "three"]
    (root / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    drawn = listed(root, caption_prefix=prefix, no_caption="empty")
    assert list(drawn.texts) == [("sks, a one", "sks, 1"), "sks", "sks, three"]

    classes = make(tmp_path / "classes", {"cat/1.png": None, "dog/1.png": None})
    assert said_of(classes, caption_prefix=prefix) == (
        '[data encode] --caption-prefix "sks, ": the pictures have no captions. To give all of '
        "them the prefix alone, add --no-caption empty."
    )
    alone = listed(classes, caption_prefix=prefix, no_caption="empty")
    assert list(alone.texts) == ["sks", "sks"]


def test_captions_of_a_table_may_be_missing_beside_labels_only(tmp_path):
    root = make(tmp_path / "in", {"1.png": None, "2.png": None})

    def table(*rows):
        lines = (json.dumps(row) + "\n" for row in rows)
        (root / "metadata.jsonl").write_text("".join(lines))

    table({"file_name": "1.png", "text": "one"}, {"file_name": "2.png"})
    assert "1 of 2 pictures have no caption: 2.png" in said_of(root)
    table({"file_name": "1.png", "text": "one", "label": 0}, {"file_name": "2.png", "label": 0})
    assert listed(root).left_out == {}
    assert listed(root, no_caption="skip").left_out == {1: "no caption"}


def test_other_files_are_listed_with_a_reason(tmp_path):
    root = make(tmp_path / "in", FLAT)
    for name in ("lost.txt", "1.npz", "a.heic", ".hidden.txt", "notes.md"):
        (root / name).write_text("x")
    assert listed(root).beside == (
        ("lost.txt", "a caption without a picture"),
        ("1.npz", "an array file or database"),
        ("a.heic", "a picture of another format"),
        ("notes.md", "not a picture"),
    )


def test_what_cannot_be_read_is_one_line_with_the_file(tmp_path):
    root = make(tmp_path / "in", FLAT)
    (root / "1.txt").write_bytes(b"au \xe9t")
    assert said_of(root).endswith("1.txt is not UTF-8 (byte 4). Save it as UTF-8.")
    (root / "1.txt").write_text("x" * 101)
    assert "1.txt is longer than 100 bytes" in said_of(root, max_text_bytes=100)
    assert "Leave --classes out" in said_of(root, classes=["a"])
    picture(9).save(root / "10.png")
    (root / "1.txt").write_text("one")
    assert "10.png and 10.webp are the same sample. Keep one." in said_of(root)
    (root / "10.png").unlink()
    (root / "1.TXT").write_text("two")
    assert "1.TXT and 1.txt are the same sample. Keep one." in said_of(root)
    (root / "1.TXT").unlink()
    (root / "circle").symlink_to("circle")
    assert ("circle", "not a picture") in listed(root).beside


def test_a_pipe_is_no_caption_and_no_picture(tmp_path):
    """To open it would be to wait for its writer."""
    root = make(tmp_path / "in", {"1.png": None})
    os.mkfifo(root / "1.txt")
    assert said_of(root) == f"[data encode] input={root / '1.txt'} is no regular file. Remove it."
    (root / "1.txt").unlink()
    os.mkfifo(root / "2.png")
    (root / "2.txt").write_text("two")
    with pytest.raises(BadFileError, match="no regular file"):
        listed(root, no_caption="empty").read(1)


def test_folders_of_videos_are_no_classes(tmp_path):
    for name in ("left", "right"):
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "a.mp4").write_bytes(b"")
    said = refused(lambda: listed(tmp_path / "in", clips=True))
    assert "2 of 2 files have no caption: left/a.mp4, right/a.mp4. Add it" in said
    assert said.endswith("or --no-caption empty. Folders of videos are no classes.")


def test_links_in_a_circle_are_read_once(tmp_path):
    root = make(tmp_path / "in", {"a/1.png": "one", "2.png": "two"})
    (root / "a" / "up").symlink_to(root)
    assert list(listed(root).names) == ["2.png", "a/1.png"]


def test_a_dataset_with_pictures_beside_it_is_not_encoded_again(tmp_path, vae):
    make(tmp_path / "in", FLAT)
    encoded(tmp_path / "in", tmp_path / "set", vae)
    picture(0).save(tmp_path / "set" / "preview.png")
    assert "already packed into shards" in said_of(tmp_path / "set")


def test_captions_stand_beside_the_shards_and_skipped_pictures_in_dropped_json(tmp_path, vae):
    root = make(tmp_path / "in", FLAT | {"3.png": None})
    dropped = encoded(root, tmp_path / "set", vae, no_caption="skip", flip=True)
    assert dropped == [(2, "no caption")]
    captions = (tmp_path / "set" / "captions.jsonl").read_text().splitlines()
    assert list(map(json.loads, captions)) == [
        {"row": 0, "file_name": "1.png", "text": "one"},
        {"row": 2, "file_name": "2.JPG", "text": "two"},
        {"row": 4, "file_name": "10.webp", "text": "zehn Bäume"},
    ]
    assert len(LatentShards(tmp_path / "set")) == 6
    # With another rule the shards would be others.
    said = refused(lambda: encoded(root, tmp_path / "set", vae, no_caption="empty", flip=True))
    assert "holds another dataset" in said
