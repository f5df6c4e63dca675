"""F34 and the path of a delta through a real deployment whose replica speaks to an engine server."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deployment_harness import Deployment, Trainer, make_tensors, served_version, write_checkpoint
from test_f29_f40_swaps import Stream

sys.path.insert(0, str(Path(__file__).parent.parent / "contract"))
from engine_stand_ins import InThread, SglangStandIn, StandIn, VllmStandIn
from safetensors.numpy import load_file

Deploy = Callable[..., Deployment]


@pytest.fixture(params=[SglangStandIn, VllmStandIn], ids=["sglang", "vllm"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StandIn]:
    """An engine server that was started on other weights than any snapshot."""
    base = write_checkpoint(tmp_path / "base", make_tensors(1234), max_position_embeddings=2048)
    with InThread(request.param(base)) as stand_in:
        yield stand_in


def serve(trainer: Trainer, deploy: Deploy, server: StandIn, **config: Any) -> Deployment:
    identity = trainer.anchor(max_position_embeddings=2048)
    kind = "sglang" if isinstance(server, SglangStandIn) else "vllm"
    deployment = deploy(config={"engine": {"kind": kind, "url": server.url}, **config})
    deployment.wait_ready(identity)
    return deployment


def assert_holds(server: StandIn, tensors: dict[str, Any]) -> None:
    for name, values in tensors.items():
        assert server.engine.tensor_bytes(name) == values.tobytes()


def test_a_delta_reaches_the_server_as_a_rebuilt_local_checkpoint(
    trainer: Trainer, deploy: Deploy, server: StandIn
) -> None:
    deployment = serve(trainer, deploy, server)
    assert_holds(server, trainer.content["step000001"])
    assert served_version(deployment.complete()) == 1
    two = trainer.publish(max_position_embeddings=2048)
    stream = Stream(deployment, prompt=[1, 2, 3], logit_bias={}, max_tokens=300)
    deployment.load(two)
    deployment.wait_ready(two)
    assert_holds(server, trainer.content[two])
    held = load_file(deployment.root / "state" / "r0" / "policy" / "model.safetensors")
    assert {name: value.tobytes() for name, value in held.items()} == {
        name: value.tobytes() for name, value in trainer.content[two].items()
    }
    assert server.label == "2" and served_version(deployment.complete()) == 2
    spans = stream.spans()
    assert [version for _, _, version in spans] == [1, 2] and spans[-1][1] == 300


def test_f34_a_refusal_that_comes_with_200_keeps_version_and_weights(
    trainer: Trainer, deploy: Deploy, tmp_path: Path
) -> None:
    base = write_checkpoint(tmp_path / "base", make_tensors(1234), max_position_embeddings=2048)
    with InThread(SglangStandIn(base)) as server:
        deployment = serve(trainer, deploy, server)
        before = deployment.complete().body["choices"]
        two = trainer.publish(max_position_embeddings=2048)
        server.refuses_updates = "200"
        deployment.load(two)
        state = deployment.wait_error(two)
        assert state["reason"] == "engine_error" and "out of memory" in state["message"]
        replica = deployment.replica()
        assert (replica["policy_version"], replica["readiness"]) == (1, True)
        assert_holds(server, trainer.content["step000001"])
        assert deployment.complete().body["choices"] == before
        server.refuses_updates = ""
        three = trainer.publish(max_position_embeddings=2048)
        deployment.load(three)
        deployment.wait_ready(three)
        assert_holds(server, trainer.content[three])


def test_vllm_failing_a_reload_is_loaded_again_from_the_anchor(
    trainer: Trainer, deploy: Deploy, tmp_path: Path
) -> None:
    base = write_checkpoint(tmp_path / "base", make_tensors(1234), max_position_embeddings=2048)
    with InThread(VllmStandIn(base)) as server:
        deployment = serve(trainer, deploy, server)
        two = trainer.publish(max_position_embeddings=2048)
        server.refuses_updates = "500"
        deployment.load(two)
        deployment.wait(lambda status: not status["replicas"][0]["readiness"], "leaving the rotation")
        assert deployment.complete().code in ("no_replicas", "replica_lost")
        server.refuses_updates = ""
        deployment.wait_ready(two)
        assert_holds(server, trainer.content[two])
        assert served_version(deployment.complete()) == 2
