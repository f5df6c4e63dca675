"""A real `hotloop lab`, a real Chromium, one of each for the whole folder.

The browser is the one that HOTLOOP_CHROMIUM names, or the distribution's. Every test gets a context of its own. A
console error, a page error, or a request that leaves the machine fails the test that caused it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab_page import LabPage

playwright_api = pytest.importorskip("playwright.sync_api", reason="the browser tests need playwright")

ROOT = Path(__file__).parents[2]
WEB = ROOT / "web"
STATIC = ROOT / "src" / "hotloop" / "lab" / "static"
CHROMIUM = os.environ.get("HOTLOOP_CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run", "--js-flags=--expose-gc", "--enable-precise-memory-info",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests here and run them last: Playwright keeps an event loop running in this thread until it ends."""
    here = Path(__file__).parent
    for item in items:
        if Path(item.path).parent == here:
            item.add_marker(pytest.mark.browser)
    items.sort(key=lambda item: Path(item.path).parent == here)


def _is_built() -> bool:
    index = STATIC / "index.html"
    if not index.is_file():
        return False
    sources = [path for folder in ("src",) for path in (WEB / folder).rglob("*") if path.is_file()]
    return all(path.stat().st_mtime <= index.stat().st_mtime for path in sources if not path.name.endswith(".test.ts"))


@pytest.fixture(scope="session")
def built_page() -> None:
    """Build the page if it is absent or older than its source."""
    if _is_built():
        return
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("the page is not built and npm is not here")
    if not (WEB / "node_modules").is_dir():
        subprocess.run([npm, "ci"], cwd=WEB, check=True)
    subprocess.run([npm, "run", "build"], cwd=WEB, check=True, capture_output=True)


class Server:
    """A running `hotloop lab`."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hotloop.cli.main", "lab", "--port", "0", "--no-open", "--runs", str(runs)],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=runs.parent,
        )
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        self.origin = self.address.partition("/?")[0]
        self.token = self.address.partition("token=")[2]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="session")
def server(built_page: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("lab") / "runs")
    yield made
    made.stop()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    if not Path(CHROMIUM).exists():
        pytest.skip(f"no Chromium at {CHROMIUM}; name one with HOTLOOP_CHROMIUM")
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def open_lab(chromium: Any, server: Server) -> Iterator[Any]:
    """Open the page: `open_lab()`, `open_lab(width=320, path="/#experiment=...")`; a context for each call."""
    contexts: list[Any] = []
    troubles: list[str] = []

    def opener(
        *, width: int = 1440, height: int = 1000, path: str = "", is_open: bool = True, **options: Any
    ) -> LabPage:
        context = chromium.new_context(
            viewport={"width": width, "height": height}, reduced_motion="reduce", locale="en-US", accept_downloads=True,
            **options,
        )  # fmt: skip
        contexts.append(context)

        def guard(route: Any) -> None:
            address = route.request.url
            if address.startswith((server.origin, "data:", "blob:")):
                route.continue_()
            else:
                troubles.append(f"request left the machine: {address}")
                route.abort()

        context.route("**/*", guard)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("pageerror", lambda error: troubles.append(f"page error: {error}"))
        page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
        lab = LabPage(page, server.origin, troubles)
        page.goto(server.address)
        if path:
            page.goto(server.origin + path)
        if is_open:
            lab.wait_until_drawn()
        return lab

    yield opener
    for context in contexts:
        context.close()
    assert not troubles, troubles


@pytest.fixture
def lab(open_lab: Any) -> LabPage:
    """The page at 1440 px, with the default experiment."""
    made: LabPage = open_lab()
    return made
