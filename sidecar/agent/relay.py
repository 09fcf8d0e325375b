"""Questions of this host's users to the service: ``why``, ``top`` and ``report`` where the service's store is not.

The kernel says who asks at the local socket; the link's key says to the service which host passes that on. On a login
node this is all of the agent (``cadenza-agent --relay``).
"""

from __future__ import annotations

import logging
import os
import secrets
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NoReturn

import msgspec
import zmq

from cadenza.sidecar.agent.errors import AgentError
from cadenza.sidecar.agent.ipc.service_link import Link, read_keys
from cadenza.sidecar.agent_settings import AgentSettings
from cadenza.sidecar.clock import SystemClock
from cadenza.sidecar.config import ConfigError
from cadenza.sidecar.local_socket import CLIENT_TIMEOUT_S, MAX_ANSWER, MAX_REQUEST, LocalSocket
from cadenza.sidecar.orders import VERSION, Ask, Told
from cadenza.sidecar.sd_notify import notify

log = logging.getLogger(__name__)

ANSWER_S = CLIENT_TIMEOUT_S - 5.0
"""Longest wait for the service, so that the user learns that it does not answer."""
SILENT = "cadenzad does not answer this host: jobs run, and Slurm starts them, as usual; try again, or ask the admin"


class Relay(LocalSocket):
    """The local socket, whose questions go out over the agent's link; ``wake`` makes its owner pass them on."""

    def __init__(self, settings: AgentSettings, clock: SystemClock, wake: Callable[[], object]) -> None:
        super().__init__(settings.questions, clock)
        self._host = settings.host_name
        self._wake = wake
        self._asked: SimpleQueue[Ask] = SimpleQueue()
        self._waiting: dict[int, Future[bytes]] = {}
        # An answer to a question of the agent before this one finds no client.
        self._numbers = count(secrets.randbelow(2**60))

    def answer(self, line: bytes, uid: int) -> bytes:
        """Wait for the service's answer to a user's question."""
        number, answer = next(self._numbers), Future[bytes]()
        self._waiting[number] = answer
        self._asked.put(Ask(VERSION, self._host, number, uid, line[:MAX_REQUEST]))
        self._wake()
        try:
            return answer.result(ANSWER_S)
        except FutureTimeout:
            return msgspec.json.encode({"error": SILENT})
        finally:
            del self._waiting[number]

    def pass_on(self, links: Iterable[Link]) -> None:
        """Send the new questions; only the service of the controller that acts answers."""
        while True:
            try:
                asked = self._asked.get_nowait()
            except Empty:
                return
            for link in links:
                link.send([asked])

    def told(self, order: Told) -> None:
        """Hand an answer to the client that waits for it."""
        unpacker = zlib.decompressobj()
        try:
            answer = unpacker.decompress(order.answer, MAX_ANSWER)
        except zlib.error as error:
            log.warning("an answer of the service was refused: %s", error)
            return
        waiting = self._waiting.get(order.id)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)


def serve_relay(settings: AgentSettings) -> NoReturn:
    """Pass questions on until the process is ended; raise ConfigError or AgentError where that is not possible."""
    keys = read_keys(Path(settings.agent.keys), settings.host_name) if settings.agent.service else None
    if keys is None:
        raise ConfigError("a relay needs [agent] service, and keys from `cadenza keygen` for this host")
    links = [Link(address, keys) for address in settings.agent.service.split(",")]
    bell = os.eventfd(0, os.EFD_CLOEXEC)
    relay = Relay(settings, SystemClock(), lambda: os.eventfd_write(bell, 1))
    try:
        relay.start()
    except OSError as error:
        raise AgentError(f"{relay.path}: {error.strerror or error}") from None
    poller = zmq.Poller()
    for one in (bell, *(link.socket for link in links)):
        poller.register(one, zmq.POLLIN)
    notify("READY=1")
    log.info("ready: passes questions at %s on as host=%s", relay.path, settings.host_name)
    while True:
        ready = dict(poller.poll())
        if bell in ready:
            os.eventfd_read(bell)
            relay.pass_on(links)
        for link in links:
            for order in link.receive():
                if isinstance(order, Told):
                    relay.told(order)
