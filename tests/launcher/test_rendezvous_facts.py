"""Launchers that do not fit together are refused by the first difference."""

import pytest

from titan_dit.config.section import UserError
from titan_dit.launcher import rendezvous


class Store(dict):
    def compare_set(self, key, expected, desired):
        return self.setdefault(key, desired).encode()


MINE = {"NNODES": "2", "torch": "2.13.0", "titan_dit": "0.1.0", "the files of titan_dit": "a"}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"NNODES": "3"}, "NNODES differs between the hosts of this run: 3 here, and 2 where"),
        ({"torch": "2.14.0", "the files of titan_dit": "b"}, "torch differs between"),
        ({"the files of titan_dit": "b"}, "the files of titan_dit differs between"),
    ],
)
def test_the_first_difference_is_named(other, words):
    store = Store()
    rendezvous.check(MINE, print, store.compare_set, "run")
    rendezvous.check(MINE, print, store.compare_set, "run")
    with pytest.raises(UserError, match=words):
        rendezvous.check(MINE | other, print, store.compare_set, "run")


def test_another_run_id_is_said_and_not_refused():
    store, said = Store(), []
    rendezvous.check(MINE, said.append, store.compare_set, "run")
    assert not said
    rendezvous.check(MINE | {"NNODES": "4"}, said.append, store.compare_set, "other")
    assert said == [
        "RDZV_ID=other, but the first launcher at this RDZV_ENDPOINT has run: only launchers with "
        "the same RDZV_ID meet"
    ]


def test_the_digest_covers_names_and_contents(tmp_path):
    (tmp_path / "a.py").write_text("1")
    first = rendezvous.digest_of(tmp_path)
    (tmp_path / "a.py").write_text("2")
    second = rendezvous.digest_of(tmp_path)
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len({first, second, rendezvous.digest_of(tmp_path)}) == 3
    assert rendezvous.facts_of(["--nnodes", "2:4"])["NNODES"] == "2:4"
