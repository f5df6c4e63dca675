"""Where an export comes from: this package's commit, the recipe, the model script, the image, and what is not known.

Owns: `BuildInfo`, `read_build_info`, `build_provenance`, `find_changed_slime_files`.

Promises: pure apart from the package's own files; git is asked only through a function that the caller passes in.
Hashes are of real bytes: the catalogue as it lies here, and slime's scripts at the commit the recipes were read from
(`slime_files.json`). What differs from its commit is flagged. Nothing here says that a run was tried on a GPU.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from hotloop.experiment.catalog.records import Catalog, Model
from hotloop.experiment.choices import Experiment

ALWAYS_MISSING = ("driver", "NCCL", "installed Python packages", "actual GPU type", "storage client")
"""Run-time facts that no export can know."""

CATALOG_FILE = "experiment/catalog/models.toml"
"""The recipes, relative to the package."""

RunGit = Callable[[Sequence[str]], str | None]
"""Runs `git ARGS` where the package lies and returns its output, or None where there is no repository."""


@dataclass(frozen=True, slots=True)
class BuildInfo:
    """State of this package."""

    commit: str
    """Empty when neither git nor the wheel says."""
    dirty: bool
    changed: tuple[str, ...] = ()
    """Files of the planner that differ from the commit, relative to the package."""


def read_build_info(run_git: RunGit) -> BuildInfo:
    """Ask git, then the wheel's `build_info.json`, then give up: an unknown build is not called clean."""
    is_tracked = run_git(["ls-files", "--error-unmatch", CATALOG_FILE])
    commit = run_git(["rev-parse", "HEAD"]) if is_tracked else None
    if commit and commit.strip():
        status = run_git(["status", "--porcelain", "--untracked-files=all", "--", "."]) or ""
        changed = tuple(sorted(line[3:].strip() for line in status.splitlines() if line.strip()))
        return BuildInfo(commit.strip(), bool(changed), changed)
    packaged = resources.files("hotloop").joinpath("build_info.json")
    if packaged.is_file():
        facts = json.loads(packaged.read_text(encoding="utf-8"))
        return BuildInfo(str(facts["commit"]), bool(facts["dirty"]))
    return BuildInfo("", True)


@lru_cache(maxsize=1)
def load_slime_files() -> Mapping[str, Any]:
    """Return the commit and the SHA-256 of the slime scripts that the catalogue cites."""
    text = resources.files("hotloop.experiment").joinpath("slime_files.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def find_changed_slime_files(model: Model, read: Callable[[str], bytes | None]) -> list[str]:
    """Return the model's slime scripts that a checkout lacks or has with other bytes.

    Args:
        read: returns a file's bytes by its path in the slime repository, or None when it is not there.
    """
    known = load_slime_files()["files"]
    changed = []
    for path in dict.fromkeys((model.model_script, model.run_script)):
        if not path or path not in known:
            continue
        found = read(path)
        if found is None or hashlib.sha256(found).hexdigest() != known[path]:
            changed.append(path)
    return changed


def hash_catalog() -> str:
    """Return the SHA-256 of the recipes as they lie in this package."""
    return hashlib.sha256(resources.files("hotloop").joinpath(CATALOG_FILE).read_bytes()).hexdigest()


def build_provenance(choices: Experiment, model: Model, catalog: Catalog, build: BuildInfo) -> dict[str, Any]:
    """Return the `provenance` object of experiment.json and of the page."""
    slime = load_slime_files()

    def describe(path: str) -> dict[str, Any]:
        return {"path": path, "commit": slime["commit"], "sha256": slime["files"].get(path)}

    images = {key: value for key, value in catalog.images.items() if key != "missing"}
    return {
        "page_commit": build.commit,
        "dirty": build.dirty,
        "recipe": describe(model.run_script or model.model_script),
        "model_config": describe(model.model_script),
        "catalog": {
            "path": f"src/hotloop/{CATALOG_FILE}",
            "commit": build.commit,
            "sha256": hash_catalog(),
            "differs_from_commit": build.dirty and _names(build.changed, CATALOG_FILE),
        },
        "images": {"selected": choices.image, **images},
        "missing": list(dict.fromkeys((*ALWAYS_MISSING, *catalog.images.get("missing", ())))),
    }


def _names(changed: Sequence[str], path: str) -> bool:
    """Whether a list of changed files names a path; an unknown build (no list) is taken as changed."""
    return not changed or any(entry.endswith(path) for entry in changed)
