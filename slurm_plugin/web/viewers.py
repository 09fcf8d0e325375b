"""The person behind a request: the kernel's word on the other end of a socket, and the name that a proxy gives."""

from __future__ import annotations

import asyncio
import re
import socket
from collections import defaultdict

from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from cadenza.sidecar.local_socket import peer_uid
from cadenza.slurm_plugin.service.job_access import NAME, JobAccess, Viewer

MAX_CONNECTIONS, SPARE = 512, 64
"""Connections at once, of all users, and those of them that are left for new ones."""
USER_HEADER = "X-Remote-User"
OWN_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
"""Names of this machine in a browser on it, or at the end of a tunnel. A page of another site may have its own name
lead here (DNS rebinding), and would read what it gets; it cannot change the name in the request."""


class PageRefusedError(Exception):
    """A request without an answer: the HTTP status, and the reason for the person."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class PeerProtocol(H11Protocol):
    """HTTP over a socket whose other end the kernel names; a request has the uid in its state.

    Where few connections are left, the user with the most of them loses the oldest, so that no user keeps others out.
    """

    uid: int | None = None
    since_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Ask the kernel who has connected."""
        super().connection_made(transport)
        link = transport.get_extra_info("socket")
        self.since_s = self.loop.time()
        if link.family == socket.AF_UNIX:
            self.uid = peer_uid(link)
            self.app_state = {**self.app_state, "uid": self.uid}
        if len(self.connections) > MAX_CONNECTIONS - SPARE:
            self._make_room()

    def _make_room(self) -> None:
        mine: defaultdict[int | None, list[PeerProtocol]] = defaultdict(list)
        for one in self.connections:
            if isinstance(one, PeerProtocol) and not one.transport.is_closing():
                mine[one.uid].append(one)
        most = max(mine.values(), key=len, default=[])
        if most:
            min(most, key=lambda one: one.since_s).transport.abort()


class Viewers:
    """The viewers of a store's pages."""

    def __init__(self, access: JobAccess, proxy_uid: int | None) -> None:
        """``proxy_uid``: the user of the proxy, which alone may name other users."""
        self._access = access
        self._proxy_uid = proxy_uid

    def viewer(self, request: Request) -> Viewer:
        """Return the person; raise PageRefusedError for a request that no honest browser or proxy sends.

        It may ask Slurm, and so belongs into a thread.
        """
        uid = request.scope.get("state", {}).get("uid")
        if uid is None or uid != self._proxy_uid:
            host = request.headers.get("host", "")
            if re.sub(r":\d{1,5}$", "", host) not in OWN_NAMES:
                raise PageRefusedError(421, "open this page as http://localhost")
            return self._access.nobody() if uid is None else self._access.of_uid(uid)
        names = request.headers.getlist(USER_HEADER)
        if not names:
            return self._access.nobody()
        if len(names) > 1 or not NAME.fullmatch(names[0]):  # a proxy that lets the browser's own header pass
            raise PageRefusedError(400, f"{USER_HEADER} is not the name of one user")
        return self._access.of_name(names[0])
