"""Notices between two ranks: parts, a full socket, passed files, a rank that has ended."""

import os
import socket

import pytest
from joined import content, forward, pair

from titan_dit.launcher.cause import has_lost_peer
from titan_dit.pipeline.transports.meeting import HEADER, Door, Notice, Peer, visit
from titan_dit.ranks.failure import NetworkFailure
from titan_dit.ranks.hosts import address_of, interfaces, own_addresses


def peers():
    """The two ends of a socket."""
    return [Peer(1 - rank, end) for rank, end in enumerate(socket.socketpair())]


def test_a_notice_comes_whole_however_it_is_cut():
    end, raw = socket.socketpair()
    peer = Peer(1, end)
    data = HEADER.pack(3, 0, 7, 5) + b"hello" + HEADER.pack(4, 0, 8, 0)
    found = []
    for byte in data:
        raw.send(bytes([byte]))
        found += peer.exchange()
    assert found == [Notice(3, 7, b"hello"), Notice(4, 8)]
    raw.close()
    peer.socket.close()


def test_notices_wait_for_room_in_the_socket_and_keep_their_sequence():
    a, b = peers()
    payload = bytes(2000)
    for number in range(1000):
        a.tell(0, number, payload)
    assert a.has_backlog
    found = []
    while len(found) < 1000:
        a.exchange()
        found += b.exchange()
    assert [notice.number for notice in found] == list(range(1000))
    assert {notice.payload for notice in found} == {payload}
    a.close()
    b.close()


def test_files_come_with_their_notice():
    a, b = peers()
    for number in range(40):  # More than one read passes.
        file = os.memfd_create("test")
        os.write(file, bytes([number]))
        a.tell(number % 2, number, b"x" * number, [file] * (number % 3 > 0))
        if not number % 3:
            os.close(file)
    found = []
    while len(found) < 40:
        found += b.exchange()
    for number, notice in enumerate(found):
        assert (notice.number, len(notice.files)) == (number, int(number % 3 > 0))
        for file in notice.files:
            assert os.pread(file, 2, 0) == bytes([number])
            assert not os.get_inheritable(file)
            os.close(file)
    a.close()
    b.close()


@pytest.mark.parametrize("has_unread_notices", [True, False])
def test_a_rank_that_ends_without_farewell_ends_the_wait_of_the_other(has_unread_notices):
    source, target = pair()
    if has_unread_notices:  # Then the socket is reset; else it ends.
        target.post(forward(0))
    source.peers[1].socket.close()  # As the kernel does for a killed rank.
    with pytest.raises(NetworkFailure, match="pipeline rank 0 has ended") as error:
        target.wait(5)
    # The launcher looks for the rank that was killed, not for this one.
    assert has_lost_peer({"message": str(error.value)})


def test_a_rank_that_closes_does_not_disturb_one_that_still_works():
    source, target = pair()
    target.post(forward(0))
    source.send(forward(0), content(forward(0)))
    source.flush()
    source.close()
    target.wait(5)
    assert target.arrived() == [forward(0)]
    target.take(forward(0))
    target.wait(0.01)
    target.flush()
    target.close()


def test_a_rank_that_cannot_be_reached_is_named_with_its_addresses():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        door = Door(b"0" * 16, gone.getsockname()[1], ("127.0.0.1",))
    with pytest.raises(NetworkFailure, match=r"rank 1 cannot reach rank 0 at 127.0.0.1, port"):
        visit(door, 1, 0)


def test_addresses_are_those_of_the_interfaces_and_loopback_comes_last(monkeypatch):
    assert interfaces()["lo"] == "127.0.0.1"
    assert own_addresses()[-1].startswith(("127.", "::1"))
    assert address_of("lo") == address_of("127.0.0.1") == "127.0.0.1"
    assert address_of("ib9") is None
    assert address_of("192.0.2.1") is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert "127.0.0.1" in own_addresses()
