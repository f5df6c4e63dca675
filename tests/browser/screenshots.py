"""Take the pictures of the guide: every step in light and dark, a rehearsal, a narrow page.

Run: python tests/browser/screenshots.py [--out docs] [--only NAME]. It starts a lab of its own, rehearses the
default experiment, and writes lab-<what>-<theme>.png. The page must be built (npm run build in web/).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab_page import LabPage
from playwright.sync_api import sync_playwright
from test_page_rehearse import begin, wait_for_state

CHROMIUM = os.environ.get("HOTLOOP_CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
STEPS = ("Model", "Placement", "Precision", "Consistency", "Serving", "Launch")


def show_step(name: str) -> Callable[[LabPage], None]:
    """Open a step: the large model where its map matters, the default elsewhere."""

    def show(lab: LabPage) -> None:
        lab.preset("scale" if name in ("Placement", "Serving") else "start")
        lab.step(name)
        lab.page.wait_for_load_state("networkidle")
        if name == "Placement":
            lab.page.evaluate("() => document.getElementById('work').scrollIntoView()")
            lab.page.get_by_test_id("gpu-17-6").hover()

    return show


def show_rehearsal(lab: LabPage) -> None:
    """A finished short run, its curves and its rollouts."""
    lab.page.wait_for_load_state("networkidle")
    lab.page.get_by_test_id("rollouts").wait_for()
    lab.page.evaluate("() => document.getElementById('rehearse').scrollIntoView()")


def show_compare(lab: LabPage) -> None:
    """A and B side by side."""
    lab.preset("start")
    lab.page.get_by_role("button", name="Save B as A").click()
    lab.preset("scale")
    lab.page.get_by_test_id("differences").wait_for()
    lab.page.wait_for_load_state("networkidle")
    lab.page.evaluate("() => document.getElementById('compare').scrollIntoView()")


def show_understand(lab: LabPage) -> None:
    """The advantage of eight answers."""
    lab.page.locator(".steps5 button").nth(3).click()
    lab.page.evaluate("() => document.getElementById('understand').scrollIntoView()")


SHOTS: dict[str, tuple[int, int, Callable[[LabPage], None]]] = {
    **{name.lower(): (1440, 1000, show_step(name)) for name in STEPS},
    "rehearse": (1440, 1500, show_rehearsal),
    "compare": (1440, 700, show_compare),
    "understand": (1440, 620, show_understand),
    "narrow": (390, 1400, show_step("Model")),
}


def take(browser: Any, address: str, out: Path, name: str, theme: str) -> None:
    """Take one picture."""
    width, height, show = SHOTS[name]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=theme, reduced_motion="reduce", locale="en-US"
    )
    page = context.new_page()
    page.goto(address)
    lab = LabPage(page, address.partition("/?")[0], [])
    lab.wait_until_drawn()
    show(lab)
    page.wait_for_timeout(500)
    page.screenshot(path=str(out / f"lab-{name}-{theme}.png"))
    context.close()


def main() -> None:
    """Take every picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--only", choices=sorted(SHOTS))
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as runs, sync_playwright() as playwright:
        command = [sys.executable, "-m", "hotloop.cli.main", "lab", "--port", "0", "--no-open", "--runs", runs]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        try:
            if chosen.only in (None, "rehearse"):
                page = browser.new_context(locale="en-US").new_page()
                page.goto(address)
                lab = LabPage(page, address.partition("/?")[0], [])
                lab.wait_until_drawn()
                begin(lab)
                wait_for_state(lab, "finished")
            for name in [chosen.only] if chosen.only else SHOTS:
                for theme in ("light", "dark"):
                    take(browser, address, chosen.out, name, theme)
        finally:
            browser.close()
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
