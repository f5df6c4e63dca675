"""experiment.sh under stub programs: rows E01-E10, E13, L12, X04.4, X05.4 of the specification."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from export_rig import MODEL_ARGS, StubCluster, entry_words, render

from hotloop.experiment.catalog.load import load_catalog

FLASH = "scripts/models/glm4.7-30B-A3B.sh"
DEEPSEEK = "scripts/models/deepseek-v3.sh"
DELTA = {
    "layout": "separate",
    "transport": "delta",
    "weight_dir": "/shared/w",
    "local_weight_dir": "/nvme/w",
    "export": {"publish": "s3://bucket/run"},
}


def test_e01_prepare_downloads_model_and_math_data(tmp_path: Path) -> None:
    cluster = StubCluster(tmp_path, FLASH)
    done = cluster.run(render(), "prepare")
    assert done.returncode == 0, done.stderr
    assert [(call.program, call.argv) for call in cluster.calls()] == [
        ("huggingface-cli", ["download", "zai-org/GLM-4.7-Flash", "--local-dir", "/data/models/GLM-4.7-Flash"]),
        (
            "huggingface-cli",
            ["download", "--repo-type", "dataset", "zhuzilin/dapo-math-17k", "--local-dir", "/data/dapo-math-17k"],
        ),
    ]


def test_e01_prepare_uses_hf_where_the_old_name_is_gone(tmp_path: Path) -> None:
    cluster = StubCluster(tmp_path, FLASH)
    (cluster.bin / "huggingface-cli").unlink()
    assert cluster.run(render(), "prepare").returncode == 0
    assert [call.program for call in cluster.calls()] == ["hf", "hf"]


def test_e01_a_user_s_own_data_file_is_not_downloaded_over(tmp_path: Path) -> None:
    cluster = StubCluster(tmp_path, FLASH)
    done = cluster.run(render(data_path="/mine/prompts.jsonl"), "prepare")
    assert len(cluster.calls()) == 1
    assert "/mine/prompts.jsonl" in done.stdout


def test_e01_an_fp8_published_model_keeps_a_source_directory_and_is_cast_once(tmp_path: Path) -> None:
    cluster = StubCluster(tmp_path, DEEPSEEK)
    hf = tmp_path / "models" / "R1"
    script = render(model="deepseek", hf_path=str(hf))
    assert cluster.run(script, "prepare").returncode == 0
    python = cluster.calls_of("python")
    assert python[0] == [
        "tools/fp8_cast_bf16.py", "--input-fp8-hf-path", str(hf), "--output-bf16-hf-path", f"{hf}-BF16",
    ]  # fmt: skip
    assert python[1] == ["-", f"{hf}-BF16/config.json"]
    assert cluster.run(script, "prepare").returncode == 0
    assert len(cluster.calls_of("python")) == 2, "the second prepare casts nothing"


def test_e01_the_cast_drops_the_quantisation_block_for_real(tmp_path: Path) -> None:
    """Run the embedded Python with a real interpreter on a config that has the block."""
    cluster = StubCluster(tmp_path, DEEPSEEK)
    hf = tmp_path / "R1"
    bf16 = Path(f"{hf}-BF16")
    bf16.mkdir()
    (bf16 / "config.json").write_text(json.dumps({"hidden_size": 7168, "quantization_config": {"fmt": "e4m3"}}))
    python = cluster.bin / "python"
    python.write_text(f'#!/bin/bash\nif [[ $1 == - ]]; then exec "{cluster.environment["STUB_PYTHON"]}" "$@"; fi\n')
    done = cluster.run(render(model="deepseek", hf_path=str(hf)), "prepare")
    assert done.returncode == 0, done.stderr
    assert json.loads((bf16 / "config.json").read_text()) == {"hidden_size": 7168}


def test_e01_the_cast_refuses_a_path_that_the_tool_would_hand_to_a_shell(tmp_path: Path) -> None:
    cluster = StubCluster(tmp_path, DEEPSEEK)
    hostile = f"{tmp_path}/m; touch {tmp_path}/pwned"
    done = cluster.run(render(model="deepseek", hf_path=hostile), "prepare")
    assert done.returncode == 1
    assert "plain" in done.stderr or "letters" in done.stderr
    assert cluster.calls_of("python") == []
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (
            "fp8",
            "tools/convert_hf_to_fp8.py --model-dir {m} --save-dir {m}-FP8 --strategy block --block-size 128 128"
            " --max-workers 4",
        ),
        ("int4", "tools/convert_hf_to_int4_direct.py --model-dir {m} --save-dir {m}-INT4 --group-size 128"),
    ],
)
def test_e01_a_quantised_serving_copy_is_made_beside_the_bf16_one(
    tmp_path: Path, precision: str, expected: str
) -> None:
    cluster = StubCluster(tmp_path, FLASH)
    base = str(tmp_path / "GLM")
    script = render(precision=precision, hf_path=f"{base}-{precision.upper()}")
    assert cluster.run(script, "prepare").returncode == 0
    assert cluster.calls()[0].argv[-1] == base
    assert cluster.calls_of("python") == [expected.format(m=base).split()]


def test_e02_convert_runs_eight_processes_on_one_node(tmp_path: Path) -> None:
    cluster = StubCluster(tmp_path, FLASH)
    assert cluster.run(render(), "convert").returncode == 0
    assert cluster.calls_of("python") == [
        [
            "-m", "torch.distributed.run", "--nproc-per-node", "8", "tools/convert_hf_to_torch_dist.py", *MODEL_ARGS,
            "--hf-checkpoint", "/data/models/GLM-4.7-Flash", "--save", "/data/models/GLM-4.7-Flash_torch_dist",
        ]
    ]  # fmt: skip


def test_e02_convert_on_four_nodes_passes_rank_and_address(tmp_path: Path) -> None:
    cluster = StubCluster(tmp_path, DEEPSEEK)
    done = cluster.run(render(model="deepseek"), "convert", CONVERT_MASTER_ADDR="10.0.0.1", CONVERT_NODE_RANK="3")
    assert done.returncode == 0, done.stderr
    argv = cluster.calls_of("python")[0]
    assert argv[:12] == [
        "-m", "torch.distributed.run", "--nproc-per-node", "8", "--nnodes", "4", "--node-rank", "3",
        "--master-addr", "10.0.0.1", "--master-port", "12345",
    ]  # fmt: skip
    assert argv[-16:] == [
        "--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "8",
        "--expert-model-parallel-size", "4", "--expert-tensor-parallel-size", "1",
        "--decoder-first-pipeline-num-layers", "7", "--decoder-last-pipeline-num-layers", "6",
        "--hf-checkpoint", "/data/models/DeepSeek-R1-BF16", "--save", "/data/models/DeepSeek-R1_torch_dist",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"CONVERT_MASTER_ADDR": "10.0.0.1"},
        {"CONVERT_NODE_RANK": "0"},
        {"CONVERT_MASTER_ADDR": "10.0.0.1", "CONVERT_NODE_RANK": "4"},
        {"CONVERT_MASTER_ADDR": "10.0.0.1", "CONVERT_NODE_RANK": "-1"},
        {"CONVERT_MASTER_ADDR": "10.0.0.1", "CONVERT_NODE_RANK": "x"},
        {"CONVERT_MASTER_ADDR": "10.0.0.1", "CONVERT_NODE_RANK": "a[$(touch pwned)]"},
        {"CONVERT_MASTER_ADDR": "10.0.0.1", "CONVERT_NODE_RANK": "08"},
    ],
)
def test_e02_a_missing_or_wrong_rank_stops_with_a_message(tmp_path: Path, environment: dict[str, str]) -> None:
    cluster = StubCluster(tmp_path, DEEPSEEK)
    done = cluster.run(render(model="deepseek"), "convert", **environment)
    assert done.returncode == 1
    assert "CONVERT_" in done.stderr
    assert cluster.calls() == []
    assert not (cluster.slime / "pwned").exists()


def test_e02_the_converter_never_has_more_processes_than_layers() -> None:
    for model in load_catalog().models.values():
        world = model.convert.nodes * model.convert.processes_per_node
        assert world <= model.arch.layers, model.id


def test_e03_check_in_an_empty_directory_names_what_is_missing(tmp_path: Path) -> None:
    cluster = StubCluster(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    script = render(
        hf_path="m", train_path="t", data_path="d.jsonl", straw=True, straw_dir="/q", straw_declaration="decl.json"
    )
    done = cluster.run(script, "check", cwd=empty)
    assert done.returncode == 1
    for name in ("m/config.json", "t/latest_checkpointed_iteration.txt", "d.jsonl", "decl.json"):
        assert f": {name}\n" in done.stderr
    assert cluster.calls() == []
    assert list(empty.iterdir()) == []


def test_e03_check_passes_when_all_four_are_there_and_asks_for_nothing_else(tmp_path: Path) -> None:
    cluster = StubCluster(tmp_path)
    place = tmp_path / "place"
    (place / "m").mkdir(parents=True)
    (place / "t").mkdir()
    for name in ("m/config.json", "t/latest_checkpointed_iteration.txt", "d.jsonl", "decl.json"):
        (place / name).write_text("x")
    script = render(
        hf_path="m", train_path="t", data_path="d.jsonl", straw=True, straw_dir="/q", straw_declaration="decl.json"
    )
    assert cluster.run(script, "check", cwd=place).returncode == 0
    (place / "decl.json").unlink()
    assert cluster.run(script, "check", cwd=place).returncode == 1


def test_e03_a_slice_of_rows_is_not_part_of_the_file_s_name(tmp_path: Path) -> None:
    cluster = StubCluster(tmp_path, FLASH)
    script = render(data_path="/mine/d.jsonl@[0:100]", data={"slice": "[5:6]"})
    assert ": /mine/d.jsonl\n" in cluster.run(script, "check").stderr
    assert "--prompt-data '/mine/d.jsonl@[0:100]'" in script


def test_e03_without_straw_no_declaration_is_asked_for(tmp_path: Path) -> None:
    cluster = StubCluster(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "declaration" not in cluster.run(render(), "check", cwd=empty).stderr


def test_e04_train_submits_a_ray_job_with_an_explicit_runtime_environment(tmp_path: Path) -> None:
    cluster = StubCluster(tmp_path, FLASH)
    done = cluster.run(render(), "train")
    assert done.returncode == 0, done.stderr
    (argv,) = cluster.calls_of("ray")
    assert argv[:5] == ["job", "submit", "--address", "http://127.0.0.1:8265", "--runtime-env-json"]
    assert json.loads(argv[5]) == {
        "env_vars": {
            "PYTHONPATH": "/root/Megatron-LM",
            "PYTHONUNBUFFERED": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "NVSHMEM_DISABLE_NCCL": "1",
            "NCCL_NVLS_ENABLE": "0",
        }
    }
    assert argv[6] == "--"
    assert entry_words(argv)[: 2 + len(MODEL_ARGS)] == ["python3", "train.py", *MODEL_ARGS]


def test_e04_ray_dashboard_overrides_the_local_one(tmp_path: Path) -> None:
    cluster = StubCluster(tmp_path, FLASH)
    cluster.run(render(), "train", RAY_DASHBOARD="http://head:9999")
    assert cluster.calls_of("ray")[0][3] == "http://head:9999"


def test_e04_train_outside_a_slime_checkout_says_so(tmp_path: Path) -> None:
    cluster = StubCluster(tmp_path)
    done = cluster.run(render(), "train", cwd=tmp_path)
    assert done.returncode == 1
    assert "not a slime checkout" in done.stderr
    assert cluster.calls() == []


def test_e04_slime_dir_names_the_checkout(tmp_path: Path) -> None:
    cluster = StubCluster(tmp_path, FLASH)
    assert cluster.run(render(), "train", cwd=tmp_path, SLIME_DIR=str(cluster.slime)).returncode == 0
    assert len(cluster.calls_of("ray")) == 1


def test_e05_nothing_is_killed_and_no_ray_node_is_started(tmp_path: Path) -> None:
    cluster = StubCluster(tmp_path, FLASH)
    script = render(eval_mode="side", eval_data="/e.jsonl", precision="fp8", hf_path=str(tmp_path / "m-FP8"))
    for command in ("prepare", "convert", "check", "train", "evaluate"):
        cluster.run(script, command, RAY_DASHBOARD="http://other:8265")
    assert {call.program for call in cluster.calls()} == {"huggingface-cli", "python", "ray"}
    assert all(argv[:2] == ["job", "submit"] for argv in cluster.calls_of("ray"))
    words = script.split()
    assert not {"kill", "pkill", "killall"} & set(words)
    assert "ray start" not in script


PD = {"pd": True, "layout": "separate", "rollout_gpus": 16, "rdma_device": "mlx5_0", "hicache": True}


def test_e06_the_sglang_file_is_in_the_repository_root_and_removed_at_exit(tmp_path: Path) -> None:
    cluster = StubCluster(tmp_path, FLASH)
    (cluster.bin / "ray").write_text(
        '#!/bin/bash\nprev=\nfor word in "$@"; do\n'
        '  if [[ $prev == --sglang-config ]]; then printf "%s\\n" "$word" >"$HOME/where"; cp "$word" "$HOME/seen"; fi\n'
        "  prev=$word\ndone\n"
    )
    done = cluster.run(render(**PD), "train")
    assert done.returncode == 0, done.stderr
    where = Path((tmp_path / "where").read_text().strip())
    assert where.parent == cluster.slime
    assert where.name.startswith(".slime-lab.")
    assert not where.exists()
    assert sorted(path.name for path in cluster.slime.iterdir()) == ["scripts", "train.py", "train_async.py"]
    assert (tmp_path / "seen").read_text() == (
        "sglang:\n  - name: default\n    server_groups:\n"
        "      - worker_type: prefill\n        num_gpus: 8\n        num_gpus_per_engine: 8\n"
        "        overrides:\n          enable_hierarchical_cache: true\n          hicache_ratio: 2\n"
        "      - worker_type: decode\n        num_gpus: 8\n        num_gpus_per_engine: 8\n"
    )


def test_e06_the_file_is_removed_when_the_job_fails(tmp_path: Path) -> None:
    cluster = StubCluster(tmp_path, FLASH)
    (cluster.bin / "ray").write_text("#!/bin/bash\nexit 7\n")
    assert cluster.run(render(**PD), "train").returncode == 7
    assert not list(cluster.slime.glob(".slime-lab.*"))


def test_e06_without_pd_no_file_is_written(tmp_path: Path) -> None:
    assert "--sglang-config" not in render(hicache=True)
    assert "--sglang-enable-hierarchical-cache" in render(hicache=True)


def test_e08_a_short_run_saves_every_twenty_rounds_and_with_straw_every_round() -> None:
    assert "--num-rollout 3\n" in render()
    assert "--save-interval 20\n" in render()
    assert "--save-interval 1\n" in render(straw=True, straw_dir="/q", straw_run_id="r", straw_declaration="/d")


def test_e09_load_is_written_only_for_a_resume() -> None:
    assert "--load" not in render()
    assert "--load '/old/run'\n" in render(resume_from="/old/run")


def test_e09_more_rounds_are_counted_from_the_tracker_when_the_job_starts(tmp_path: Path) -> None:
    cluster = StubCluster(tmp_path, FLASH)
    old = tmp_path / "old"
    old.mkdir()
    (old / "latest_checkpointed_iteration.txt").write_text("39\n")
    script = render(resume_from=str(old), rounds_more=10)
    assert cluster.run(script, "train").returncode == 0
    assert entry_words(cluster.calls_of("ray")[0])[-2:] == ["--num-rollout", "50"]
    (old / "latest_checkpointed_iteration.txt").write_text("release")
    done = cluster.run(script, "train")
    assert done.returncode == 1
    assert "release" in done.stderr


def test_e10_inline_evaluation_is_written_for_sync_only() -> None:
    inline = {"eval_mode": "inline", "eval_data": "/e.jsonl"}
    expected = "--eval-interval 20\n  --eval-prompt-data 'aime' '/e.jsonl'\n  --n-samples-per-eval-prompt 8\n"
    assert expected in render(**inline)
    assert "--eval-prompt-data" not in render(**inline, layout="separate", schedule="async")


def test_x05_4_async_with_side_evaluation_has_a_second_command_and_no_inline_flags(tmp_path: Path) -> None:
    cluster = StubCluster(tmp_path, FLASH)
    script = render(
        layout="separate", schedule="async", eval_mode="side", eval_data="/e.jsonl", eval_samples=4, save_path="/s"
    )
    assert cluster.run(script, "train").returncode == 0
    assert cluster.run(script, "evaluate", RAY_DASHBOARD="http://other:8265").returncode == 0
    train, side = (entry_words(argv) for argv in cluster.calls_of("ray"))
    assert not [word for word in train if word.startswith("--eval")]
    assert train[:2] == ["python3", "train.py"]
    assert side[side.index("--num-rollout") + 1] == "0"
    assert side[side.index("--eval-interval") + 1] == "1"
    assert side[side.index("--eval-prompt-data") + 1 : side.index("--eval-prompt-data") + 3] == ["aime", "/e.jsonl"]
    assert side[side.index("--n-samples-per-eval-prompt") + 1] == "4"
    assert side[side.index("--load") + 1] == "/s"
    assert "--rollout-function-path" not in side
    assert "--colocate" in side
    assert not [word for word in side if word.startswith("--save")]


def test_x05_4_the_side_job_never_goes_to_the_training_cluster_by_default(tmp_path: Path) -> None:
    cluster = StubCluster(tmp_path, FLASH)
    done = cluster.run(render(eval_mode="side", eval_data="/e.jsonl"), "evaluate")
    assert done.returncode == 1
    assert "RAY_DASHBOARD" in done.stderr
    assert cluster.calls() == []


def test_x05_4_the_side_job_of_a_disaggregated_run_is_one_plain_colocated_pool(tmp_path: Path) -> None:
    cluster = StubCluster(tmp_path, FLASH)
    script = render(eval_mode="side", eval_data="/e.jsonl", partial=True, mask_prefix=True, **PD)
    assert cluster.run(script, "evaluate", RAY_DASHBOARD="http://other:8265").returncode == 0
    side = entry_words(cluster.calls_of("ray")[0])
    assert "--sglang-config" not in side
    assert not [word for word in side if "disaggregation" in word or "partial" in word]
    assert "--colocate" in side


def test_x05_4_without_side_evaluation_the_second_command_is_unknown(tmp_path: Path) -> None:
    cluster = StubCluster(tmp_path, FLASH)
    assert cluster.run(render(), "evaluate").returncode == 2


def test_x04_4_the_staleness_bound_is_a_comment_and_no_flag() -> None:
    script = render(layout="separate", schedule="async", max_staleness=2)
    comments = [line for line in script.splitlines() if line.startswith("#")]
    assert any("Staleness bound: 2 versions" in line for line in comments)
    without = render(layout="separate", schedule="async")
    assert [line for line in script.splitlines() if "staleness" not in line.lower()] == without.splitlines()


def test_e13_delta_transport_with_publish_has_the_hook_the_bucket_and_the_commands(tmp_path: Path) -> None:
    cluster = StubCluster(tmp_path, FLASH)
    script = render(**DELTA)
    cluster.run(script, "train")
    argv = cluster.calls_of("ray")[0]
    words = entry_words(argv)
    hook = words[words.index("--custom-update-weight-post-write-path") + 1]
    assert hook == "hotloop.integrations.slime.publish_written"
    assert json.loads(argv[5])["env_vars"]["ROLLOUT_BUCKET"] == "s3://bucket/run"
    assert "# " in script and "hotloop publish full" in script
    assert "--identity weight_v000000 --policy-version 0 --startup" in script


def test_e13_without_publish_there_is_no_hook() -> None:
    script = render(**{**DELTA, "export": {}})
    assert "post-write" not in script
    assert "ROLLOUT_BUCKET" not in script
    assert "hotloop publish" not in script


@pytest.mark.parametrize("argv", [[], ["bogus"], ["train", "check"], ["--train"]])
def test_an_unknown_subcommand_prints_the_usage_and_exits_2(tmp_path: Path, argv: list[str]) -> None:
    done = StubCluster(tmp_path, FLASH).run(render(), *argv)
    assert done.returncode == 2
    assert "usage: experiment.sh prepare | convert | check | train" in done.stderr


def test_the_script_starts_as_the_specification_says() -> None:
    lines = render().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    first_code = next(line for line in lines[1:] if not line.startswith("#"))
    assert first_code == "set -euo pipefail"
    assert any("624b824a898ab0ec1fcb4d373004c7f3852bf515" in line for line in lines[:6])


def test_the_header_names_the_flags_that_624b824a_does_not_have() -> None:
    script = render(sc=True, straw=True, straw_dir="/q", straw_run_id="r", straw_declaration="/d")
    (line,) = [line for line in script.splitlines() if "Not verified at slime 624b824a" in line]
    for flag in (
        "--use-score-centering", "--score-centering-top-k", "--pg-loss-type", "--rollout-data-dir",
        "--rollout-queue-run-id", "--rollout-storage-profile", "--rollout-storage-declaration",
        "--rollout-data-transport straw",
    ):  # fmt: skip
        assert flag in line
    assert "Not verified" not in render()


def test_same_choices_give_the_same_bytes() -> None:
    assert render(model="deepseek", pd=True) == render(model="deepseek", pd=True)


def test_every_array_of_the_script_is_passed_to_train(tmp_path: Path) -> None:
    script = render(eval_mode="inline", eval_data="/e", export={"slime_args": ["--log-passrate"]}, **PD)
    arrays = [line[:-2] for line in script.splitlines() if line.endswith("_ARGS=(")]
    call = script[script.index("  local words=(") : script.index("ray job submit")]
    for name in arrays:
        assert name == "CONVERT_ARGS" or f'"${{{name}[@]}}"' in call


def test_bash_accepts_the_default_script(tmp_path: Path) -> None:
    path = tmp_path / "experiment.sh"
    path.write_text(render())
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
