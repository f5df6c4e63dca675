"""The lab's HTTP server: static page, JSON API, runs. Routes only; each asks one module of this package.

Owns: `create_app`, the route table, the page's files.

    browser --> Guard --> /                static/ (the built page), or a page that names the command that builds it
                      --> /api/plan, ...   answers.py schedules.py exports.py understand.py (pure)
                      --> /api/runs, ...   run_routes.py --> runs.py (child processes), live.py (server-sent events)

Promises: nothing outside the static folder is served as a page; ending the server stops the runs that it started.
Does not do: reading bodies and writing errors (wire.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from hotloop.errors import HotloopError, InputError
from hotloop.experiment.provenance import BuildInfo
from hotloop.experiment.rehearsal import laptop_form
from hotloop.lab import answers, exports, rehearsals
from hotloop.lab.guard import Guard
from hotloop.lab.run_routes import RunRoutes
from hotloop.lab.runs import RunShelf
from hotloop.lab.schedules import answer_schedules
from hotloop.lab.understand import answer_understand
from hotloop.lab.wire import answer_error, answer_later, answer_now, read_body

STATIC = Path(__file__).parent / "static"
BUILD_COMMANDS = ("cd web && npm ci", "npm run build")
NOT_BUILT = (
    "<!doctype html><html lang=en><meta charset=utf-8><title>hotloop lab</title><h1>The page is not built</h1>"
    "<p>The lab runs, but its page is not in this installation. Build it once, with Node 20 or newer:</p>"
    "<pre>{commands}</pre>"
    "<p>Then reload. A wheel of hotloop has the page inside and needs no Node.</p></html>"
)
_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}

Answer = Callable[[Mapping[str, Any]], Any]


def create_app(
    *,
    token: str,
    port: int,
    shelf: RunShelf,
    build: BuildInfo,
    rehearse: rehearsals.Rehearse = laptop_form,
    static: Path = STATIC,
) -> Starlette:
    """Build the application of one lab.

    Args:
        rehearse: makes the laptop form of an experiment, as `hotloop run` on this machine would.
    """
    page = Page(static)
    runs = RunRoutes(shelf, static)
    posts: dict[str, Answer] = {
        "/api/plan": answers.answer_plan,
        "/api/effects": answers.answer_effects,
        "/api/schedules": answer_schedules,
        "/api/load": answers.answer_load,
        "/api/clean": answers.answer_clean,
        "/api/link": answers.answer_link,
        "/api/open-link": answers.answer_open_link,
        "/api/compare": answers.answer_compare,
        "/api/rehearsal": lambda body: rehearsals.answer_rehearsal(body, rehearse),
        "/api/export": lambda body: exports.answer_export(body, build),
        "/api/provenance": lambda body: exports.answer_provenance(body, build),
    }
    routes = [
        Route("/api/schema", _get(answers.answer_schema)),
        Route("/api/understand", _get(answer_understand)),
        *(Route(path, _post(answer), methods=["POST"]) for path, answer in posts.items()),
        Route("/api/export.zip", _zip(build), methods=["POST"]),
        *runs.routes(),
        Route("/api/{rest:path}", _unknown, methods=["GET", "POST", "DELETE"]),
        Route("/{path:path}", page.serve),
    ]

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(shelf.stop_all)

    app = Starlette(routes=routes, middleware=[Middleware(Guard, token=token, port=port)], lifespan=lifespan)
    app.state.runs = runs
    return app


class Page:
    """The built page, or what to do when it is not there."""

    def __init__(self, static: Path) -> None:
        self._static = static

    async def serve(self, request: Request) -> Response:
        """Answer with one built file; nothing outside the static folder can be named."""
        name = request.path_params["path"] or "index.html"
        root = self._static.resolve()
        path = (root / name).resolve()
        if not (root / "index.html").is_file():
            commands = "\n".join(BUILD_COMMANDS)
            return Response(NOT_BUILT.format(commands=commands), status_code=503, media_type="text/html")
        if not path.is_relative_to(root) or not path.is_file():
            return Response("not found", status_code=404, media_type="text/plain")
        kept = "public, max-age=31536000, immutable" if name.startswith("assets/") else "no-cache"
        return FileResponse(path, media_type=_TYPES.get(path.suffix), headers={"cache-control": kept})


def _get(answer: Callable[[], Any]) -> Callable[[Request], Awaitable[Response]]:
    async def route(_: Request) -> Response:
        return await answer_now(answer)

    return route


def _post(answer: Answer) -> Callable[[Request], Awaitable[Response]]:
    async def route(request: Request) -> Response:
        async def work() -> Any:
            body = await read_body(request)
            return await asyncio.to_thread(answer, body)

        return await answer_later(work)

    return route


def _zip(build: BuildInfo) -> Callable[[Request], Awaitable[Response]]:
    async def route(request: Request) -> Response:
        try:
            body = await read_body(request)
            packed = await asyncio.to_thread(exports.make_zip, body, build)
        except HotloopError as error:
            return answer_error(error)
        return Response(packed, media_type="application/zip")

    return route


async def _unknown(request: Request) -> Response:
    return answer_error(
        InputError("route_unknown", "the lab has no such route", where=request.url.path[:80]), status=404
    )
