"""The HTTP side: routes, headers, and pages that are made once for all who ask for the same."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import uvicorn
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from cadenza.policies.core.text import printable
from cadenza.slurm_plugin.errors import StoreError
from cadenza.slurm_plugin.report.draw import DARK, LIGHT
from cadenza.slurm_plugin.report.units import NARROW
from cadenza.slurm_plugin.service.store.reader import StoreReader
from cadenza.slurm_plugin.web import web_pages
from cadenza.slurm_plugin.web.viewers import MAX_CONNECTIONS, PageRefusedError, PeerProtocol, Viewers
from cadenza.slurm_plugin.web.web_pages import PageMaker, Question, Site

MAX_KEPT = 256
MAX_TEXT = 4000
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
SANDBOX = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""A saved page comes from a file: it may have its own look and its own drawings, and runs nothing."""
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "private, no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
STATIC = {"web.css": "text/css", "web.js": "text/javascript", "icon.svg": "image/svg+xml"}
NO_PAGE = PageRefusedError(404, "no page here")
WORDS = ("page", "partition", "since")
"""Words of a query that change a page; any other would only have the same page made anew."""
MENU = {"": "Now", "turns": "Turns", "report": "Report", "whatif": "What-ifs"}


class Kept(NamedTuple):
    """A page that was made, and the time until which it serves others too."""

    until_s: float
    status: int
    body: bytes


class Server:
    """Makes each page once at a time, in threads of its own, which read the store as every reader does."""

    def __init__(self, site: Site, viewers: Viewers) -> None:
        self._site = site
        self._viewers = viewers
        self._kept: OrderedDict[tuple[object, ...], Kept] = OrderedDict()
        self._locks = {make: asyncio.Lock() for make in MAKERS.values()}

    def application(self) -> Starlette:
        """Return the application; it answers GET and HEAD only."""
        pages = [Route(f"/{path}", partial(self._page, make)) for path, make in MAKERS.items()]
        return Starlette(
            routes=[
                *pages,
                Route("/jobs", _to_job),
                Route("/whatif/{name}", self._saved),
                Route("/static/{name}", _static),
            ],
            exception_handlers={
                404: lambda request, _: _refused(request, NO_PAGE),
                PageRefusedError: _refused,
                StoreError: _refused,
            },
        )

    async def _page(self, make: PageMaker, request: Request) -> Response:
        asked = await run_in_threadpool(self._question, request)
        key = (make, asked.viewer, asked.name, *(asked.query.get(word) for word in WORDS))
        async with self._locks[make]:  # requests that wait for the same page take no threads
            kept = self._kept.get(key)
            if kept is None or kept.until_s < self._site.clock.monotonic():
                kept = self._kept[key] = await run_in_threadpool(self._made, make, asked, request)
                self._kept.move_to_end(key)
                if len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
        return _response(request, kept.body, "text/html", kept.status)

    def _made(self, make: PageMaker, asked: Question, request: Request) -> Kept:
        try:
            with StoreReader(self._site.store) as reader:
                page = make(self._site, reader, asked)
            status, keep_s = 200, page.keep_s
            body = rendered(page.template, request, viewer=asked.viewer, refresh=page.refresh_s, **page.values)
        except PageRefusedError as error:
            status, keep_s = error.status, web_pages.KEEP_S
            body = rendered("problem.html", request, viewer=asked.viewer, status=status, reason=str(error))
        return Kept(self._site.clock.monotonic() + keep_s, status, body)

    def _question(self, request: Request) -> Question:
        viewer = self._viewers.viewer(request)
        return Question(viewer, request.path_params.get("name", ""), request.query_params)

    def _saved(self, request: Request) -> Response:
        body = web_pages.saved_page(self._site, self._question(request))
        return _response(request, body, "text/html", more={"Content-Security-Policy": SANDBOX})


def configured(application: Starlette) -> uvicorn.Config:
    """Return uvicorn's settings: HTTP only, and no header of a request is taken for another client's address."""
    return uvicorn.Config(
        application, http=PeerProtocol, loop="asyncio", ws="none", lifespan="off", proxy_headers=False,
        server_header=False, access_log=False, log_level="warning", limit_concurrency=MAX_CONNECTIONS,
    )  # fmt: skip


MAKERS: Mapping[str, PageMaker] = {
    "": web_pages.now,
    "jobs/{name}": web_pages.job,
    "hosts/{name}": web_pages.host,
    "turns": web_pages.turns,
    "report": web_pages.report,
    "whatif": web_pages.whatifs,
}


def rendered(template: str, request: Request, **values: Any) -> bytes:
    """Return a page; its links are relative, so that a proxy may have it below any path."""
    path = request.url.path
    values = {"viewer": None, "refresh": 0, "here": path.strip("/"), "root": "../" * (path.count("/") - 1)} | values
    return _environment().get_template(template).render(menu=MENU, **values).encode()


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(__package__), PackageLoader("cadenza.slurm_plugin.report")]),
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_clean,
    )  # fmt: skip
    environment.globals |= {"light": LIGHT, "dark": DARK, "narrow": NARROW}
    return environment


def _clean(value: Any) -> Any:
    """Return a value without the marks that turn the writing direction; every text on a page passes through here."""
    return printable(value, MAX_TEXT) if isinstance(value, str) and not isinstance(value, Markup) else value


def _response(
    request: Request, body: bytes, kind: str, status: int = 200, more: Mapping[str, str] | None = None
) -> Response:
    """Return a body, or nothing but 304 where the browser has the same; its tag says nothing of other viewers."""
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {**HEADERS, **(more or {}), "ETag": tag}
    if status == 200 and request.headers.get("if-none-match") == tag:  # noqa: PLR2004 (HTTP's number)
        return Response(status_code=304, headers=headers)
    return Response(body, status, headers, kind)


def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in STATIC:
        raise NO_PAGE
    return _response(request, _environment().get_template(name).render().encode(), STATIC[name])


def _to_job(request: Request) -> Response:
    """Lead from the form in the head of each page to a job's page."""
    number = request.query_params.get("id", "").strip()
    if not number.isascii() or not number.isdigit():
        raise PageRefusedError(404, "this is no number of a job")
    return RedirectResponse(f"jobs/{int(number[:10])}", 303, HEADERS)


def _refused(request: Request, error: Exception) -> Response:
    status = error.status if isinstance(error, PageRefusedError) else 503
    reason = str(error) if isinstance(error, PageRefusedError) else "the service's record cannot be read"
    return _response(request, rendered("problem.html", request, status=status, reason=reason), "text/html", status)
