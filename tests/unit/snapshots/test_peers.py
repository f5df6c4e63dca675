"""Caches of several nodes: one read from the bucket, only for who knows the partition, and never on trust."""

from __future__ import annotations

import hashlib
import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from hotloop.errors import InputError
from hotloop.snapshots.cache import Cache
from hotloop.snapshots.memory_bucket import FakeBucket
from hotloop.snapshots.peers import HttpPeers, PeerServer, choose_owner, compute_proof
from hotloop.snapshots.reader import RemoteFile

PARTITION = bytes(range(32))


class Node:
    """A cache with a peer server; peers are told when all addresses are known."""

    def __init__(self, folder: Path, bucket: FakeBucket, partition: bytes = PARTITION) -> None:
        self.partition = partition
        self.cache = Cache(folder, partition, bucket)
        self.server = PeerServer(self.cache, partition)

    def meet(self, nodes: list[str]) -> None:
        self.cache._peers = HttpPeers(nodes, self.server.address, self.partition)

    def close(self) -> None:
        self.server.close()
        self.cache.close()


@pytest.fixture
def bucket() -> FakeBucket:
    return FakeBucket()


@pytest.fixture
def nodes(bucket: FakeBucket, tmp_path: Path) -> Iterator[list[Node]]:
    nodes = [Node(tmp_path / f"node{number}", bucket) for number in range(3)]
    for node in nodes:
        node.meet([other.server.address for other in nodes])
    yield nodes
    for node in nodes:
        node.close()


def put(bucket: FakeBucket, name: str, data: bytes, *, has_digest: bool = True) -> RemoteFile:
    bucket.put(f"step1/{name}", data)
    digest = hashlib.sha256(data).hexdigest() if has_digest else None
    return RemoteFile("step1", name, len(data), digest, bucket.head(f"step1/{name}").etag, "weights")


def owner_of(nodes: list[Node], file: RemoteFile) -> Node:
    address = choose_owner([node.server.address for node in nodes], file)
    return next(node for node in nodes if node.server.address == address)


def test_three_nodes_that_start_together_read_each_object_once(bucket: FakeBucket, nodes: list[Node]) -> None:
    files = [put(bucket, f"f{number}", bytes([number]) * 100_000) for number in range(6)]
    with ThreadPoolExecutor(18) as pool:
        jobs = [(file, pool.submit(node.cache.fetch, file)) for file in files for node in nodes]
        for file, job in jobs:
            assert hashlib.sha256(job.result()).hexdigest() == file.sha256
    reads = {key: count for (action, key), count in bucket.calls.items() if action == "read"}
    assert reads == {f"step1/f{number}": 1 for number in range(6)}
    assert len({owner_of(nodes, file).server.address for file in files}) > 1, "the work is spread"


def test_a_peer_that_is_down_is_no_obstacle(bucket: FakeBucket, nodes: list[Node]) -> None:
    file = put(bucket, "a", b"data")
    owner = owner_of(nodes, file)
    owner.server.close()
    other = next(node for node in nodes if node is not owner)
    assert bytes(other.cache.fetch(file)) == b"data"
    owner.server = PeerServer(owner.cache, PARTITION)


def test_a_file_without_a_digest_is_never_asked_for(bucket: FakeBucket, nodes: list[Node]) -> None:
    file = put(bucket, "a", b"data", has_digest=False)
    for node in nodes:
        node.cache.fetch(file)
    assert bucket.calls["read", "step1/a"] == 3


def test_a_peer_that_gives_other_bytes_is_found_out(
    bucket: FakeBucket, nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = put(bucket, "a", b"good")
    owner = owner_of(nodes, file)
    monkeypatch.setattr(owner.cache, "fetch", lambda file, asks_peers: memoryview(b"evil"))
    other = next(node for node in nodes if node is not owner)
    assert bytes(other.cache.fetch(file)) == b"good"
    assert bucket.calls["read", "step1/a"] == 1


def test_a_node_of_another_partition_gets_nothing(bucket: FakeBucket, nodes: list[Node], tmp_path: Path) -> None:
    stranger = Node(tmp_path / "stranger", bucket, b"q" * 32)
    files = [put(bucket, f"f{number}", b"data") for number in range(8)]
    stranger.meet([nodes[0].server.address])
    for file in files:
        nodes[0].cache.fetch(file, asks_peers=False)
    bucket.calls.clear()
    for file in files:
        assert bytes(stranger.cache.fetch(file)) == b"data"
    assert sum(count for (action, _), count in bucket.calls.items() if action == "read") == 8
    stranger.close()


def ask(node: Node, nonce: str, proof: str, body: bytes, path: str = "/file") -> tuple[int, bytes]:
    parts = urlsplit(node.server.address)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=10)
    connection.request("POST", path, body=body, headers={"X-Hotloop-Nonce": nonce, "X-Hotloop-Proof": proof})
    response = connection.getresponse()
    answer = (response.status, response.read())
    connection.close()
    return answer


def test_a_proof_is_good_for_one_request_of_one_file(bucket: FakeBucket, nodes: list[Node]) -> None:
    file = put(bucket, "a", b"data")
    node = nodes[0]
    body = json.dumps([file.identity, file.name, file.size, file.sha256, file.role]).encode()
    nonce = node.server.make_nonce()
    proof = compute_proof(PARTITION, nonce, body)
    assert ask(node, nonce, proof, body) == (200, b"data")
    assert ask(node, nonce, proof, body)[0] == 404, "the nonce was used"
    nonce = node.server.make_nonce()
    other = body.replace(b'"a"', b'"b"')
    assert ask(node, nonce, compute_proof(PARTITION, nonce, body), other)[0] == 404
    assert ask(node, "made up", compute_proof(PARTITION, "made up", body), body)[0] == 404


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"[]", b'["../x", "a", 4, "0", "weights"]', b'["step1", "../a", 4, "' + b"0" * 64 + b'", "weights"]'],
)
def test_a_request_that_names_no_file_gets_nothing(bucket: FakeBucket, nodes: list[Node], body: bytes) -> None:
    nonce = nodes[0].server.make_nonce()
    bucket.calls.clear()
    assert ask(nodes[0], nonce, compute_proof(PARTITION, nonce, body), body) == (404, b"")
    assert not bucket.calls


@pytest.mark.parametrize("address", ["", "node:1", "https://node:1", "http://node", "http://a:b@node:1"])
def test_a_wrong_peer_address_is_refused(address: str) -> None:
    with pytest.raises(InputError) as caught:
        HttpPeers([address], "http://127.0.0.1:1", PARTITION)
    assert caught.value.code == "invalid_peer"
