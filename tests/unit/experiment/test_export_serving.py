"""E07: serving-reference.sh starts the engine that slime would start, without slime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from export_rig import StubCluster, render_serving

from hotloop.experiment.flags import load_flags


def received(tmp_path: Path, environment: dict[str, str] | None = None, **choices: Any) -> list[str]:
    """Run the script under stubs and return what `python3` got."""
    cluster = StubCluster(tmp_path)
    done = cluster.run(render_serving(**choices), **(environment or {}))
    assert done.returncode == 0, done.stderr
    (argv,) = cluster.calls_of("python3")
    return argv


def test_e07_the_default_engine_has_exactly_these_flags(tmp_path: Path) -> None:
    assert received(tmp_path) == [
        "-m", "sglang.launch_server", "--model-path", "/data/models/GLM-4.7-Flash", "--tp-size", "8",
        "--trust-remote-code", "--mem-fraction-static", "0.7", "--enable-dp-attention", "--dp-size", "8",
        "--enable-dp-lm-head", "--moe-dense-tp-size", "1", "--host", "0.0.0.0", "--port", "30000",
    ]  # fmt: skip


def test_e07_host_and_port_are_settings(tmp_path: Path) -> None:
    argv = received(tmp_path, {"SERVE_HOST": "127.0.0.1", "SERVE_PORT": "31000"})
    assert argv[-4:] == ["--host", "127.0.0.1", "--port", "31000"]


def test_e07_r3_asks_for_routed_experts_without_the_prefix(tmp_path: Path) -> None:
    assert "--enable-return-routed-experts" in received(tmp_path / "on", r3=True)
    assert "--enable-return-routed-experts" not in received(tmp_path / "off")


def test_e07_what_belongs_to_slime_or_its_patch_is_left_out(tmp_path: Path) -> None:
    left_out = {"--" + name.removeprefix("--sglang-") for name in load_flags().not_in_serving}
    extra = {"slime_args": ["--sglang-release-hicache", "--sglang-router-port", "1"]}
    argv = received(tmp_path, pd=True, rdma_device="d", layout="separate", rollout_gpus=16, export=extra)
    assert not left_out & set(argv)
    assert "--disaggregation-ib-device" not in argv, "one regular engine has no peer"


def test_e07_slime_args_of_the_server_are_written_and_the_last_one_counts(tmp_path: Path) -> None:
    argv = received(tmp_path, export={"slime_args": ["--sglang-mem-fraction-static", "0.6"]})
    assert argv.count("--mem-fraction-static") == 1
    assert argv[argv.index("--mem-fraction-static") + 1] == "0.6"


def test_e07_an_engine_over_several_nodes_takes_rank_and_address(tmp_path: Path) -> None:
    environment = {"SERVE_MASTER_ADDR": "10.0.0.1:5000", "SERVE_NODE_RANK": "7"}
    argv = received(tmp_path, environment, model="deepseek")
    assert argv[-6:] == ["--nnodes", "8", "--node-rank", "7", "--dist-init-addr", "10.0.0.1:5000"]
    assert argv[argv.index("--tp-size") + 1] == "64"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SERVE_MASTER_ADDR": "a:1"},
        {"SERVE_MASTER_ADDR": "a:1", "SERVE_NODE_RANK": "8"},
        {"SERVE_MASTER_ADDR": "a:1", "SERVE_NODE_RANK": "x[$(touch pwned)]"},
        {"SERVE_NODE_RANK": "0"},
    ],
)
def test_e07_a_wrong_rank_or_a_missing_address_stops_with_a_message(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    cluster = StubCluster(tmp_path)
    done = cluster.run(render_serving(model="deepseek"), **environment)
    assert done.returncode == 1
    assert "SERVE_" in done.stderr
    assert cluster.calls() == []
    assert not (cluster.slime / "pwned").exists()


def test_e07_old_names_are_listed_with_their_new_ones() -> None:
    comments = [line for line in render_serving(model="glm5").splitlines() if line.startswith("#")]
    assert any("--nsa-prefill-backend -> --dsa-prefill-backend" in line for line in comments)
    assert any("--nsa-decode-backend -> --dsa-decode-backend" in line for line in comments)
    assert not [line for line in render_serving().splitlines() if " -> " in line]


def test_e07_pipeline_stages_of_the_engine_divide_its_tensor_parallel_size(tmp_path: Path) -> None:
    argv = received(tmp_path, model="dense", export={"slime_args": ["--sglang-pp-size", "2"]})
    assert argv[argv.index("--tp-size") + 1] == "1"


def test_more_words_of_the_operator_are_passed_on(tmp_path: Path) -> None:
    cluster = StubCluster(tmp_path)
    cluster.run(render_serving(), "--log-level", "debug")
    assert cluster.calls_of("python3")[0][-2:] == ["--log-level", "debug"]
