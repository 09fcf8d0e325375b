"""The port at which users of hosts without an agent or relay ask the service, with munge or a token of Slurm.

It speaks CURVE, as the agents' link: the asking command knows the service by its public key in ``service.key``, which
all may read, so no other machine gets a token or sees an answer. Its own key is new for each call and proves nothing;
:mod:`credentials` says who asks. It has a port of its own, as an agent's connection may keep megabytes in memory, and
anyone may connect here: after some connections the port is closed and opened anew, which ends those that only stay.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from cadenza.policies.core.text import printable
from cadenza.sidecar.clock import Clock
from cadenza.sidecar.frames import ERRORS
from cadenza.sidecar.local_socket import CLIENT_TIMEOUT_S, MAX_ANSWER
from cadenza.sidecar.orders import MAX_TOLD
from cadenza.slurm_plugin.errors import ServiceError
from cadenza.slurm_plugin.service.credentials import Question, sealed, uid_of

log = logging.getLogger(__name__)

MAX_FRAME = 8192
ENOUGH_CALLERS, MAX_CALLERS = 64, 512
"""Connections after which the port is opened anew once those that ask have their answers, and after which none more is
taken until then."""
HANDSHAKE_MS, LINGER_MS, POLL_MS, LAST_S = 2000, 500, 500, 5.0
"""``LAST_S``: longest time for those answers."""
TRIES = 2
"""A question is lost where the port is opened anew before it was read."""
PAUSE_FACTOR = 4.0
"""A rest this many times as long as it took to learn who asks: a flood costs slurmctld and this machine little."""


class _Callers:
    """A credentials provider of zmq.auth: every key may connect, a limited number of them."""

    number = 0

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002 (zmq.auth's)
        """Return whether one more may connect."""
        self.number += 1
        return self.number <= MAX_CALLERS


class QuestionPort:
    """Answers one question after the other in a thread of its own.

    ``answer`` is called with a user and their question, and returns a packed answer; None where another answers.
    """

    def __init__(
        self, address: str, pair: tuple[bytes, bytes], answer: Callable[[int, bytes], bytes | None], clock: Clock
    ) -> None:
        self._address, self._pair, self._answer, self._clock = address, pair, answer, clock
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cadenza-questions", daemon=True)

    def start(self) -> None:
        """Listen; without the port some users cannot ask, which is no reason to end."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                with self._listening() as (link, callers):
                    while not self._ended.is_set() and callers.number < ENOUGH_CALLERS:
                        self._serve(link)
                    end_s = self._clock.monotonic() + LAST_S
                    while not self._ended.is_set() and self._clock.monotonic() < end_s and self._serve(link):
                        pass
            except (zmq.ZMQError, RuntimeError) as error:  # the latter: zmq.auth's thread did not start in time
                log.warning("[expert] question_port: %s: %s", self._address, error)
                self._ended.wait(60.0)

    @contextmanager
    def _listening(self) -> Iterator[tuple[zmq.Socket[bytes], _Callers]]:
        with ExitStack() as stack:
            context, callers = zmq.Context(), _Callers()
            stack.callback(context.term)
            keeper = ThreadAuthenticator(context)
            keeper.start()
            stack.callback(keeper.stop)
            keeper.configure_curve_callback("*", credentials_provider=callers)
            link: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
            stack.callback(link.close, linger=LINGER_MS)
            link.curve_publickey, link.curve_secretkey, link.curve_server = *self._pair, True
            # Of the two messages that may wait, the first is the connection's own name.
            options = {zmq.MAXMSGSIZE: MAX_FRAME, zmq.RCVHWM: 2, zmq.SNDHWM: 2, zmq.HANDSHAKE_IVL: HANDSHAKE_MS}
            for option, value in options.items():
                link.setsockopt(option, value)
            link.bind(self._address)
            yield link, callers

    def _serve(self, link: zmq.Socket[bytes]) -> bool:
        """Answer a question; return whether there was one."""
        if not link.poll(POLL_MS):
            return False
        try:
            frames = link.recv_multipart(zmq.NOBLOCK, copy=False)
            answer = self._answered(frames[-1].bytes, str(frames[-1].get("User-Id")))
            if answer is not None:
                link.send_multipart([frames[0].bytes, answer], zmq.NOBLOCK)
        except zmq.ZMQError:  # it is gone, or does not read
            return True
        except Exception:
            log.exception("a question cannot be answered")
        return True

    def _answered(self, frame: bytes, key: str) -> bytes | None:
        began_s = self._clock.monotonic()
        try:
            asked = msgspec.json.decode(frame, type=Question)
            uid = uid_of(asked, key)
        except ERRORS:
            return packed_error("no question of this version")
        except ServiceError as error:
            log.info("a question was refused: %s", printable(str(error)))
            return packed_error(printable(str(error)))
        finally:
            self._ended.wait(PAUSE_FACTOR * (self._clock.monotonic() - began_s))
        return self._answer(uid, asked.question)


def packed_error(text: str) -> bytes:
    """Return an answer that says why there is none."""
    return zlib.compress(msgspec.json.encode({"error": text}))


class RemoteService(NamedTuple):
    """The question ports of the controllers' services, of which the one that acts answers; their public key."""

    addresses: tuple[str, ...]
    key: bytes

    def __str__(self) -> str:
        return " ".join(self.addresses)

    def ask(self, line: bytes) -> bytes:
        """Return the answer to a request; raise OSError if none comes, ServiceError where munge refuses."""
        for _ in range(TRIES):
            public, secret = zmq.curve_keypair()
            question, poller = sealed(line, public.decode()), zmq.Poller()
            with zmq.Context() as context, ExitStack() as stack:
                for address in self.addresses:
                    link: zmq.Socket[bytes] = stack.enter_context(context.socket(zmq.DEALER))
                    link.curve_publickey, link.curve_secretkey, link.curve_serverkey = public, secret, self.key
                    link.setsockopt(zmq.LINGER, 0)
                    link.setsockopt(zmq.MAXMSGSIZE, MAX_TOLD)
                    link.connect(address)
                    link.send(question)
                    poller.register(link, zmq.POLLIN)
                for link, _ in poller.poll(int(1000 * CLIENT_TIMEOUT_S / TRIES)):
                    return zlib.decompressobj().decompress(link.recv(), MAX_ANSWER)
        raise TimeoutError
