"""How the tests talk to the page: by role and label, and by waiting until an answer is drawn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STORAGE_KEY = "hotloop-experiment-v1"


class LabPage:
    """One open page."""

    def __init__(self, page: Any, origin: str, troubles: list[str]) -> None:
        self.page = page
        self.origin = origin
        self.troubles = troubles

    def wait_until_drawn(self) -> None:
        self.page.wait_for_selector("main[data-revision]")

    def revision(self) -> int:
        return int(self.page.locator("main").get_attribute("data-revision"))

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Do something that edits, then wait until its plan is drawn."""
        before = self.revision()
        yield
        self.page.wait_for_function(
            "before => Number(document.querySelector('main').dataset.revision) > before", arg=before
        )

    def step(self, name: str) -> None:
        self.page.get_by_role("tab", name=name).click()

    def pick(self, label: str, *, group: str | None = None) -> None:
        """Choose a radio option or turn a box, and wait for its plan."""
        scope = self.page.locator(f"fieldset[data-field={group}]") if group else self.page.locator("#panel")
        with self.drawn():
            scope.get_by_label(label, exact=True).click()

    def fill(self, label: str, text: str) -> None:
        """Write a field and leave it."""
        field = self.page.locator("#panel").get_by_label(label, exact=True)
        with self.drawn():
            field.fill(text)
            field.press("Enter")

    def preset(self, name: str) -> None:
        with self.drawn():
            self.page.get_by_label("Presets").select_option(name)

    def undo(self) -> None:
        with self.drawn():
            self.page.get_by_role("button", name="Undo", exact=True).click()

    def redo(self) -> None:
        with self.drawn():
            self.page.get_by_role("button", name="Redo", exact=True).click()

    def reset(self) -> None:
        with self.drawn():
            self.page.get_by_role("button", name="Reset", exact=True).click()

    def stored(self) -> dict[str, Any]:
        """What the browser keeps: B, A."""
        text = self.page.evaluate("key => localStorage.getItem(key)", STORAGE_KEY)
        kept: dict[str, Any] = json.loads(text) if text else {}
        return kept

    def experiment(self) -> dict[str, Any]:
        """B as the browser keeps it."""
        kept = self.stored()
        return kept["experiment"] if kept else self.ask("/api/schema")["defaults"]

    def ask(self, path: str, body: Any = None) -> Any:
        """Ask the server as the page does, with its cookie."""
        return self.page.evaluate(
            """async ([path, body]) => {
                const options = body === null ? {} : { method: 'POST', body: JSON.stringify(body) };
                return (await fetch(path, options)).json();
            }""",
            [path, body],
        )

    def plan(self) -> dict[str, Any]:
        """The server's answer for B."""
        answer: dict[str, Any] = self.ask("/api/plan", {"experiment": self.experiment()})
        return answer

    def error_codes(self) -> list[str]:
        """Codes of the errors that are drawn."""
        found = self.page.locator("#findings [data-testid^=error-]").evaluate_all(
            "all => all.map(e => e.dataset.testid.slice('error-'.length))"
        )
        return list(found)

    def load(self, text: str, name: str = "experiment.json") -> None:
        """Load a file through the page's own input."""
        self.page.get_by_label("Load an experiment file").set_input_files(
            {"name": name, "mimeType": "application/json", "buffer": text.encode()}
        )

    def scroll_width(self) -> int:
        return int(self.page.evaluate("document.documentElement.scrollWidth"))
