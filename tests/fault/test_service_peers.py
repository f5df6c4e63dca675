"""Two nodes with `peers`: real deployments with a cache each, one bucket behind a proxy that counts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deployment_harness import Deployment, make_tensors, served_version, write_checkpoint
from test_f15_f28_requests import deploy_s3, publish_s3

sys.path.insert(0, str(Path(__file__).parent.parent / "contract"))
from bucket_servers import FaultProxy, find_free_port, run_fault_proxy, run_localbucket

Deploy = Callable[..., Deployment]
PARTITION = "5a" * 32


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[FaultProxy]:
    with run_localbucket(tmp_path / "objects") as endpoint, run_fault_proxy(endpoint) as proxy:
        yield proxy


def start_node(deploy: Deploy, proxy: FaultProxy, listen: str, nodes: list[str]) -> Deployment:
    def with_peers(**options: Any) -> Deployment:
        options["config"] |= {"partition": "rl_bdn_partition", "peers": {"listen": listen, "nodes": nodes}}
        options["environ"] |= {"RL_BDN_PARTITION": PARTITION}
        return deploy(**options)

    return deploy_s3(with_peers, proxy)


def test_two_nodes_with_peers_read_an_object_from_the_bucket_once(
    tmp_path: Path, deploy: Deploy, proxy: FaultProxy
) -> None:
    names = [f"step{number:06d}" for number in range(1, 5)]  # of several files each node owns some
    tensors = make_tensors(1)
    for number, name in enumerate(names, 1):
        tensors = make_tensors(number, share=0.1, base=tensors)
        publish_s3(proxy, write_checkpoint(tmp_path / name, tensors), name, number, startup=number == 1)
    proxy.requests.clear()
    nodes = [f"http://127.0.0.1:{find_free_port()}" for _ in range(2)]
    first, second = (start_node(deploy, proxy, listen, nodes) for listen in nodes)
    for node in (first, second):
        node.wait_ready(names[0])  # from now on both are there to be asked
    for version, name in enumerate(names[1:], 2):
        for node in (first, second):
            node.load(name)
        for node in (first, second):
            node.wait_ready(name)
            assert served_version(node.complete()) == version
        assert proxy.count_gets(f"{name}/model.safetensors") == 1, name
    assert "Traceback" not in first.log_text() + second.log_text()


def test_a_node_whose_peer_is_gone_reads_from_the_bucket(tmp_path: Path, deploy: Deploy, proxy: FaultProxy) -> None:
    publish_s3(proxy, write_checkpoint(tmp_path / "one", make_tensors(1)), "step000001", 1, startup=True)
    proxy.requests.clear()
    nodes = [f"http://127.0.0.1:{find_free_port()}" for _ in range(3)]  # two of them never answer
    node = start_node(deploy, proxy, nodes[0], nodes)
    node.wait_ready("step000001")
    assert proxy.count_gets("step000001/model.safetensors") == 1
    assert served_version(node.complete()) == 1


@pytest.mark.parametrize(
    ("setting", "code"),
    [
        ({"peers": {"listen": "http://127.0.0.1:9", "nodes": []}}, "peers_without_partition"),
        ({"peers": {"nodes": ["http://127.0.0.1:9"]}, "partition": "rl_bdn_partition"}, "invalid_peer"),
        ({"peers": {"listen": "127.0.0.1:9"}, "partition": "rl_bdn_partition"}, "invalid_peer"),
    ],
)
def test_peers_that_could_not_serve_each_other_are_refused_at_the_start(
    tmp_path: Path, setting: dict[str, Any], code: str
) -> None:
    deployment = Deployment(
        tmp_path / "d", f"file://{tmp_path}/bucket", config=setting, environ={"RL_BDN_PARTITION": PARTITION}
    )
    with pytest.raises(AssertionError, match=rf"\[{code}\]"):  # no first line; what it said instead
        deployment.start()
    deployment.stop()


def test_the_partition_is_no_part_of_what_peers_say(tmp_path: Path, deploy: Deploy, proxy: FaultProxy) -> None:
    publish_s3(proxy, write_checkpoint(tmp_path / "one", make_tensors(1)), "step000001", 1, startup=True)
    node = start_node(deploy, proxy, f"http://127.0.0.1:{find_free_port()}", [])
    node.wait_ready("step000001")
    assert PARTITION not in node.log_text() + json.dumps(node.status())
