"""Shards of files that have changed since are not called current, whole or half done."""

import json
import os
from contextlib import ExitStack

import numpy as np
import pytest
from encoded_sets import picture, plan_of, save_pictures
from folders_of_files import class_folders, files_in
from refusals import refused
from tiny_vae import save_vae

from titan_dit.commands import data_encode
from titan_dit.data.packing import output, pack
from titan_dit.pictures import encode
from titan_dit.pictures.picture_set import ListingOptions
from titan_dit.pictures.readers import open_input


class Encoding:
    """`data encode` of twelve pictures in four chunks; `changed` is in the second one."""

    def __init__(self, folder):
        self.input, self.output = folder / "in", folder / "set"
        save_pictures(self.input)
        self.vae = save_vae(folder / "vae")
        self.changed = self.input / "cat" / "3.png"

    def __call__(self, verify=False, chunks=None):
        plan, vae = plan_of(self.input, self.output, self.vae)
        with ExitStack() as stack:
            todo = data_encode.begin(plan, self.output, stack, verify)
            if todo is not None:
                some = todo if chunks is None else chunks
                encode.encode_chunks(plan, vae, self.output, some, 1, lambda *_: None)
                if chunks is None:
                    encode.finish(plan, self.output)
            return todo

    def change(self):
        """Other pixels, in a file of its old length or another."""
        picture(99).save(self.changed)


class Packing:
    """`data pack` of twelve latents in four chunks."""

    def __init__(self, folder):
        self.input, self.output = folder / "in", folder / "set"
        class_folders(self.input)
        self.changed = self.input / "0000" / "3.npy"

    def __call__(self, verify=False, chunks=None):
        plan = pack.make_job(self.input, self.output, shard_size=3)
        if chunks is None:
            found = pack.pack(plan, self.output, 1, lambda *_: None, verify)
            return None if found is None else []
        self.output.mkdir()
        assert output.resumed(plan, self.output, verify) == {}
        for chunk in chunks:
            pack.pack_chunk(plan, self.output, chunk, pack.DecodingBudget(), lambda *_: None)
        (self.output / "pack.json").write_text(json.dumps({"plan": plan.digest}))
        return []

    def change(self):
        """Other values in a file of its old length."""
        np.save(self.changed, np.ones((4, 8, 8), np.float32))


@pytest.fixture(params=[Encoding, Packing])
def job(request, tmp_path):
    return request.param(tmp_path)


def touch(file):
    """Another time of modification, as a copy of the folder has."""
    os.utime(file, ns=(10**18, 10**18))


def test_a_whole_output_of_changed_files_is_not_current(job):
    job()
    assert job() is None
    job.change()
    touch(job.changed)
    before = files_in(job.output)
    for verify, how in ((False, "length or time of modification"), (True, "contents")):
        said = refused(lambda v=verify: job(v))
        assert f"files have changed ({how}) since these shards" in said
        assert "set-00001. Delete" in said
        assert ("--verify true" in said) == (not verify)
    assert files_in(job.output) == before


def test_equal_contents_are_current_once_they_have_been_compared(job):
    job()
    touch(job.changed)
    assert "--verify true compares" in refused(job)
    assert job(verify=True) is None
    assert job() is None


def test_a_half_done_output_of_changed_files_does_not_go_on(job):
    job(chunks=[1])
    job.change()
    touch(job.changed)
    assert "set-00001. Delete" in refused(job)
    assert "set-00001. Delete" in refused(lambda: job(verify=True))


def test_files_of_chunks_that_are_not_there_yet_may_change(job):
    job(chunks=[0])
    job.change()
    touch(job.changed)
    assert job() is not None
    assert job() is None


def test_an_output_of_an_earlier_version_goes_on_and_says_what_is_not_known(job, capsys):
    job()
    (job.output / "sources.json").unlink()
    job.change()
    assert job() is None
    assert "have changed is not known: an earlier version" in capsys.readouterr().err
    assert "(contents)" in refused(lambda: job(verify=True))


def test_a_file_that_changes_while_it_is_read_is_an_error(job, monkeypatch):
    def finished(*arguments):
        job.change()
        touch(job.changed)
        return real(*arguments)

    real = output.all_finished
    for user in (pack, encode):
        monkeypatch.setattr(user, "all_finished", finished)
    assert "files have changed while they were read" in refused(job)
    assert not (job.output / "manifest.json").exists()


def test_the_stamp_of_a_picture_is_that_of_the_file_that_holds_it(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    for number in range(2):
        table = pyarrow.table({"image": [b"x"] * (number + 2)})
        parquet.write_table(table, tmp_path / f"{number}.parquet")
    touch(tmp_path / "1.parquet")
    stamps = [open_input(tmp_path, ListingOptions()).stamp(row) for row in range(5)]
    sizes = [(tmp_path / f"{number}.parquet").stat().st_size for number in range(2)]
    assert [size for size, _ in stamps] == [sizes[0]] * 2 + [sizes[1]] * 3
    assert [time == 10**18 for _, time in stamps] == [False] * 2 + [True] * 3
