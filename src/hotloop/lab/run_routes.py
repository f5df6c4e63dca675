"""The routes under `/api/runs`: start, stop, resume, list, follow, read.

Promises: the start route takes an experiment and never a command line; an id that is not one of ours never becomes a
path. The shelf's calls block and go to a thread. Does not do: child processes (runs.py), what a stream says (live.py).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from hotloop.errors import HotloopError, InputError
from hotloop.lab import rehearsals, report, rollouts
from hotloop.lab.live import Cursor, follow
from hotloop.lab.runs import RunShelf
from hotloop.lab.wire import answer_error, answer_later, answer_now, read_body, read_whole


class RunRoutes:
    """Routes about runs; the shelf's calls block and go to a thread."""

    def __init__(self, shelf: RunShelf, static: Path) -> None:
        self._shelf = shelf
        self._static = static
        self.is_closing = False
        """Set when the server ends, so that open streams end first."""

    def routes(self) -> tuple[Route, ...]:
        """List the routes."""
        one = "/api/runs/{run_id}"
        return (
            Route("/api/runs", self.list_runs, methods=["GET"]),
            Route("/api/runs", self.start, methods=["POST"]),
            Route(one, self.one, methods=["GET"]),
            Route(one, self.delete, methods=["DELETE"]),
            Route(f"{one}/stop", self.stop, methods=["POST"]),
            Route(f"{one}/resume", self.resume, methods=["POST"]),
            Route(f"{one}/events", self.events, methods=["GET"]),
            Route(f"{one}/rollouts", self.rollouts, methods=["GET"]),
            Route(f"{one}/report", self.report, methods=["GET"]),
            Route(f"{one}/report.html", self.report_page, methods=["GET"]),
        )

    async def list_runs(self, _: Request) -> Response:
        shelf = self._shelf
        return await answer_now(lambda: {"runs": [shelf.describe(record) for record in shelf.list_runs()]})

    async def one(self, request: Request) -> Response:
        shelf, run_id = self._shelf, request.path_params["run_id"]
        return await answer_now(lambda: shelf.describe(shelf.read(run_id)))

    async def start(self, request: Request) -> Response:
        async def work() -> Any:
            body = await read_body(request)
            ready = await asyncio.to_thread(rehearsals.prepare_run, body)
            record = await asyncio.to_thread(
                lambda: self._shelf.start(ready.document, experiment_hash=ready.experiment_hash, title=ready.title)
            )
            return self._shelf.describe(record)

        return await answer_later(work)

    async def stop(self, request: Request) -> Response:
        shelf, run_id = self._shelf, request.path_params["run_id"]
        return await answer_now(lambda: shelf.describe(shelf.stop(run_id)))

    async def resume(self, request: Request) -> Response:
        shelf, run_id = self._shelf, request.path_params["run_id"]
        return await answer_now(lambda: shelf.describe(shelf.resume(run_id)))

    async def delete(self, request: Request) -> Response:
        shelf, run_id = self._shelf, request.path_params["run_id"]

        def delete() -> Any:
            shelf.delete(run_id)
            return {"deleted": run_id}

        return await answer_now(delete)

    async def rollouts(self, request: Request) -> Response:
        shelf, run_id, query = self._shelf, request.path_params["run_id"], request.query_params
        folder = shelf.folder(shelf.read(run_id).run_id) / "run"

        def read() -> Any:
            rounds = rollouts.list_rounds(folder)
            if not rounds:
                return {"rounds": []}
            wanted = read_whole(query.get("round"), rounds[-1])
            return rollouts.read_round(folder, wanted, read_whole(query.get("group"), 0))

        return await answer_now(read)

    async def report(self, request: Request) -> Response:
        """Give the run's own files as one JSON document: what ran, every round, how it ended."""
        shelf, run_id = self._shelf, request.path_params["run_id"]
        return await answer_now(lambda: report.read_report(shelf.folder(shelf.read(run_id).run_id) / "run"))

    async def report_page(self, request: Request) -> Response:
        """Give the same as a page to read, save or print."""
        shelf, run_id = self._shelf, request.path_params["run_id"]

        def render() -> str:
            record = shelf.read(run_id)
            return report.render_report(shelf.folder(run_id) / "run", shelf.describe(record), self._static)

        try:
            return Response(await asyncio.to_thread(render), media_type="text/html")
        except HotloopError as error:
            return answer_error(error)

    async def events(self, request: Request) -> Response:
        run_id = request.path_params["run_id"]
        try:
            record = await asyncio.to_thread(self._shelf.read, run_id)
        except InputError as error:
            return answer_error(error)
        given = request.headers.get("last-event-id") or request.query_params.get("after", "")

        def describe() -> tuple[str, bool]:
            told = self._shelf.describe(self._shelf.read(record.run_id))
            return orjson.dumps(told).decode(), told["state"] != "running"

        stream = follow(
            self._shelf.folder(run_id) / "run",
            Cursor.parse(given),
            describe,
            is_closing=lambda: self.is_closing,
            enrich=rehearsals.add_uncertainty,
        )
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)
