"""L44-L48: what an export says about where it comes from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib import resources

import pytest
from export_rig import render

from hotloop.experiment.catalog.load import find_model, load_catalog
from hotloop.experiment.choices import Experiment
from hotloop.experiment.export.bundle import build_bundle
from hotloop.experiment.plan import build_plan
from hotloop.experiment.provenance import (
    ALWAYS_MISSING,
    CATALOG_FILE,
    BuildInfo,
    build_provenance,
    find_changed_slime_files,
    hash_catalog,
    load_slime_files,
    read_build_info,
)
from hotloop.experiment.resolve import resolve

COMMIT = "a" * 40
CLEAN = BuildInfo(COMMIT, False)


class Git:
    """Answers as git does."""

    def __init__(self, status: str = "", tracked: bool = True) -> None:
        self.status = status
        self.tracked = tracked

    def __call__(self, args: Sequence[str]) -> str | None:
        if args[0] == "ls-files":
            return f"{CATALOG_FILE}\n" if self.tracked else None
        return {"rev-parse": COMMIT + "\n", "status": self.status}[args[0]]


def provenance(build: BuildInfo, **choices: str) -> dict[str, object]:
    catalog = load_catalog()
    resolved = resolve(Experiment.model_validate(choices), catalog)
    return build_provenance(resolved, find_model(catalog, resolved.model), catalog, build)


def test_l45_commit_recipe_config_images_and_what_is_missing() -> None:
    found = provenance(CLEAN)
    assert found["page_commit"] == COMMIT
    assert found["dirty"] is False
    assert found["recipe"] == {
        "path": "scripts/run-glm4.7-30B-A3B.sh",
        "commit": "624b824a898ab0ec1fcb4d373004c7f3852bf515",
        "sha256": "179358dcea66442e5edc338e38ce91232554323f48f08d2906c211d8e27cbe14",
    }
    assert found["model_config"] == {
        "path": "scripts/models/glm4.7-30B-A3B.sh",
        "commit": "624b824a898ab0ec1fcb4d373004c7f3852bf515",
        "sha256": "f28ff3ef9bbfa6f1d0392ab03d57a9b1ccac7edfb21f1709a3380b189add700f",
    }
    images = found["images"]
    assert isinstance(images, dict)
    assert images["label"] == "nightly-dev-20260810a"
    assert images["megatron_commit"] == "1dcf0dafa884ad52ffb243625717a3471643e087"
    assert found["missing"] == [
        "driver", "NCCL", "installed Python packages", "actual GPU type", "storage client",
    ]  # fmt: skip
    assert list(ALWAYS_MISSING) == found["missing"]


def test_l45_every_exportable_model_has_the_hash_of_its_scripts() -> None:
    files = load_slime_files()["files"]
    for model in load_catalog().models.values():
        if not model.rollout_only:
            assert len(files[model.model_script]) == 64, model.id
            assert not model.run_script or len(files[model.run_script]) == 64, model.id


def test_l46_hashes_are_of_the_real_files() -> None:
    here = resources.files("hotloop").joinpath(CATALOG_FILE).read_bytes()
    assert hash_catalog() == hashlib.sha256(here).hexdigest()
    assert provenance(CLEAN)["catalog"] == {
        "path": f"src/hotloop/{CATALOG_FILE}",
        "commit": COMMIT,
        "sha256": hashlib.sha256(here).hexdigest(),
        "differs_from_commit": False,
    }


@pytest.mark.parametrize(
    ("status", "dirty", "differs"),
    [
        ("", False, False),
        (f" M src/hotloop/{CATALOG_FILE}\n", True, True),
        (" M src/hotloop/cli/plan.py\n?? src/hotloop/new.py\n", True, False),
    ],
)
def test_l46_a_dirty_build_is_flagged_and_so_is_a_changed_recipe(status: str, dirty: bool, differs: bool) -> None:
    build = read_build_info(Git(status))
    assert (build.commit, build.dirty) == (COMMIT, dirty)
    found = provenance(build)["catalog"]
    assert isinstance(found, dict)
    assert found["differs_from_commit"] is differs


def test_l46_another_project_s_repository_is_not_taken_for_ours() -> None:
    """Installed into an environment inside somebody's repository: git answers, but does not track this package."""
    assert read_build_info(Git(tracked=False)) == BuildInfo("", True)


def test_l46_without_git_the_build_is_unknown_and_never_called_clean() -> None:
    build = read_build_info(lambda args: None)
    assert build == BuildInfo("", True)
    found = provenance(build)["catalog"]
    assert isinstance(found, dict)
    assert found["differs_from_commit"] is True


def test_l46_a_checkout_whose_scripts_differ_is_named() -> None:
    model = find_model(load_catalog(), "flash")
    known = load_slime_files()["files"]
    right = dict.fromkeys(known, b"")

    def read(path: str) -> bytes | None:
        return right.get(path)

    assert find_changed_slime_files(model, read) == [model.model_script, model.run_script]
    assert find_changed_slime_files(model, lambda path: None) == [model.model_script, model.run_script]


def test_l47_page_and_json_have_the_same_provenance_and_the_shell_names_the_recipe_commit() -> None:
    catalog = load_catalog()
    plan = build_plan(Experiment(), catalog=catalog)
    document = json.loads(build_bundle(plan, catalog, CLEAN).files["experiment.json"])
    assert document["provenance"] == provenance(CLEAN)
    assert any(document["provenance"]["recipe"]["commit"] in line for line in render().splitlines()[:5])


def test_l44_the_image_selector_changes_the_hint_and_nothing_else() -> None:
    assert render(image="rocm") == render(image="cuda")
    one, other = provenance(CLEAN, image="rocm"), provenance(CLEAN)
    assert one["images"]["selected"] == "rocm"  # type: ignore[index]
    assert {key: value for key, value in one.items() if key != "images"} == {
        key: value for key, value in other.items() if key != "images"
    }


def test_l48_the_scope_is_static_and_nothing_says_that_a_run_was_tried() -> None:
    catalog = load_catalog()
    text = build_bundle(build_plan(Experiment(), catalog=catalog), catalog, CLEAN).files["experiment.json"]
    document = json.loads(text)
    assert document["validation"]["scope"] == "static"
    assert set(document["validation"]) == {"scope", "errors", "notes"}
    assert not {"validated", "passed", "tested", "gpu_validated"} & set(json.dumps(document).split('"'))
