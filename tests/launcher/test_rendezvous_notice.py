"""A launcher that waits for the rendezvous says what is wrong with the endpoint."""

import socket
from types import SimpleNamespace

import pytest
from running import free_port

from titan_dit.launcher import launch, rendezvous


def test_the_notice_tells_an_unknown_host_from_a_closed_port_and_from_a_listener():
    assert "does not know the host nosuchhost.invalid" in rendezvous.notice(
        "nosuchhost.invalid:29500"
    )
    assert "cannot be reached" in rendezvous.notice(f"127.0.0.1:{free_port()}")
    assert "cannot be reached" in rendezvous.notice("127.0.0.1:port")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert "another program listens there" in rendezvous.notice(f"127.0.0.1:{port}")


@pytest.mark.parametrize("starts", [0, 1])
def test_only_a_launcher_without_ranks_gives_notice(starts, monkeypatch, capsys):
    monkeypatch.setattr(rendezvous, "notice", lambda endpoint: f"waiting for {endpoint}")
    launcher = launch.Launcher(0.0, 0)
    launcher.agent = SimpleNamespace(starts=starts)
    launcher.give_notice("node1:29500")
    expected = "" if starts else "titan_dit: waiting for node1:29500\n"
    assert capsys.readouterr().err == expected
    assert rendezvous.endpoint_of(["--rdzv-endpoint", "node1:29500", "-m"]) == "node1:29500"
    assert rendezvous.endpoint_of(["--standalone", "-m"]) is None
