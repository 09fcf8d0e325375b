"""The HTTP server of a daemon: ``/metrics`` for Prometheus and ``/healthz`` for whatever watches the daemon."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import TYPE_CHECKING, Any

from cadenza.sidecar.config import ConfigError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

log = logging.getLogger(__name__)

ADDRESS = r"^(.+:\d{1,5})?$"
"""Pattern of the setting: a host and a port, such as 127.0.0.1:9852 or [::1]:9852; empty: no server."""
REQUEST_S = 5.0
"""Longest wait for the next bytes of a request."""
MAX_REQUESTS = 8
"""Connections that are open at once; a further one ends the oldest, so that slow clients do not keep others out."""


def new_registry(key: str) -> CollectorRegistry:
    """Return a registry with the figures of this process; raise ConfigError where the library is missing.

    ``key``: the setting that asks for the metrics.
    """
    try:
        import prometheus_client  # noqa: PLC0415 - an extra
    except ImportError:
        raise ConfigError(
            f"{key}: prometheus_client is not installed; pip install 'cadenza[metrics]', or Debian's "
            "python3-prometheus-client"
        ) from None
    # They are a third of all series, and no query needs them.
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.ProcessCollector(registry=registry)
    prometheus_client.GCCollector(registry=registry)
    return registry


class MetricsServer(ThreadingTCPServer):
    """Answers in threads of its own from what the daemon has computed already, so that no scrape waits for the daemon.

    It is socketserver's and not http.server's class: that one looks its own name up in DNS.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: str, key: str, registry: CollectorRegistry, illness: Callable[[], str]) -> None:
        """``illness`` returns why the daemon is not well, "" if it is. Raise ConfigError for a bad address."""
        host, _, port = address.rpartition(":")
        self.registry, self.illness = registry, illness
        self._links: list[socket.socket] = []
        """The open connections, the oldest first."""
        self._counting = threading.Lock()
        self._room = threading.BoundedSemaphore(2 * MAX_REQUESTS)
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host.strip("[]"), int(port)), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"{key} = {address!r}: {error}") from None
        self._open = True
        self._thread = threading.Thread(target=self._serve, name="cadenza-metrics", daemon=True)
        self._thread.start()
        log.info("metrics at http://%s:%d/metrics", *self.server_address[:2])

    def _serve(self) -> None:
        while self._open:  # serve_forever() would wake up twice a second for its end
            self.handle_request()

    def close(self) -> None:
        """Stop listening."""
        self._open = False
        self.socket.shutdown(socket.SHUT_RDWR)  # which ends the wait for a request
        self._thread.join()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a request; close the connection while too many answers are being made."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        with self._counting:
            if len(self._links) >= MAX_REQUESTS:
                with suppress(OSError):  # its thread closes it
                    self._links.pop(0).shutdown(socket.SHUT_RDWR)
            self._links.append(request)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one request."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._counting, suppress(ValueError):
            self._links.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Note that a connection broke."""
        del request
        log.debug("metrics: a request of %s failed: %s", client_address, sys.exception())


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer
    timeout = REQUEST_S

    def do_GET(self) -> None:
        """Answer ``/metrics`` and ``/healthz``."""
        match self.path.partition("?")[0]:
            case "/metrics":
                from prometheus_client.exposition import choose_encoder  # noqa: PLC0415 - an extra

                encode, kind = choose_encoder(self.headers.get("Accept") or "")
                self._reply(200, kind, encode(self.server.registry))
            case "/healthz":
                illness = self.server.illness()
                self._reply(503 if illness else 200, "text/plain; charset=utf-8", f"{illness or 'ok'}\n".encode())
            case _:
                self._reply(404, "text/plain; charset=utf-8", b"/metrics or /healthz\n")

    def _reply(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (http.server's name)
        """Log requests at the lowest level: there is one each few seconds."""
        log.debug(format, *args)
