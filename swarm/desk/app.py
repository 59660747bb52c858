"""The web application. Every answer is made at most once after each look, however often it is asked for."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response

from swarm.desk.guard import REFUSAL, Guard, household_of
from swarm.desk.metrics import metrics_text
from swarm.desk.organiser.controls import SwarmControls
from swarm.desk.organiser.door import Door
from swarm.desk.organiser.web import OrganisersPages
from swarm.desk.page import Snapshot, qr_code, render
from swarm.desk.peer_table import PeerQuery, choose
from swarm.desk.report import HistoryReport, PeersReport, SwarmReport, TimelineReport
from swarm.runtime.token_bucket import TokenBucket, TokenBuckets

HTML, JSON, SVG = "text/html; charset=utf-8", "application/json", "image/svg+xml"
METRICS = "text/plain; version=0.0.4; charset=utf-8"
MIN_GZIP_BYTES = 1000
FORMS_AT_ONCE, FORMS_A_SECOND = 40, 20
"""Forms of the page of all peers that are made at once, and then per second: each takes some hundredths of a second."""


@dataclass(frozen=True)
class Answer:
    """A body that is ready to be sent, as it is and compressed.

    Args:
        packed: the compressed body; empty if the body is too short for that
        tag: for the header `etag`
    """

    body: bytes
    media_type: str
    packed: bytes
    tag: str

    @classmethod
    def of(cls, content: str | bytes, media_type: str) -> Answer:
        body = content.encode() if isinstance(content, str) else content
        packed = gzip.compress(body, 5) if len(body) >= MIN_GZIP_BYTES else b""
        return cls(body, media_type, packed, f'W/"{hashlib.blake2b(body, digest_size=12).hexdigest()}"')

    def to(self, request: Request) -> Response:
        """The response to a request, without a body if the browser has this answer already."""
        headers = {"etag": self.tag, "cache-control": "no-cache", "vary": "accept-encoding"}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        if self.packed and "gzip" in request.headers.get("accept-encoding", ""):
            return Response(self.packed, headers=headers | {"content-encoding": "gzip"}, media_type=self.media_type)
        return Response(self.body, headers=headers, media_type=self.media_type)


def build_app(
    newest: Callable[[], Snapshot],
    door: Door | None = None,
    controls: SwarmControls | None = None,
    only_here: bool = False,
) -> FastAPI:
    """The pages of the desk, and the answers for programs.

    Args:
        newest: returns the newest snapshot
        door: says which browsers may give orders; None: none may
        controls: pass on orders to the run; None if it has no organiser
        only_here: answer only requests to `localhost`, to a number, or to the host of the page's URL
    """
    door = door or Door(None)
    app = FastAPI(
        title="swarm desk",
        version="1",
        description="What a swarm's peers say about themselves, as seen from outside.",
        openapi_url="/api/v1/openapi.json",
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
    )
    app.add_middleware(Guard, only_host=(door.page_host or "localhost") if only_here else None)

    def answers(path: str, media_type: str, make: Callable[[Snapshot], str | bytes], model: Any = None) -> None:
        """Serve at this path what `make` makes of the newest snapshot."""

        async def answer(request: Request) -> Response:
            snapshot = newest()
            return snapshot.once(path, lambda: Answer.of(make(snapshot), media_type)).to(request)

        described = {"responses": {200: {"model": model}}} if model is not None else {"include_in_schema": False}
        name = path.strip("/").replace("/", "_") or "page"
        app.add_api_route(path, answer, methods=["GET"], response_class=Response, name=name, **described)
        app.add_api_route(path, answer, methods=["HEAD"], include_in_schema=False)

    answers("/", HTML, lambda snapshot: render("index.html.jinja", snapshot))
    answers("/live", HTML, lambda snapshot: render("live.html.jinja", snapshot))
    answers("/badge.svg", SVG, lambda snapshot: render("badge.svg.jinja", snapshot))
    answers("/join.svg", SVG, lambda snapshot: qr_code(snapshot.card.join_line))
    answers("/metrics", METRICS, lambda snapshot: metrics_text(snapshot.swarm, snapshot.peers.peers))
    answers("/api/v1/swarm", JSON, lambda snapshot: snapshot.swarm.model_dump_json(), SwarmReport)
    answers("/api/v1/peers", JSON, lambda snapshot: snapshot.peers.model_dump_json(), PeersReport)
    answers("/api/v1/history", JSON, lambda snapshot: snapshot.history.model_dump_json(), HistoryReport)
    answers("/api/v1/timeline", JSON, lambda snapshot: snapshot.timeline.model_dump_json(), TimelineReport)
    _serve_peers(app, newest)
    OrganisersPages(newest, door, controls).add_to(app)
    for name, media_type in (("desk.css", "text/css"), ("desk.js", "text/javascript"), ("icon.svg", SVG)):
        _serve_file(app, name, media_type)
    return app


def _serve_peers(app: FastAPI, newest: Callable[[], Snapshot]) -> None:
    """Serve the page of all peers.

    It has many forms, so an answer is made once after each look for each form, and only some forms are made per second.
    """
    of_all = TokenBucket(FORMS_AT_ONCE, FORMS_A_SECOND)
    of_address = TokenBuckets(FORMS_AT_ONCE, FORMS_A_SECOND / 2)

    async def answer(request: Request) -> Response:
        snapshot, query = newest(), PeerQuery.of(request.query_params)

        def make() -> Answer:
            chosen = choose(snapshot.peers.peers, query)
            return Answer.of(render("peers.html.jinja", snapshot, chosen=chosen), HTML)

        is_made = query.address in snapshot.made
        if not is_made and not (of_address.take(household_of(request.scope)) and of_all.take()):
            return Response(REFUSAL, 429, {"retry-after": "1"}, "text/plain")
        return snapshot.once(query.address, make).to(request)

    app.add_api_route("/peers", answer, methods=["GET", "HEAD"], include_in_schema=False)


def _serve_file(app: FastAPI, name: str, media_type: str) -> None:
    @cache
    def content() -> Answer:
        return Answer.of((files("swarm.desk") / "pages" / name).read_bytes(), media_type)

    async def answer(request: Request) -> Response:
        return content().to(request)

    app.add_api_route(f"/{name}", answer, methods=["GET", "HEAD"], include_in_schema=False)
