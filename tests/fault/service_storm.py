"""A storm over one real deployment: clients with known seeds, a trainer that publishes, and everything that can die.

    trainer --publishes--> localbucket <--FaultProxy-- replicas <-- gateway <--requests-- clients
       |                       X                           X           X                     |
       +--POST every version--------------------------------------------+        every token recomputed
                               X = killed, hung or damaged by the storm

Owns: the load, the faults and the judgement. A token is right when the version that its span declares would have
produced it: the fake engine's table is worked out here again from the tensors that were published under that version.
Promises: every request ends in one of: a whole answer, an error of ours, an error event inside its stream, or a broken
connection while the gateway was dead. Anything else is a violation, and so is a wrong token.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit

import numpy as np
import psutil
from deployment_harness import VOCAB, Deployment, make_tensors, write_checkpoint

sys.path.insert(0, str(Path(__file__).parent.parent / "contract"))
from bucket_servers import BUCKET, READER, WRITER, FaultProxy, end, find_free_port, run_fault_proxy, wait_until_up

from hotloop.errors import HotloopError
from hotloop.snapshots.bucket_access import open_bucket
from hotloop.snapshots.publisher import Publisher

ANCHOR_EVERY = 8
MAX_CONTEXT = 512
HEAL_DEADLINE_S = 300.0
"""Only turns a deployment that never heals into a failure."""
REQUEST_DEADLINE_S = 120.0
EXPECTED_REFUSALS = {"no_replicas", "replica_lost", "too_early", "queue_full", "engine_closed", "shutting_down"}
EXPECTED_LOAD_REFUSALS = {"storage_unavailable", "storage_access", "no_replicas"}


@dataclass(frozen=True)
class Policy:
    """What the fake engine computes from one version's tensors."""

    identity: str
    logprobs: Any
    """[V, V] natural logs of the next token after each token."""
    cumulative: Any
    """[V, V] running sums of the probabilities."""

    @classmethod
    def of(cls, identity: str, tensors: dict[str, Any]) -> Policy:
        """Work the table out as the engine does: seeded by the checksum of all bytes."""
        seed = 0
        for name in sorted(tensors):
            seed = zlib.crc32(tensors[name].tobytes(), seed)
        table = np.random.default_rng(seed).normal(size=(VOCAB, VOCAB))
        shifted = table - table.max(axis=1, keepdims=True)
        logprobs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        return cls(identity, logprobs, np.exp(logprobs).cumsum(axis=1))

    def draw(self, last: int, seed: int, position: int) -> int:
        """The token that this version draws after `last`."""
        uniform = np.random.default_rng([seed * 1_000_003 % 2**63, position]).random()
        row = self.cumulative[last]
        return int(np.searchsorted(row, uniform * row[-1], side="right"))


class BucketServer:
    """localbucket on a fixed port, so that it can be killed and started again behind the proxy."""

    def __init__(self, folder: Path) -> None:
        (folder / BUCKET).mkdir(parents=True)
        self.folder = folder
        self.port = find_free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        program = str(Path(sys.executable).parent / "localbucket")
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(
            [program, "--port", str(self.port), str(self.folder)], stdout=quiet, stderr=quiet
        )
        wait_until_up(self.endpoint, self.process)

    def kill(self) -> None:
        end(self.process)


@dataclass
class Tally:
    """What happened, and what must not have."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    loads: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    telling_tokens: int = 0
    """Tokens whose logprob under the version before differs: these can tell a wrong version."""
    across_versions: int = 0
    """Answers made by more than one version."""
    violations: list[str] = field(default_factory=list)


@dataclass
class Storm:
    """One storm. Threads share it; `lock` guards what more than one of them writes."""

    root: Path
    bucket: BucketServer
    proxy: FaultProxy
    seed: int
    replicas: int = 2
    tally: Tally = field(default_factory=Tally)
    lock: threading.Lock = field(default_factory=threading.Lock)
    publishing: threading.Lock = field(default_factory=threading.Lock)
    """Held during an upload: a server that dies inside a PUT is the bucket tests' case."""
    policies: dict[int, Policy] = field(default_factory=dict)
    accepted: int = 0
    gateway_deaths: list[list[float]] = field(default_factory=list)
    """[killed at, answering again at]."""
    stopped: list[psutil.Process] = field(default_factory=list)
    """Replicas that were hung; one whose gateway was then killed stays behind, for it cannot end itself."""
    is_over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        secret = {
            "aws_access_key_id": READER[0],
            "aws_secret_access_key": READER[1],
            "aws_region": "us-east-1",
            "endpoint_url": self.proxy.endpoint,
        }
        self.deployment = Deployment(
            self.root / "deployment",
            f"s3://{BUCKET}/run",
            replicas=self.replicas,
            config={
                "engine": {"kind": "fake", "max_context": MAX_CONTEXT},
                "storage": "rl_checkpoint_reader",
                "limits": {"storage_budget_s": 60.0},
            },
            environ={"RL_CHECKPOINT_READER": json.dumps(secret)},
        )
        self.tensors: dict[str, Any] = {}
        self.version = 0

    # ---- the trainer ------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Publish the next version, again and again until the bucket has it."""
        self.version += 1
        version, identity = self.version, f"step{self.version:06d}"
        self.tensors = make_tensors(self.seed * 100_003 + version, share=0.05, base=self.tensors or None)
        self.policies[version] = Policy.of(identity, self.tensors)
        source = write_checkpoint(self.root / "checkpoint", self.tensors)
        kind = "anchor" if version % ANCHOR_EVERY == 1 else "delta"
        environ = {"AWS_ACCESS_KEY_ID": WRITER[0], "AWS_SECRET_ACCESS_KEY": WRITER[1]}
        environ |= {"AWS_ENDPOINT_URL": self.bucket.endpoint, "AWS_DEFAULT_REGION": "us-east-1"}
        while True:
            with self.publishing:
                try:
                    publisher = Publisher(open_bucket(f"s3://{BUCKET}/run", environ=environ))
                    publisher.publish(source, identity, version, kind=kind)
                    if version == 1:
                        publisher.set_startup(identity)
                    return
                except HotloopError as error:
                    self.tally.loads[f"publish {error.code}"] += 1
            time.sleep(0.2)

    def post(self) -> None:
        """Ask for the newest version, a few times; a later one takes over where this one is not taken."""
        for _ in range(5):
            try:
                answer = self.deployment.load(f"step{self.version:06d}")
            except (URLError, OSError, http.client.HTTPException):
                self.tally.loads["unreachable"] += 1
            else:
                self.tally.loads[answer.code or "accepted"] += 1
                if answer.status == 200:
                    self.accepted = self.version
                    return
                if answer.code not in EXPECTED_LOAD_REFUSALS:
                    self.violate(f"POST of version {self.version}: {answer.status} {answer.body}")
            time.sleep(0.3)

    def train(self) -> None:
        draw = random.Random(f"{self.seed}-trainer")
        while not self.is_over.wait(draw.uniform(0.3, 1.5)):
            self.publish()
            self.post()

    # ---- the clients ------------------------------------------------------------------------------------------------

    def ask_forever(self, number: int) -> None:
        draw = random.Random(f"{self.seed}-client-{number}")
        while not self.is_over.is_set():
            self.ask(draw, number)

    def ask(self, draw: random.Random, number: int) -> str:
        """Send one request and judge how it ends; returns the replica that answered, or an empty text."""
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 3))]
        seed = draw.getrandbits(40)
        body: dict[str, Any] = {
            "prompt": prompt,
            "seed": seed,
            "max_tokens": draw.choice([1, 8, 64, 400]),
            "stream": draw.random() < 0.5,
            "user": f"session{draw.randrange(8)}",
            "nvext": {"extra_fields": ["engine_data"]},
        }
        began = time.monotonic()
        replica, blocks, outcome = "", [], "broken"
        try:
            replica, blocks, outcome = self._send(body)
        except TimeoutError:
            self.violate(f"client {number}: no end within {REQUEST_DEADLINE_S:g} s: {body}")
        except (OSError, http.client.HTTPException, ValueError) as error:
            if not self._gateway_died_since(began):
                self.violate(f"client {number}: {type(error).__name__} {error} while the gateway lived: {body}")
            time.sleep(0.05)
        with self.lock:
            self.tally.outcomes[outcome] += 1
        if blocks:
            self._judge(prompt[-1], seed, blocks, body)
        return replica if outcome == "answered" else ""

    def _send(self, body: dict[str, Any]) -> tuple[str, list[dict[str, Any]], str]:
        place = urlsplit(self.deployment.url)
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=REQUEST_DEADLINE_S)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            replica = answer.headers.get("x-hotloop-replica", "")
            if answer.status != 200:
                code = json.loads(answer.read())["error"]["code"]
                if code not in EXPECTED_REFUSALS:
                    self.violate(f"refused with {answer.status} {code}: {body}")
                time.sleep(0.05)
                return replica, [], f"refused {code}"
            if not body["stream"]:
                return replica, [json.loads(answer.read())["nvext"]["engine_data"]], "answered"
            return replica, *self._read_stream(answer)
        finally:
            connection.close()

    def _read_stream(self, answer: http.client.HTTPResponse) -> tuple[list[dict[str, Any]], str]:
        blocks: list[dict[str, Any]] = []
        for line in answer:
            if line.startswith(b"data: [DONE]"):
                return blocks, "answered"
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    return blocks, f"ended {event['error']['code']}"
                blocks.append(event["nvext"]["engine_data"])
        raise ConnectionError("the stream ended without an end")

    def _gateway_died_since(self, began: float) -> bool:
        """True if the gateway was dead at a moment of the request; waits for a death that is just being noted."""
        time.sleep(0.2)
        with self.lock:
            return any(again >= began for _, again in self.gateway_deaths)

    def _judge(self, last: int, seed: int, blocks: list[dict[str, Any]], body: dict[str, Any]) -> None:
        """Recompute every token under the version that its span declares."""
        tokens = [token for block in blocks for token in block["completion_token_ids"]]
        logprobs = [value for block in blocks for value in block["logprobs"]]
        spans = [span for block in blocks for span in block["version_spans"]]
        wrong = ""
        covered, versions = 0, set()
        telling = 0
        for span in spans:
            version = span["policy_version"]
            policy = self.policies.get(version)
            if policy is None or span["start"] != covered or span["snapshot_identity"] != policy.identity:
                wrong = f"span {span} after {covered} tokens"
                break
            versions.add(version)
            before = self.policies.get(version - 1)
            for position in range(span["start"], span["end"]):
                token = tokens[position]
                expected = policy.draw(last, seed, position)
                if token != expected or abs(policy.logprobs[last, token] - logprobs[position]) > 1e-9:
                    found = f"token {position} is {token} of logprob {logprobs[position]}"
                    wrong = f"{found}, version {version} draws {expected}"
                    break
                telling += before is not None and abs(before.logprobs[last, token] - logprobs[position]) > 1e-6
                last = token
            covered = span["end"]
            if wrong:
                break
        if not wrong and covered != len(tokens):
            wrong = f"spans cover {covered} of {len(tokens)} tokens"
        if wrong:
            self.violate(f"{wrong}: {body} spans {spans}")
        with self.lock:
            self.tally.tokens += len(tokens)
            self.tally.telling_tokens += telling
            self.tally.across_versions += len(versions) > 1

    def violate(self, what: str) -> None:
        with self.lock:
            self.tally.violations.append(what)

    # ---- the faults -------------------------------------------------------------------------------------------------

    def rage(self) -> None:
        draw = random.Random(f"{self.seed}-faults")
        faults: list[Callable[[random.Random], str]] = [
            self.kill_replica,
            self.hang_replica,
            self.kill_gateway,
            self.kill_bucket,
            self.damage_cache,
            self.damage_mirror,
        ]
        while not self.is_over.wait(draw.uniform(1.0, 5.0)):
            name = draw.choice(faults)(draw)
            self.tally.faults[name] += 1

    def _replica_pids(self) -> list[int]:
        process = self.deployment.process
        if process is None:
            return []
        try:
            return [child.pid for child in psutil.Process(process.pid).children()]
        except psutil.NoSuchProcess:
            return []

    def _signal_replica(self, draw: random.Random, number: int) -> bool:
        pids = self._replica_pids()
        if not pids:
            return False
        try:
            victim = psutil.Process(draw.choice(pids))
            victim.send_signal(number)
        except psutil.NoSuchProcess:
            return False
        if number == signal.SIGSTOP:
            self.stopped.append(victim)
        return True

    def kill_replica(self, draw: random.Random) -> str:
        return "killed a replica" if self._signal_replica(draw, signal.SIGKILL) else "found no replica"

    def hang_replica(self, draw: random.Random) -> str:
        return "hung a replica" if self._signal_replica(draw, signal.SIGSTOP) else "found no replica"

    def kill_gateway(self, draw: random.Random) -> str:
        death = [time.monotonic(), float("inf")]
        with self.lock:
            self.gateway_deaths.append(death)
        self.deployment.stop(signal.SIGKILL)
        time.sleep(draw.uniform(0.0, 1.0))
        self.deployment.start()
        with self.lock:
            death[1] = time.monotonic()
        return "killed the gateway"

    def kill_bucket(self, draw: random.Random) -> str:
        with self.publishing:
            self.bucket.kill()
        time.sleep(draw.uniform(0.2, 3.0))
        self.bucket.start()
        return "killed the bucket server"

    def damage_cache(self, draw: random.Random) -> str:
        """Put a damaged copy in the place of a cached file, as a disk that went bad would show it at the next read."""
        # The cache drops folders meanwhile: os.walk passes over what is gone, where rglob would raise.
        paths = [Path(folder) / name for folder, _, names in os.walk(self.deployment.root / "cache") for name in names]
        entries = sorted(path for path in paths if _is_entry(path))
        if not entries:
            return "found no cached file"
        victim = draw.choice(entries)
        damaged = victim.with_name(f"{victim.name}.damaged")
        try:
            shutil.copy2(victim, damaged)
            _flip(damaged, draw)
            os.replace(damaged, victim)
        except FileNotFoundError:
            return "found no cached file"
        return "damaged a cached file"

    def damage_mirror(self, draw: random.Random) -> str:
        """Flip bytes of a replica's host copy under its feet."""
        weights = sorted((self.deployment.root / "state").glob("r*/mirror/weights-*.bin"))
        if not weights:
            return "found no host copy"
        try:
            _flip(draw.choice(weights), draw)
        except FileNotFoundError:
            return "found no host copy"
        return "damaged a host copy"

    # ---- the whole --------------------------------------------------------------------------------------------------

    def run(self, seconds: float, clients: int) -> None:
        """Rage for so long; then everybody stops, and the deployment must reach the newest accepted version alone."""
        self.publish()
        self.deployment.start()
        self.deployment.wait_ready("step000001")
        self.accepted = 1
        work = [threading.Thread(target=self.ask_forever, args=(number,)) for number in range(clients)]
        work += [threading.Thread(target=self.train), threading.Thread(target=self.rage)]
        for thread in work:
            thread.start()
        self.is_over.wait(seconds)
        self.is_over.set()
        for thread in work:
            thread.join(REQUEST_DEADLINE_S)
            if thread.is_alive():
                self.violate(f"{thread.name} did not end")
        self._heal()

    def _heal(self) -> None:
        """No further POST: the deployment must come to the newest version that it accepted, on every replica."""
        deadline = time.monotonic() + HEAL_DEADLINE_S
        while True:
            status = self.deployment.status()
            served = {replica["policy_version"] for replica in status["replicas"]}
            if status["ready"] and len(served) == 1 and min(served) >= self.accepted:
                break
            if time.monotonic() >= deadline:
                self.violate(f"not healed to version {self.accepted}: {json.dumps(status)}")
                return
            time.sleep(0.2)
        draw = random.Random(f"{self.seed}-after")
        answered: set[str] = set()
        for _ in range(200):
            answered.add(self.ask(draw, -1))
        if answered - {""} != {f"r{number}" for number in range(self.replicas)}:
            self.violate(f"after healing only {sorted(answered)} answered")


def _is_entry(path: Path) -> bool:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return False  # dropped since the folder was listed
    return size > 64 and "partial" not in path.parts and path.suffix != ".damaged"


def _flip(path: Path, draw: random.Random) -> None:
    with path.open("r+b") as file:
        at = draw.randrange(max(1, path.stat().st_size - 8))
        file.seek(at)
        old = file.read(8)
        file.seek(at)
        file.write(bytes(byte ^ 0x55 for byte in old))


@contextmanager
def open_storm(root: Path, seed: int) -> Iterator[Storm]:
    """Bucket, proxy and deployment of one storm; all ended at the end."""
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # the proxy's clients die in the middle: no news
    bucket = BucketServer(root / "s3")
    try:
        with run_fault_proxy(bucket.endpoint) as proxy:
            storm = Storm(root, bucket, proxy, seed)
            try:
                yield storm
            finally:
                storm.is_over.set()
                storm.deployment.stop()
                for victim in storm.stopped:
                    with suppress(psutil.NoSuchProcess):
                        victim.kill()
    finally:
        bucket.kill()
