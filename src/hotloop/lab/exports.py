"""The files that the page previews, copies and downloads.

Owns: `answer_export` and `make_zip`.

Promises: the text is `build_bundle`'s, the same that `hotloop export` writes, byte for byte; an error leaves the two
scripts out. The zip has fixed times, so equal choices give equal bytes.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from typing import Any

from hotloop.errors import InputError
from hotloop.experiment.catalog.load import find_model, load_catalog
from hotloop.experiment.export.bundle import Bundle, build_bundle
from hotloop.experiment.provenance import BuildInfo, build_provenance
from hotloop.lab.answers import plan_for, read_experiment

SCRIPTS = ("experiment.sh", "serving-reference.sh")
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)


def make_bundle(body: Mapping[str, Any], build: BuildInfo) -> Bundle:
    """Build the files of the experiment in a request."""
    return build_bundle(plan_for(read_experiment(body.get("experiment"))), load_catalog(), build)


def answer_export(body: Mapping[str, Any], build: BuildInfo) -> dict[str, Any]:
    """Give every file's text, scripts first, and which of them an error holds back."""
    bundle = make_bundle(body, build)
    names = [*SCRIPTS, *(name for name in bundle.files if name not in SCRIPTS)]
    held = [name for name in SCRIPTS if name not in bundle.files]
    note = "# not written: " + ", ".join(bundle.blocked_by) + "\n"
    return {
        "files": {name: bundle.files.get(name, note) for name in names},
        "blocked": bool(held),
        "blocked_files": held,
    }


def make_zip(body: Mapping[str, Any], build: BuildInfo) -> bytes:
    """Pack every file of an export that no error holds back.

    Raises: InputError `export_blocked`.
    """
    bundle = make_bundle(body, build)
    if bundle.blocked_by:
        codes = ", ".join(bundle.blocked_by)
        raise InputError("export_blocked", f"errors hold the scripts back: {codes}", do="Repair them first.")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in sorted(bundle.files.items()):
            entry = zipfile.ZipInfo(name, _ZIP_TIME)
            entry.external_attr = (0o755 if name.endswith(".sh") else 0o644) << 16
            archive.writestr(entry, text)
    return packed.getvalue()


def answer_provenance(body: Mapping[str, Any], build: BuildInfo) -> dict[str, Any]:
    """Give the provenance object that experiment.json carries."""
    plan = plan_for(read_experiment(body.get("experiment")))
    catalog = load_catalog()
    return build_provenance(plan.resolved, find_model(catalog, plan.resolved.model), catalog, build)
