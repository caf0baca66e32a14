"""A launcher connects again to the store of the rendezvous, and says when it cannot."""

import contextlib
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from titan_dit.launcher import store
from titan_dit.launcher.store import LastingStore


class Relay:
    """A port that forwards to another one; while `is_deaf`, what it receives is lost."""

    def __init__(self, port):
        self.target = port
        self.pairs, self.is_deaf = [], False
        self.listen(0)

    def listen(self, port):
        self.server = socket.create_server(("127.0.0.1", port))
        self.port = self.server.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self.server.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
                self.pairs.append((near, far))
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self.copy, args=(source, sink), daemon=True).start()

    def copy(self, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not self.is_deaf:
                    sink.sendall(data)

    def close(self):
        """Refuse connections, and end those that are open."""
        # A listener ends when nobody waits in it.
        self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()
        for pair in self.pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
        self.pairs.clear()


@pytest.fixture
def relay():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    relay = Relay(server.port)
    yield relay
    with contextlib.suppress(OSError):
        relay.close()


def store_at(relay, said):
    return LastingStore("127.0.0.1", relay.port, timedelta(seconds=20), said.append)


def test_a_lost_connection_is_opened_again_and_nothing_is_lost(relay, monkeypatch):
    monkeypatch.setattr(store, "NOTICE_S", 0.5)
    monkeypatch.setattr(store, "GONE_S", 20.0)
    said = []
    lasting = store_at(relay, said)
    prefixed = dist.PrefixStore("run", lasting)
    prefixed.set("key", "1")
    port = relay.port
    relay.close()
    timer = threading.Timer(2.0, relay.listen, [port])
    timer.start()
    found = []
    # In a thread: an operation that never ends fails here.
    asking = threading.Thread(target=lambda: found.append(prefixed.get("key")), daemon=True)
    asking.start()
    asking.join(20)
    assert found == [b"1"]
    assert prefixed.compare_set("key", "1", "2") == b"2"
    assert lasting.lost is None
    timer.join()
    lost, found = said
    assert lost.startswith(f"lost the rendezvous at 127.0.0.1:{port} (")
    assert "Connection refused" in lost
    assert found.startswith("the rendezvous is reached again after")


def test_what_was_set_and_lost_is_set_again(relay):
    lasting = store_at(relay, [])
    relay.is_deaf = True

    def recover():
        time.sleep(0.5)
        relay.close()
        relay.is_deaf = False
        relay.listen(relay.port)

    thread = threading.Thread(target=recover)
    thread.start()
    lasting.set("key", "1")
    thread.join()
    assert lasting.check(["key"])


def test_a_store_that_stays_gone_ends_the_launcher(relay, monkeypatch):
    monkeypatch.setattr(store, "REFUSED_S", 1.5)
    lasting = store_at(relay, [])
    lasting.set("key", "1")
    relay.close()
    began = time.monotonic()
    with pytest.raises(RendezvousConnectionError):  # The launcher prints it as one line.
        lasting.get("key")
    assert 1.5 < time.monotonic() - began < 6
    assert lasting.is_gone


def test_one_attempt_does_not_wait_and_the_end_of_a_job_has_no_patience(relay):
    lasting = store_at(relay, [])
    relay.close()
    began = time.monotonic()
    for _ in range(3):
        with pytest.raises(dist.DistNetworkError):
            lasting.once("get", "key")
    assert time.monotonic() - began < 3
    assert not lasting.is_gone
    lasting.is_needed = False
    assert lasting.is_gone


def test_silence_ends_a_connection():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            store.notice_silence(port)
            limit = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert limit == store.SILENT_S * 1000
            assert client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
