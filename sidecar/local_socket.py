"""A local socket at which users ask a line of JSON and get one answer; the kernel says who asks (``SO_PEERCRED``)."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path

from cadenza.sidecar.clock import SystemClock

MAX_REQUEST = 256
MAX_ANSWER = 64 * 2**20
REQUEST_TIMEOUT_S = 0.5
"""Time in which a client must have sent its whole request, and in which it must take each part of its answer."""
CLIENTS_PER_USER = 4
"""Connections of one user at once; root and the daemon's user have no such limit."""
CLIENT_TIMEOUT_S = 30.0
_CREDENTIALS = struct.Struct("3i")


class LocalSocket:
    """Answers each client in a thread of its own: a slow one delays only itself, and a user has few of them."""

    def __init__(self, path: Path, clock: SystemClock) -> None:
        self.path = path
        self._clock = clock
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cadenza-jobs", daemon=True)
        self._clients: Counter[int] = Counter()
        """Connections of each user."""
        self._counting = threading.Lock()
        self._listener: socket.socket | None = None

    def answer(self, line: bytes, uid: int) -> bytes:
        """Return the answer to a user's request; called in the client's thread."""
        raise NotImplementedError

    def start(self) -> None:
        """Listen; raise OSError where this is not possible."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".new")  # who finds the path can connect
        draft.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        listener.bind(str(draft))
        draft.chmod(0o666)
        listener.listen(128)
        draft.replace(self.path)
        self._listener = listener
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._ended.set()
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)  # which ends accept(), in Linux
            self._thread.join()
            self._listener.close()
            self.path.unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._ended.is_set() and self._listener is not None:
            try:
                client, _ = self._listener.accept()
            except OSError:
                self._ended.wait(0.1)  # without descriptors to spare it fails at once, each time
                continue
            uid = peer_uid(client)
            if uid not in (0, os.geteuid()) and self._clients[uid] >= CLIENTS_PER_USER:
                client.close()
                continue
            with self._counting:
                self._clients[uid] += 1
            thread = threading.Thread(target=self._serve, args=(client, uid), name="cadenza-jobs-client", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has none to spare
                client.close()
                with self._counting:
                    self._clients[uid] -= 1

    def _serve(self, client: socket.socket, uid: int) -> None:
        try:
            with closing(client), suppress(OSError):
                client.sendall(self.answer(_line(client, self._clock), uid))
        finally:
            with self._counting:
                self._clients[uid] -= 1


def peer_uid(client: socket.socket) -> int:
    """Return the user of the process at the other end, as the kernel says."""
    _, uid, _ = _CREDENTIALS.unpack(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)


def ask(path: Path, line: bytes) -> bytes:
    """Return the answer to a request, cut at MAX_ANSWER; raise ``OSError`` if there is no daemon to answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(CLIENT_TIMEOUT_S)
        link.connect(str(path))
        link.sendall(line + b"\n")
        pieces, size = [], 0
        while (piece := link.recv(2**16)) and size <= MAX_ANSWER:
            pieces.append(piece)
            size += len(piece)
    return b"".join(pieces)


def _line(client: socket.socket, clock: SystemClock) -> bytes:
    """Return a request; raise OSError for one that does not come in time."""
    data, end_s = b"", clock.monotonic() + REQUEST_TIMEOUT_S
    while not data.endswith(b"\n") and len(data) <= MAX_REQUEST:
        client.settimeout(max(end_s - clock.monotonic(), 0.001))
        piece = client.recv(MAX_REQUEST)
        if not piece:
            break
        data += piece
    client.settimeout(REQUEST_TIMEOUT_S)
    return data
