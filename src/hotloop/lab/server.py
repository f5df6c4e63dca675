"""The lab's HTTP server: static page, JSON API, live events. Routes only; each asks one module of this package.

Owns: `create_app`, the route table, and how an error becomes an answer.

    browser --> Guard --> /                    static/ (the built page), or a page that names the command that builds it
                      --> /api/plan, ...       answers.py schedules.py exports.py understand.py   (pure)
                      --> /api/runs, ...       runs.py (child processes)
                      --> /api/runs/ID/events  live.py (server-sent events)

Promises: a body is at most MAX_BODY_BYTES of JSON; a HotloopError becomes its message, code and step with status 400;
the run route takes an experiment and never a command line.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route

from hotloop.errors import EXIT_ENVIRONMENT, HotloopError, InputError
from hotloop.experiment.provenance import BuildInfo
from hotloop.experiment.rehearsal import laptop_form
from hotloop.lab import answers, exports, rehearsals, rollouts
from hotloop.lab.guard import Guard
from hotloop.lab.live import Cursor, follow
from hotloop.lab.runs import RunShelf
from hotloop.lab.schedules import answer_schedules
from hotloop.lab.understand import answer_understand

STATIC = Path(__file__).parent / "static"
MAX_BODY_BYTES = 2 << 20
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
    runs = RunRoutes(shelf)
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
        Route("/api/runs", runs.list, methods=["GET"]),
        Route("/api/runs", runs.start, methods=["POST"]),
        Route("/api/runs/{run_id}", runs.one, methods=["GET"]),
        Route("/api/runs/{run_id}", runs.delete, methods=["DELETE"]),
        Route("/api/runs/{run_id}/stop", runs.stop, methods=["POST"]),
        Route("/api/runs/{run_id}/resume", runs.resume, methods=["POST"]),
        Route("/api/runs/{run_id}/events", runs.events, methods=["GET"]),
        Route("/api/runs/{run_id}/rollouts", runs.rollouts, methods=["GET"]),
        Route("/api/runs/{run_id}/report", runs.report, methods=["GET"]),
        Route("/api/{rest:path}", _unknown, methods=["GET", "POST", "DELETE"]),
        Route("/{path:path}", page.serve),
    ]

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        runs.is_closing = True
        await asyncio.to_thread(shelf.stop_all)

    return Starlette(routes=routes, middleware=[Middleware(Guard, token=token, port=port)], lifespan=lifespan)


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


class RunRoutes:
    """Routes about runs; the shelf's calls block and go to a thread."""

    def __init__(self, shelf: RunShelf) -> None:
        self._shelf = shelf
        self.is_closing = False

    async def list(self, _: Request) -> Response:
        shelf = self._shelf
        return await _answer(lambda: {"runs": [shelf.describe(record) for record in shelf.list_runs()]})

    async def one(self, request: Request) -> Response:
        shelf, run_id = self._shelf, request.path_params["run_id"]
        return await _answer(lambda: shelf.describe(shelf.read(run_id)))

    async def start(self, request: Request) -> Response:
        async def work() -> Any:
            body = await _read_body(request)
            ready = await asyncio.to_thread(rehearsals.prepare_run, body)
            record = await asyncio.to_thread(
                lambda: self._shelf.start(ready.document, experiment_hash=ready.experiment_hash, title=ready.title)
            )
            return self._shelf.describe(record)

        return await _answer_async(work)

    async def stop(self, request: Request) -> Response:
        shelf, run_id = self._shelf, request.path_params["run_id"]
        return await _answer(lambda: shelf.describe(shelf.stop(run_id)))

    async def resume(self, request: Request) -> Response:
        shelf, run_id = self._shelf, request.path_params["run_id"]
        return await _answer(lambda: shelf.describe(shelf.resume(run_id)))

    async def delete(self, request: Request) -> Response:
        shelf, run_id = self._shelf, request.path_params["run_id"]

        def delete() -> Any:
            shelf.delete(run_id)
            return {"deleted": run_id}

        return await _answer(delete)

    async def rollouts(self, request: Request) -> Response:
        shelf, run_id, query = self._shelf, request.path_params["run_id"], request.query_params
        folder = shelf.folder(shelf.read(run_id).run_id) / "run"

        def read() -> Any:
            rounds = rollouts.list_rounds(folder)
            if not rounds:
                return {"rounds": []}
            wanted = _whole(query.get("round"), rounds[-1])
            return rollouts.read_round(folder, wanted, _whole(query.get("group"), 0))

        return await _answer(read)

    async def report(self, request: Request) -> Response:
        """Give the run's own files as one JSON document: what ran, every round, how it ended."""
        shelf, run_id = self._shelf, request.path_params["run_id"]
        return await _answer(lambda: rehearsals.read_report(shelf.folder(shelf.read(run_id).run_id) / "run"))

    async def events(self, request: Request) -> Response:
        run_id = request.path_params["run_id"]
        try:
            record = await asyncio.to_thread(self._shelf.read, run_id)
        except InputError as error:
            return _error(error)
        given = request.headers.get("last-event-id") or request.query_params.get("after", "")

        def describe() -> tuple[str, bool]:
            told = self._shelf.describe(self._shelf.read(record.run_id))
            return orjson.dumps(told).decode(), told["state"] != "running" or self.is_closing

        stream = follow(
            self._shelf.folder(run_id) / "run", Cursor.parse(given), describe, enrich=rehearsals.add_uncertainty
        )
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)


def _get(answer: Callable[[], Any]) -> Callable[[Request], Awaitable[Response]]:
    async def route(_: Request) -> Response:
        return await _answer(answer)

    return route


def _post(answer: Answer) -> Callable[[Request], Awaitable[Response]]:
    async def route(request: Request) -> Response:
        async def work() -> Any:
            body = await _read_body(request)
            return await asyncio.to_thread(answer, body)

        return await _answer_async(work)

    return route


def _zip(build: BuildInfo) -> Callable[[Request], Awaitable[Response]]:
    async def route(request: Request) -> Response:
        try:
            body = await _read_body(request)
            packed = await asyncio.to_thread(exports.make_zip, body, build)
        except HotloopError as error:
            return _error(error)
        return Response(packed, media_type="application/zip")

    return route


async def _unknown(request: Request) -> Response:
    return _error(InputError("route_unknown", "the lab has no such route", where=request.url.path[:80]), status=404)


async def _answer(work: Callable[[], Any]) -> Response:
    async def run() -> Any:
        return await asyncio.to_thread(work)

    return await _answer_async(run)


async def _answer_async(work: Callable[[], Awaitable[Any]]) -> Response:
    try:
        value = await work()
    except HotloopError as error:
        return _error(error)
    return Response(orjson.dumps(value), media_type="application/json", headers={"cache-control": "no-store"})


def _error(error: HotloopError, status: int | None = None) -> Response:
    problems = getattr(error, "problems", ())
    message = " ".join(str(problem) for problem in problems) if len(problems) > 1 else str(error)
    body = {"error": {"code": error.code, "message": message, "do": "", "details": error.details}}
    chosen = status or (424 if error.exit_code == EXIT_ENVIRONMENT else 400)
    return Response(orjson.dumps(body, default=str), status_code=chosen, media_type="application/json")


async def _read_body(request: Request) -> Mapping[str, Any]:
    """Read a JSON object of bounded size.

    Raises: InputError `body_too_large`, `body_not_json`.
    """
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise InputError("body_too_large", f"the request is larger than {MAX_BODY_BYTES} bytes")
        chunks.append(chunk)
    try:
        body = orjson.loads(b"".join(chunks))
    except orjson.JSONDecodeError as error:
        raise InputError("body_not_json", f"the request is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise InputError("body_not_json", "the request is no JSON object")
    return body


def _whole(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 10 else default
