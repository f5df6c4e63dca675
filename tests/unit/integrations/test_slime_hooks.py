"""What slime loads by dotted path: the experiment's reward, and the publisher of written versions."""

from __future__ import annotations

import asyncio
import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.numpy import save_file

import hotloop.integrations.slime as hooks
from hotloop.errors import InputError, SnapshotError
from hotloop.experiment.choices import Experiment
from hotloop.experiment.export.slime import PUBLISH_HOOK, REWARD_HOOK, build_environment
from hotloop.experiment.resolve import resolve
from hotloop.snapshots.bucket_access import open_bucket
from hotloop.snapshots.reader import SnapshotReader


def sample(response: str, label: Any, index: int = 0) -> SimpleNamespace:
    return SimpleNamespace(prompt="p", response=response, label=label, index=index, metadata={})


def export_reward(monkeypatch: pytest.MonkeyPatch, reward: dict[str, Any]) -> None:
    """Set the environment that the export writes."""
    env = build_environment(resolve(Experiment.model_validate({"reward": reward})))
    monkeypatch.setenv("HOTLOOP_REWARD", env["HOTLOOP_REWARD"])


def test_the_exported_names_are_these_functions() -> None:
    assert f"{hooks.__name__}.{hooks.score.__name__}" == REWARD_HOOK
    assert f"{hooks.__name__}.{hooks.publish_written.__name__}" == PUBLISH_HOOK
    assert inspect.iscoroutinefunction(hooks.score)
    assert list(inspect.signature(hooks.publish_written).parameters) == ["args", "version_dir", "rollout_engines"]


def test_the_exact_reward_scores_a_sample_and_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    export_reward(monkeypatch, {"kind": "exact"})
    assert asyncio.run(hooks.score(None, sample(" 12 ", "12"))) == 1.0
    assert asyncio.run(hooks.score(None, [sample("12", "12"), sample("13", "12", 1)])) == [1.0, 0.0]


def test_the_format_reward_keeps_its_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    export_reward(monkeypatch, {"kind": "format", "pattern": "<a>.*</a>"})
    assert asyncio.run(hooks.score(None, sample("<a>x</a>", None))) == 1.0
    assert asyncio.run(hooks.score(None, sample("x", None))) == 0.0


def test_a_user_s_function_sees_task_and_response(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "my_reward_module.py").write_text(
        "def score(task, response):\n    return len(response) + float(task.label) + len(task.metadata)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    export_reward(monkeypatch, {"kind": "python", "function": "my_reward_module.score"})
    one = SimpleNamespace(prompt="p", response="abc", label="0.5", index=7, metadata={"k": 1})
    assert asyncio.run(hooks.score(None, one)) == 4.5


def test_a_job_without_the_reward_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOTLOOP_REWARD", raising=False)
    with pytest.raises(InputError, match="reward_unset"):
        asyncio.run(hooks.score(None, sample("1", "1")))


def write_delta(folder: Path, version: int) -> Path:
    """Write a directory as slime's delta transport does, its payload left empty."""
    import numpy as np

    target = folder / f"weight_v{version:06d}"
    target.mkdir(parents=True)
    save_file({"w": np.zeros(3, dtype=np.uint8)}, target / "model-00001-of-00001.safetensors", {"w": "0" * 32})
    index = {
        "metadata": {
            "version": f"{version:06d}", "base_version": f"{version - 1:06d}", "delta_encoding": "xor",
            "compression_format": "zstd", "checksum_format": "xxh3-128",
        },
        "weight_map": {"w": "model-00001-of-00001.safetensors"},
    }  # fmt: skip
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    return target


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "bucket"
    folder.mkdir()
    monkeypatch.setenv("ROLLOUT_BUCKET", f"file://{folder}")
    monkeypatch.setenv("RANK", "0")
    return f"file://{folder}"


def test_a_written_delta_becomes_a_snapshot_that_a_reader_knows(tmp_path: Path, bucket: str) -> None:
    hooks.publish_written(None, str(write_delta(tmp_path / "w", 2)), [])
    info = SnapshotReader(open_bucket(bucket)).describe("weight_v000002")
    assert (info.kind, info.parent, info.policy_version) == ("delta", "weight_v000001", 2)  # type: ignore[union-attr]


def test_the_index_goes_last(tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    real = hooks.put_once

    def record(store: Any, key: str, payload: Any, **options: Any) -> bool:
        sent.append(key.rpartition("/")[2])
        return real(store, key, payload, **options)

    monkeypatch.setattr(hooks, "put_once", record)
    hooks.publish_written(None, str(write_delta(tmp_path / "w", 1)), [])
    assert sent == ["model-00001-of-00001.safetensors", "model.safetensors.index.json"]


def test_a_second_call_with_the_same_bytes_changes_nothing_and_other_bytes_are_refused(
    tmp_path: Path, bucket: str
) -> None:
    written = write_delta(tmp_path / "w", 1)
    hooks.publish_written(None, str(written), [])
    hooks.publish_written(None, str(written), [])
    (written / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(SnapshotError, match="identity_conflict"):
        hooks.publish_written(None, str(written), [])


def test_the_base_directory_and_other_ranks_publish_nothing(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks.publish_written(None, str(write_delta(tmp_path / "w", 1).parent), [])
    monkeypatch.setenv("RANK", "3")
    hooks.publish_written(None, str(tmp_path / "w" / "weight_v000001"), [])
    assert list((tmp_path / "bucket").iterdir()) == []


def test_a_job_without_a_bucket_says_so(tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLOUT_BUCKET")
    with pytest.raises(InputError, match="bucket_unset"):
        hooks.publish_written(None, str(write_delta(tmp_path / "w", 1)), [])
