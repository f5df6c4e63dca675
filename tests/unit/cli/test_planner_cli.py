"""The planner's commands, called as a user calls them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from hotloop.cli.main import main
from hotloop.experiment.choices import Experiment
from hotloop.experiment.share import encode_experiment

PLAN_KEYS = ["gpus", "layout", "memory", "verdict", "errors", "notes", "repairs", "estimates", "resume", "launch"]


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


def hotloop(*argv: str) -> Done:
    """Run a command in this process, from the parsing of its words to its exit code."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main(list(argv))
    code = ended.value.code
    return Done(code if isinstance(code, int) else 0, out.getvalue(), err.getvalue())


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    path = tmp_path / "broken.toml"
    path.write_text('model = "glm47"\nnodes = 3\n')
    return path


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    path = tmp_path / "sound.toml"
    path.write_text('model = "dense"\nrounds = 40\n')
    return path


def test_plan_json_has_the_promised_keys(sound: Path) -> None:
    argv = [sys.executable, "-m", "hotloop.cli.main", "plan", str(sound), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert set(PLAN_KEYS) <= set(plan)
    assert set(plan["memory"][0]) == {"phase", "where", "item", "bytes", "formula"}
    assert plan["gpus"]["train"] == 8
    assert plan["launch"][-1]["command"] == "bash experiment.sh train"


def test_plan_json_of_errors_has_code_message_and_fields(broken: Path) -> None:
    plan = json.loads(hotloop("plan", str(broken), "--json").stdout)
    assert {"code", "message", "fields"} == set(plan["errors"][0])
    assert "train_grid" in {error["code"] for error in plan["errors"]}


def test_plan_draws_layout_memory_and_findings(broken: Path) -> None:
    done = hotloop("plan", "--preset", "scale")
    assert done.returncode == 0, done.stderr
    assert "nodes 32..39   P P P P P P P P" in done.stdout
    assert "layers by stage: 14 + 8 + 8 + 8 + 8 + 8 + 8 + 16" in done.stdout
    assert "Memory (estimate, worst GPU)" in done.stdout
    assert "[pd_device]" in done.stdout
    assert "guaranteed" not in done.stdout
    assert "the sizes do not divide" in hotloop("plan", str(broken)).stdout


def test_plan_shows_user_text_as_text(tmp_path: Path) -> None:
    done = hotloop("plan", "--set", "save_path=/[bold]x[/bold]/[red]")
    assert done.returncode == 0, done.stderr
    assert "/[bold]x[/bold]/[red]" in done.stdout


def test_check_exits_2_with_errors_and_0_with_notes_only(broken: Path, sound: Path) -> None:
    failed = hotloop("check", str(broken))
    assert failed.returncode == 2
    assert "[train_grid]" in failed.stderr
    fine = hotloop("check", str(sound))
    assert fine.returncode == 0
    assert "note:" in fine.stdout
    assert "no errors" in fine.stdout


def test_check_compares_a_checkpoint_s_config(tmp_path: Path, sound: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"hidden_size": 4096}')
    assert hotloop("check", str(sound), "--hf-config", str(config)).returncode == 0
    config.write_text('{"hidden_size": 1}')
    done = hotloop("check", str(sound), "--hf-config", str(config), "--json")
    assert done.returncode == 2
    assert [error["code"] for error in json.loads(done.stdout)["errors"]] == ["hf_config"]


def test_export_writes_three_files_that_are_the_same_again(tmp_path: Path, sound: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for out in (first, second):
        done = hotloop("export", str(sound), "--out", str(out))
        assert done.returncode == 0, done.stderr
    names = ["experiment.json", "experiment.sh", "serving-reference.sh"]
    assert sorted(path.name for path in first.iterdir()) == names
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)
    assert os.access(first / "experiment.sh", os.X_OK)
    assert subprocess.run(["bash", "-n", str(first / "experiment.sh")], check=False).returncode == 0


def test_export_with_errors_writes_the_json_only_and_exits_2(tmp_path: Path, broken: Path) -> None:
    done = hotloop("export", str(broken), "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["experiment.json"]
    assert "[train_grid]" in done.stderr


def test_export_leaves_no_script_of_an_earlier_export_beside_a_blocked_one(
    tmp_path: Path, sound: Path, broken: Path
) -> None:
    out = tmp_path / "out"
    hotloop("export", str(sound), "--out", str(out))
    done = hotloop("export", str(broken), "--out", str(out))
    assert done.returncode == 2
    assert [path.name for path in out.iterdir()] == ["experiment.json"]
    assert "removed" in done.stdout


def test_export_target_chooses_the_driver(tmp_path: Path) -> None:
    settings = ["--set", "layout=separate", "--set", "schedule=async"]
    for target, driver in (("v0.4.0", "train.py"), ("624b824a", "train_async.py")):
        out = tmp_path / target
        done = hotloop("export", *settings, "--target", target, "--out", str(out))
        assert done.returncode == 0, done.stderr
        assert f"words=(\n    python3 {driver}\n" in (out / "experiment.sh").read_text()


def test_export_refuses_score_centering_for_the_older_target(tmp_path: Path) -> None:
    done = hotloop("export", "--set", "sc=true", "--target", "624b824a", "--out", str(tmp_path / "o"))
    assert done.returncode == 2
    assert "[not_in_target]" in done.stderr


def test_export_refuses_slime_args_that_no_parser_knows(tmp_path: Path) -> None:
    done = hotloop("export", "--set", 'export.slime_args=["--bogus"]', "--out", str(tmp_path / "o"))
    assert done.returncode == 2
    assert "--bogus" in done.stderr
    assert "[unknown_flag]" in done.stderr


def test_export_names_slime_scripts_that_differ(tmp_path: Path, sound: Path) -> None:
    done = hotloop("export", str(sound), "--out", str(tmp_path / "o"), "--slime-dir", str(tmp_path))
    assert done.returncode == 0
    assert "scripts/models/glm4-9B.sh differs" in done.stderr


def test_compare_shows_differences_and_both_outcomes(broken: Path, sound: Path) -> None:
    done = hotloop("compare", str(broken), str(sound), "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {"field": "model", "a": "glm47", "b": "dense", "is_followed": False} in report["differences"]
    assert "train_grid" in report["a"]["errors"]
    assert report["b"]["errors"] == []
    page = hotloop("compare", str(broken), str(sound))
    assert "rollout memory" in page.stdout


def test_link_and_back(tmp_path: Path) -> None:
    path = tmp_path / "e.toml"
    path.write_text('model = "glm5"\nhf_path = "/secret"\n')
    link = hotloop("link", str(path)).stdout.strip()
    assert link.endswith("#" + encode_experiment(Experiment(model="glm5")))
    back = json.loads(hotloop("link", link).stdout)
    assert back["choices"]["model"] == "glm5"
    assert back["choices"]["hf_path"] is None
    mine = tmp_path / "mine.toml"
    mine.write_text('hf_path = "/mine"\n')
    kept = json.loads(hotloop("link", link, "--mine", str(mine)).stdout)
    assert kept["choices"]["hf_path"] == "/mine"


def test_an_a_b_link_holds_both(broken: Path, sound: Path) -> None:
    link = hotloop("link", str(sound), "--compare", str(broken)).stdout.strip()
    assert "#compare=" in link
    back = json.loads(hotloop("link", link).stdout)
    assert (back["choices"]["model"], back["reference"]["model"]) == ("dense", "glm47")


def test_a_link_points_where_the_lab_listens(tmp_path: Path) -> None:
    from hotloop.cli.lab import command as lab

    port = next(option.default for option in lab.params if option.name == "port")
    path = tmp_path / "experiment.json"
    path.write_text("{}")
    assert hotloop("link", str(path)).stdout.startswith(f"http://127.0.0.1:{port}/#")


@pytest.mark.parametrize("source", ["", "http://x/", "http://x/#", "http://x/#other=1"])
def test_what_is_no_link_and_no_file_is_called_a_bad_link(source: str) -> None:
    done = hotloop("link", source)
    assert done.returncode == 2
    assert "[bad_link]" in done.stderr


def test_a_broken_link_says_so() -> None:
    done = hotloop("link", "http://x/#experiment=%%%")
    assert done.returncode == 2
    assert "[bad_link]" in done.stderr


def test_repair_lists_without_applying_and_applies_one(broken: Path, tmp_path: Path) -> None:
    before = broken.read_text()
    listed = hotloop("repair", str(broken))
    assert listed.returncode == 0, listed.stderr
    assert "train_grid 1: train on 8 nodes" in listed.stdout
    assert broken.read_text() == before
    out = tmp_path / "repaired.json"
    done = hotloop("repair", str(broken), "--apply", "train_grid", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "nodes: 3 -> 8" in done.stderr
    assert hotloop("check", str(out)).returncode == 0


def test_repair_of_an_error_that_is_not_there_names_those_that_are(broken: Path) -> None:
    done = hotloop("repair", str(broken), "--apply", "memory")
    assert done.returncode == 2
    assert "[no_repair]" in done.stderr
    assert "train_grid" in done.stderr


def test_resume_plan_reads_the_tracker(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("39")
    settings = ["--set", f"resume_from={tmp_path}", "--set", "rounds=100"]
    done = hotloop("resume-plan", *settings, "--json")
    assert done.returncode == 0, done.stderr
    resume = json.loads(done.stdout)["resume"]
    assert (resume["first_round"], resume["rounds_to_run"], resume["saves"]) == (40, 60, [59, 79, 99])
    assert "resume at round 40: 60 of 100 rounds left" in hotloop("resume-plan", *settings).stdout


def test_resume_plan_that_runs_nothing_exits_2_with_the_corrected_value() -> None:
    done = hotloop("resume-plan", "--latest", "2", "--set", "rounds=3")
    assert done.returncode == 2
    assert "[resume_runs_nothing]" in done.stderr
    assert "4" in done.stderr


def test_resume_plan_of_a_folder_that_is_elsewhere_asks_for_the_iteration() -> None:
    done = hotloop("resume-plan", "--set", "resume_from=/nowhere")
    assert done.returncode == 2
    assert "[resume_unread]" in done.stderr


def test_catalog_lists_and_adds_a_model_that_plans(tmp_path: Path) -> None:
    listed = hotloop("catalog")
    assert listed.returncode == 0, listed.stderr
    assert "GLM-4.7-Flash" in listed.stdout
    assert "h100" in listed.stdout
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024,
                "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
                "num_key_value_heads": 8, "head_dim": 128,
                "vocab_size": 151936, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
            }
        )
    )  # fmt: skip
    out = tmp_path / "more.toml"
    argv = ["catalog", "add", str(config), "--name", "mine", "--repo", "me/Mine", "--out", str(out)]
    argv += ["--model-script", "scripts/models/qwen3-0.6B.sh"]
    done = hotloop(*argv)
    assert done.returncode == 0, done.stderr
    planned = hotloop("check", "--set", "model=mine", "--catalog", str(out))
    assert planned.returncode == 0, planned.stderr
    again = hotloop(*argv)
    assert again.returncode == 2
    assert "already in the catalogue" in again.stderr


def test_schema_is_json() -> None:
    done = hotloop("schema")
    assert "properties" in json.loads(done.stdout)


def test_a_file_and_a_preset_together_are_refused(sound: Path) -> None:
    done = hotloop("plan", str(sound), "--preset", "scale")
    assert done.returncode == 2
    assert "[two_inputs]" in done.stderr


def test_the_host_memory_of_a_node_is_an_option(tmp_path: Path) -> None:
    def host_of(*words: str) -> dict[str, object]:
        plan = json.loads(hotloop("plan", "--set", "model=deepseek", "--json", *words).stdout)
        host: dict[str, object] = next(total for total in plan["memory_totals"] if total["phase"] == "host")
        return {**host, "errors": [error["code"] for error in plan["errors"]]}

    usual, small = host_of(), host_of("--host-ram", "500")
    assert usual["capacity_bytes"] == 1_500 * 10**9 and usual["errors"] == []
    assert small["capacity_bytes"] == 500 * 10**9 and small["errors"] == ["memory"] and small["verdict"] == "over"
    assert small["bytes"] == usual["bytes"]
    exact = str(int(str(usual["bytes"])) / 10**9)
    assert host_of("--host-ram", exact)["errors"] == []


@pytest.mark.parametrize(("command", "says"), [("check", "[memory]"), ("repair", "memory: "), ("export", "[memory]")])
def test_every_verdict_on_memory_takes_the_same_host(command: str, says: str, tmp_path: Path) -> None:
    words = ["--set", "model=deepseek", *(["--out", str(tmp_path / "out")] if command == "export" else [])]
    small, usual = hotloop(command, *words, "--host-ram", "500"), hotloop(command, *words)
    assert says in small.stdout + small.stderr and says not in usual.stdout + usual.stderr
    assert usual.returncode == 0 and small.returncode == (0 if command == "repair" else 2)


def test_a_node_without_host_memory_is_refused() -> None:
    done = hotloop("plan", "--host-ram", "0")
    assert done.returncode == 2 and "--host-ram" in done.stderr


def test_the_planner_works_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys, runpy\n"
        "for name in ('torch', 'transformers', 'safetensors', 'aiohttp', 'starlette', 'numpy'):\n"
        "    sys.modules[name] = None\n"
        f"sys.argv = ['hotloop', 'export', '--out', {str(tmp_path)!r}]\n"
        "runpy.run_module('hotloop.cli.main', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_what_a_file_holds_is_never_obeyed_by_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "experiment.json"
    path.write_text(json.dumps({"hf_path": "/a\x1b]0;title\x07b\x9b31m"}))
    done = hotloop("plan", str(path))
    assert not {"\x1b", "\x07", "\x9b"} & set(done.stdout + done.stderr)


@pytest.mark.parametrize("text", ['{"a": ' * 100_000, '{"hidden_size": 1, "hidden_size": 2}', "{", "\xff", "[]"])
@pytest.mark.parametrize("command", ["check", "catalog"])
def test_a_config_that_cannot_be_read_is_bad_input(tmp_path: Path, command: str, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("latin-1"))
    add = ["catalog", "add", str(path), "--name", "x", "--repo", "a/b", "--out", str(tmp_path / "c.toml")]
    done = hotloop(*(["check", "--hf-config", str(path)] if command == "check" else add))
    assert done.returncode == 2
    assert "[bad_json]" in done.stderr or "[duplicate_key]" in done.stderr


def test_a_config_with_nothing_to_compare_is_no_agreement(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "qwen3"}')
    done = hotloop("check", "--hf-config", str(path))
    assert done.returncode == 2
    assert "holds none of the values that are compared" in done.stdout + done.stderr
