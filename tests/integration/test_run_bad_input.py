"""Bad input of `hotloop run`: one clear error, the right exit code, and nothing half-written."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import RunCommand

QUICK = [
    "--set=rounds=2",
    "--set=sampling.num_groups=2",
    "--set=sampling.group_size=2",
    "--set=eval_mode=off",
    "--set=laptop.warmup_accuracy=0",
]
REWARDS = """
from hotloop.types import Score
def none(task, response): return None
def nan(task, response): return float("nan")
def fails(task, response): raise KeyError("gone")
def leaves(task, response): raise SystemExit(0)
def huge(task, response): return 1e38 * (1 + hash(response) % 5)
async def late(task, response): return float(len(response) % 2)
"""


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad_input_rewards.py").write_text(REWARDS)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "code", "shown"),
    [
        (["nope.toml"], 2, "[file_not_found]"),
        (["--set=rounds=many"], 2, "[wrong_type]"),
        (["--set=sampling.temprature=1"], 2, "Did you mean sampling.temperature?"),
        (["--set=laptop.task=", "--set=data_path=none.jsonl"], 2, "[data_not_found]"),
        (["--set=laptop.task=sudoku"], 2, "[unknown_task]"),
        (["--set=laptop.policy=nowhere"], 2, "[policy_not_found]"),
        (["--set=reward.kind=python", "--set=reward.function=bad_input_rewards.missing"], 2, "[function_not_found]"),
        (["--set=schedule=async"], 2, "[not_yet_supported]"),
        (["--resume", "nowhere"], 2, "[not_a_run]"),
        (["--resume", "nowhere", "--out", "x"], 2, "[bad_setting]"),
        (["--set=reward.kind=python", "--set=reward.function=bad_input_rewards.none"], 1, "[reward_invalid]"),
        (["--set=reward.kind=python", "--set=reward.function=bad_input_rewards.nan"], 1, "[reward_invalid]"),
        (["--set=reward.kind=python", "--set=reward.function=bad_input_rewards.fails"], 1, "[reward_raised]"),
        (["--set=reward.kind=python", "--set=reward.function=bad_input_rewards.leaves"], 1, "[reward_raised]"),
    ],
)
def test_one_clear_error(hotloop: RunCommand, workplace: Path, arguments: list[str], code: int, shown: str) -> None:
    out = [] if "--resume" in arguments else ["--out", "run", *QUICK]
    outcome = hotloop("run", *out, *arguments)
    assert outcome.code == code, outcome.err
    assert shown in outcome.err and outcome.err.startswith("error: ")
    assert "Traceback" not in outcome.err
    assert not list(workplace.glob("run/checkpoints/*")), "nothing was finished, so nothing is saved"


def test_a_run_that_was_refused_leaves_its_folder_for_the_corrected_one(hotloop: RunCommand, workplace: Path) -> None:
    (workplace / "broken").mkdir()
    (workplace / "broken" / "config.json").write_text("{")
    for wrong in (
        ["--set=reward.kind=python", "--set=reward.function=bad_input_rewards.missing"],
        ["--set=laptop.policy=nowhere"],
        ["--set=laptop.policy=broken"],
    ):
        outcome = hotloop("run", "--out", "run", *QUICK, *wrong)
        assert outcome.code == 2, outcome.err
        assert not (workplace / "run").exists()
    assert "[policy_config]" in outcome.err and "broken/config.json" in outcome.err
    assert hotloop("run", "--out", "run", *QUICK).code == 0


def test_a_resumed_run_keeps_its_policy(hotloop: RunCommand, workplace: Path) -> None:
    assert hotloop("run", "--out", "run", *QUICK).code == 0
    before = (workplace / "run" / "experiment.json").read_bytes()
    outcome = hotloop("run", "--resume", "run", "--set=rounds=3", "--set=laptop.policy=moe")
    assert outcome.code == 2 and "[resume_policy]" in outcome.err
    assert (workplace / "run" / "experiment.json").read_bytes() == before


@pytest.mark.parametrize("output", ["| head -n 1", ">&-", "> /dev/full"])
def test_a_run_whose_output_is_gone_finishes_and_saves(workplace: Path, output: str) -> None:
    command = f"set -o pipefail; {sys.executable} -m hotloop.cli.main run --out run {' '.join(QUICK)} {output}"
    done = subprocess.run(["bash", "-c", command], cwd=workplace, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert done.returncode == 0, done.stderr
    assert json.loads((workplace / "run" / "summary.json").read_text())["rounds"] == 2


@pytest.mark.parametrize("disposition", ["SIG_DFL", "SIG_IGN"])
def test_a_closed_terminal_saves_the_run_unless_it_was_told_to_stay(workplace: Path, disposition: str) -> None:
    """SIG_IGN is what `nohup` leaves to its child: the signal is then no end of the run."""
    quick = [each for each in QUICK if "rounds" not in each]
    start = f"import os, signal, sys; signal.signal(signal.SIGHUP, signal.{disposition}); "
    start += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    hotloop = ["-m", "hotloop.cli.main", "run", "--out", "run", *quick, "--set=rounds=100000"]
    command = [sys.executable, "-c", start, *hotloop]
    metrics = workplace / "run" / "metrics.jsonl"
    run = subprocess.Popen(command, cwd=workplace, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_for_growth(run, metrics, 0)
        run.send_signal(signal.SIGHUP)
        if disposition == "SIG_IGN":
            wait_for_growth(run, metrics, metrics.stat().st_size)
            run.send_signal(signal.SIGTERM)
        _, said = run.communicate(timeout=120)
    finally:
        run.kill()
    assert run.returncode == 130, said
    assert "interrupted; saved after round" in said
    assert list((workplace / "run" / "checkpoints").glob("iter_*"))


def wait_for_growth(run: subprocess.Popen[str], file: Path, size: int) -> None:
    """Wait until a file is larger than `size` bytes."""
    while not (file.is_file() and file.stat().st_size > size):
        assert run.poll() is None, "the run ended"
        time.sleep(0.05)


def test_malformed_rows_are_named_before_a_run_folder_exists(hotloop: RunCommand, workplace: Path) -> None:
    (workplace / "rows.jsonl").write_text('{"prompt": "s1="}\nnope\n{"label": "1"}\n')
    outcome = hotloop("run", "--out", "run", *QUICK, "--set=laptop.task=", "--set=data_path=rows.jsonl")
    assert outcome.code == 2
    assert "rows.jsonl:2: is not a JSON object" in outcome.err and "rows.jsonl:3: has no key 'prompt'" in outcome.err
    assert not (workplace / "run").exists()


def test_prompts_that_do_not_fit_are_named(hotloop: RunCommand, workplace: Path) -> None:
    rows = [{"prompt": "1" * length, "label": "1"} for length in (5, 511, 600)]
    (workplace / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    outcome = hotloop("run", "--out", "run", *QUICK, "--set=laptop.task=", "--set=data_path=rows.jsonl")
    assert outcome.code == 2
    assert [line for line in outcome.err.splitlines() if "[prompt_too_long]" in line] == outcome.err.splitlines()
    assert "rows.jsonl:2" in outcome.err and "rows.jsonl:3" in outcome.err and "rows.jsonl:1:" not in outcome.err


def test_a_used_folder_is_refused_and_left_alone(hotloop: RunCommand, workplace: Path) -> None:
    assert hotloop("run", "--out", "run", *QUICK).code == 0
    before = sorted(str(path) for path in (workplace / "run").rglob("*"))
    outcome = hotloop("run", "--out", "run", *QUICK)
    assert outcome.code == 2 and "[run_folder_used]" in outcome.err and "--resume run" in outcome.err
    assert sorted(str(path) for path in (workplace / "run").rglob("*")) == before


def test_a_tokenizer_larger_than_the_embedding_is_refused(hotloop: RunCommand, workplace: Path) -> None:
    assert hotloop("run", "--out", "first", *QUICK).code == 0
    shutil.copytree(workplace / "first" / "policy", workplace / "policy")
    tokenizer = json.loads((workplace / "policy" / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["~"] = 40
    (workplace / "policy" / "tokenizer.json").write_text(json.dumps(tokenizer))
    outcome = hotloop("run", "--out", "run", *QUICK, "--set=laptop.policy=policy")
    assert outcome.code == 2 and "larger" in outcome.err, outcome.err


def test_a_directory_is_a_policy_too_and_an_async_reward_is_awaited(hotloop: RunCommand, workplace: Path) -> None:
    assert hotloop("run", "--out", "first", *QUICK).code == 0
    late = ["--set=reward.kind=python", "--set=reward.function=bad_input_rewards.late"]
    outcome = hotloop("run", "--out", "run", *QUICK, *late, "--set=laptop.policy=first/checkpoints/iter_0000001")
    assert outcome.code == 0, outcome.err
    assert (workplace / "run" / "policy").is_symlink()
    resumed = hotloop("run", "--resume", "run", "--set=rounds=3")
    assert resumed.code == 0, resumed.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_while_saving_leaves_no_checkpoint(
    hotloop: RunCommand, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hotloop.trainers.torch.trainer import TorchTrainer

    def fill(self: TorchTrainer, path: Path) -> None:
        with open("/dev/full", "wb", buffering=0) as file:
            file.write(b"x")

    monkeypatch.setattr(TorchTrainer, "save_optimizer", fill)
    outcome = hotloop("run", "--out", "run", *QUICK)
    assert outcome.code == 1 and "[disk_full]" in outcome.err and "hotloop run --resume" in outcome.err
    assert list((workplace / "run" / "checkpoints").iterdir()) == []
    monkeypatch.undo()


def test_explain_runs_nothing(hotloop: RunCommand, workplace: Path) -> None:
    outcome = hotloop("run", "--explain", "--set=rounds=9")
    assert outcome.code == 0 and "rounds" in outcome.out and "--set" in outcome.out
    assert [path.name for path in workplace.iterdir()] == ["bad_input_rewards.py"]


def test_published_versions_are_an_anchor_and_deltas_and_never_used_twice(hotloop: RunCommand, workplace: Path) -> None:
    publish = ["--set=publish=bucket", "--set=laptop.checkpoint_interval=1"]
    assert hotloop("run", "--out", "run", *QUICK, *publish).code == 0
    events = [json.loads(line) for line in (workplace / "run" / "events.jsonl").read_text().splitlines()]
    published = [(e["identity"], e["kind"]) for e in events if e["event"] == "published"]
    assert published == [("step000000", "anchor"), ("step000001", "delta"), ("step000002", "delta")]
    (workplace / "bucket" / "step000007").mkdir()
    (workplace / "bucket" / "step000007" / "part").write_bytes(b"left by a killed run")
    assert hotloop("run", "--resume", "run", "--set=rounds=3").code == 0
    events = [json.loads(line) for line in (workplace / "run" / "events.jsonl").read_text().splitlines()]
    published = [(e["identity"], e["kind"]) for e in events if e["event"] == "published"]
    assert published[3:] == [("step000008", "anchor"), ("step000009", "delta")]
    assert json.loads((workplace / "run" / "summary.json").read_text())["policy_version"] == 9
