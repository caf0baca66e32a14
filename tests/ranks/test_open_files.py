"""The limit of open files is raised as far as it goes; what it does not allow is refused."""

import resource

import pytest

from titan_dit.config.section import UserError
from titan_dit.launcher import agent, launch
from titan_dit.ranks import open_files


@pytest.fixture
def limits(monkeypatch):
    """Set the process's limits, as `resource` has them; `limits.now` is (soft, hard)."""

    class Limits:
        now = (1024, 4096)

        def setrlimit(self, which, new):
            assert which == resource.RLIMIT_NOFILE
            self.now = new

    found = Limits()
    monkeypatch.setattr(open_files.resource, "getrlimit", lambda which: found.now)
    monkeypatch.setattr(open_files.resource, "setrlimit", found.setrlimit)
    return found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, resource.RLIM_INFINITY), (open_files.ENOUGH, resource.RLIM_INFINITY)),
        ((1024, 1 << 30), (open_files.ENOUGH, 1 << 30)),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY),) * 2,
        ((1 << 30, 1 << 30),) * 2,
    ],
)
def test_the_soft_limit_is_raised_and_never_lowered(limits, before, after):
    limits.now = before
    open_files.raise_limit(2000, "rank 0 of 8")
    assert limits.now == after


def test_a_hard_limit_that_is_too_low_is_refused_in_one_line(limits):
    need = open_files.needed(0, 10_000, "cuda")
    with pytest.raises(UserError) as refused:
        open_files.raise_limit(need, "rank 0 of 10,000")
    message = str(refused.value)
    assert message.startswith(
        f"rank 0 of 10,000 needs up to {need:,} open files, but the limit is 4,096. Raise the hard"
    )
    for way in ("ulimit -Hn", "LimitNOFILE", "docker run --ulimit"):
        assert way in message
    assert "\n" not in message


@pytest.mark.parametrize(("nodes", "code"), [("2:1000", 0), ("10000", 2)])
def test_a_launcher_has_files_for_every_node_before_they_meet(
    nodes, code, limits, monkeypatch, capsys
):
    met = []
    monkeypatch.setattr(launch.rendezvous, "NOTICE_S", 3600.0)
    monkeypatch.setattr(agent, "launch", lambda *_: met.append(limits.now))
    words = ["--nnodes", nodes, "--rdzv-endpoint", "127.0.0.1:29500", "-m", "x"]
    assert launch.Launcher(0.0, 0).run(words) == code
    assert met == ([] if code else [(4096, 4096)])
    refused = "error: the launcher of RDZV_ENDPOINT needs up to 10,096 open files"
    assert (refused in capsys.readouterr().err) == bool(code)


def test_only_rank_0_needs_files_per_rank(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    others = open_files.OTHERS["cuda"]
    assert open_files.needed(0, 10_000, "cuda") == others + 20_000
    assert open_files.needed(1, 10_000, "cuda") == others + 28
    assert open_files.needed(0, 1, "cpu") < 256
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert open_files.needed(0, 10_000, "cuda") == others + 10_000
