"""The person behind a request: the kernel's word on the other end of a socket, and the name that a proxy gives."""

from __future__ import annotations

import asyncio
import os
import pwd
import re
import socket
import stat
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from cadenza.slurm_plugin.service.owner_socket import peer_uid

USER_HEADER = "X-Remote-User"
NAME = re.compile(r"[\w.@+-]{1,64}", re.ASCII)
OWN_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
"""Names of this machine in a browser on it, or at the end of a tunnel. A page of another site may have its own name
lead here (DNS rebinding), and would read what it gets; it cannot change the name in the request."""


class RefusedError(Exception):
    """A request without an answer: the HTTP status, and the reason for the person."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Viewer(NamedTuple):
    """A person; without a name they see counts only, as does everyone of the jobs of others."""

    user: str = ""
    everything: bool = False
    """True for those who may read the service's store, as for ``why``, ``top`` and ``report``."""

    def may_read(self, owner: str) -> bool:
        """Return whether they may read the record of a job of ``owner``."""
        return self.everything or (self.user != "" and self.user == owner)


class PeerProtocol(H11Protocol):
    """HTTP over a socket whose other end the kernel names; a request has the uid in its state."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Ask the kernel who has connected."""
        super().connection_made(transport)
        link = transport.get_extra_info("socket")
        if link.family == socket.AF_UNIX:
            self.app_state = {**self.app_state, "uid": peer_uid(link)}


class Viewers:
    """The viewers of a store's pages, by the rights of the store's file."""

    def __init__(self, store: Path, proxy_uid: int | None) -> None:
        """``proxy_uid``: the user of the proxy, which alone may name other users."""
        self._store = store
        self._proxy_uid = proxy_uid

    def viewer(self, request: Request) -> Viewer:
        """Return the person; raise RefusedError for a request that no honest browser or proxy sends."""
        uid = request.scope.get("state", {}).get("uid")
        if uid is None or uid != self._proxy_uid:
            host = request.headers.get("host", "")
            if re.sub(r":\d{1,5}$", "", host) not in OWN_NAMES:
                raise RefusedError(421, "open this page as http://localhost")
            return Viewer() if uid is None else self._of_uid(uid)
        names = request.headers.getlist(USER_HEADER)
        if not names:
            return Viewer()
        if len(names) > 1 or not NAME.fullmatch(names[0]):  # a proxy that lets the browser's own header pass
            raise RefusedError(400, f"{USER_HEADER} is not the name of one user")
        return self._of_name(names[0])

    def _of_uid(self, uid: int) -> Viewer:
        try:
            entry = pwd.getpwuid(uid)
        except KeyError:
            return Viewer()
        return Viewer(entry.pw_name, uid == 0 or self._reads_store(entry))

    def _of_name(self, name: str) -> Viewer:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:  # Slurm's users need not be known here
            return Viewer(name)
        # The proxy's word is about the site's logins, of which one may be called root, too.
        return Viewer(name, entry.pw_uid != 0 and self._reads_store(entry))

    def _reads_store(self, entry: pwd.struct_passwd) -> bool:
        try:
            status = self._store.stat()
        except OSError:
            return False
        of_group = status.st_mode & stat.S_IRGRP and status.st_gid in os.getgrouplist(entry.pw_name, entry.pw_gid)
        return entry.pw_uid == status.st_uid or bool(of_group)
