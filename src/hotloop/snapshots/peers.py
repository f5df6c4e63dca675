"""Caches of other nodes: a cluster reads an object from the bucket once.

    node A: cache --ask the file's owner--> node B: PeerServer --> its cache --> bucket, once for the cluster
              |                                                        (or joins a fetch that is under way)
              +--owner is A itself, down or without the partition: bucket

Each file has one owner among the nodes, chosen by a hash that every node computes alike, so that nodes that start
together ask the same one. An owner never asks on, so nobody waits in a circle.

Promises: a peer serves only who proves that it knows the partition, by an HMAC over a nonce that is used once and over
what is asked for. Only files whose SHA-256 a manifest gives are asked for, and the cache checks it on arrival, so
that a peer can refuse but not deceive. Without proof every answer is 404. The partition itself is never sent.

Does not do: encryption; peers talk inside a cluster. Finding peers; they are configured.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from hotloop.errors import InputError, SnapshotError
from hotloop.snapshots.cache import Cache
from hotloop.snapshots.layout import is_file_name, is_identity
from hotloop.snapshots.reader import RemoteFile

_NONCE_PATH, _FILE_PATH = "/nonce", "/file"
_NONCE_HEADER, _PROOF_HEADER = "X-Hotloop-Nonce", "X-Hotloop-Proof"
_MAX_NONCES = 4096
_MAX_BODY_BYTES = 4096
_PIECE_BYTES = 1024**2
_CONNECT_TIMEOUT_S = 5.0
_END_WITHIN_S = 0.05
"""How often a server looks whether it shall end."""


def compute_proof(partition: bytes, nonce: str, body: bytes) -> str:
    """Compute what shows that the partition is known: an HMAC over the nonce and the request."""
    return hmac.new(partition, nonce.encode() + b"\n" + body, hashlib.sha256).hexdigest()


def choose_owner(nodes: Sequence[str], file: RemoteFile) -> str:
    """Choose the node that reads a file from the bucket: the highest hash of node and file (rendezvous hashing)."""

    def weigh(node: str) -> bytes:
        return hashlib.sha256(json.dumps([node, file.identity, file.name, file.sha256]).encode()).digest()

    return max(nodes, key=weigh)


class PeerServer:
    """Serves one node's cache to its peers, in threads of its own."""

    def __init__(self, cache: Cache, partition: bytes, *, host: str = "127.0.0.1", port: int = 0) -> None:
        """Bind and start serving.

        Args:
            port: 0 takes a free one; see `address`.
        """
        self._cache = cache
        self._partition = partition
        self._nonces: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 60

            def do_GET(self) -> None:
                if self.path == _NONCE_PATH:
                    self.answer(owner.make_nonce().encode())
                else:
                    self.refuse()

            def do_POST(self) -> None:
                file = owner.admit(self)
                if file is None:
                    self.refuse()
                    return
                try:
                    view = owner._cache.fetch(file, asks_peers=False)
                except SnapshotError:
                    # Whatever it is, the asking node meets it at the bucket and reports it there.
                    self.refuse()
                    return
                self.answer(view)

            def refuse(self) -> None:
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.send_header("Connection", "close")
                self.end_headers()

            def answer(self, data: bytes | memoryview) -> None:
                view = memoryview(data)
                self.send_response(200)
                self.send_header("Content-Length", str(view.nbytes))
                self.end_headers()
                for start in range(0, view.nbytes, _PIECE_BYTES):
                    self.wfile.write(view[start : start + _PIECE_BYTES])

            def log_message(self, format: str, *arguments: object) -> None:
                """Say nothing: what peers fetch is no event."""

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": _END_WITHIN_S}, name="peer-server", daemon=True
        )
        self._thread.start()

    @property
    def address(self) -> str:
        """`http://host:port`, as other nodes configure it."""
        host, port = self._server.server_address[:2]
        return f"http://{host if isinstance(host, str) else host.decode()}:{port}"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def make_nonce(self) -> str:
        """Give out a nonce; the oldest are forgotten, so that asking for many fills no memory."""
        nonce = secrets.token_hex(16)
        with self._lock:
            self._nonces[nonce] = None
            while len(self._nonces) > _MAX_NONCES:
                self._nonces.popitem(last=False)
        return nonce

    def admit(self, request: BaseHTTPRequestHandler) -> RemoteFile | None:
        """Check the proof of a request and return the file it asks for; None without proof."""
        length = request.headers.get("Content-Length", "")
        if request.path != _FILE_PATH or not length.isdigit() or int(length) > _MAX_BODY_BYTES:
            return None
        body = request.rfile.read(int(length))
        nonce, proof = request.headers.get(_NONCE_HEADER, ""), request.headers.get(_PROOF_HEADER, "")
        with self._lock:
            # Used once: whoever listens in cannot send the request again.
            if self._nonces.pop(nonce, ...) is ...:
                return None
        if not hmac.compare_digest(proof.encode(), compute_proof(self._partition, nonce, body).encode()):
            return None
        return _parse_file(body)


class HttpPeers:
    """Asks the owner of a file among the configured nodes; the cache's `PeerSource`."""

    def __init__(self, nodes: Sequence[str], own_address: str, partition: bytes, *, timeout_s: float = 600.0) -> None:
        """Remember the nodes; nobody is asked yet.

        Args:
            nodes: addresses of all nodes, the same on each of them; order does not matter.
            own_address: which of them this one is.
            timeout_s: longest silence of an owner that is fetching from the bucket.

        Raises: InputError `invalid_peer`.
        """
        for node in nodes:
            parts = urlsplit(node)
            if parts.scheme != "http" or not parts.hostname or parts.port is None or "@" in parts.netloc:
                raise InputError(
                    "invalid_peer",
                    "must be http://host:port",
                    where=f"peer {parts.hostname or '?'}",
                    do="Give the address that the node's peer server listens on.",
                )
        self._nodes = sorted({*nodes, own_address})
        self._own_address = own_address
        self._partition = partition
        self._timeout_s = timeout_s

    def fetch(self, file: RemoteFile, write: Callable[[bytes], None]) -> bool:
        """Ask the file's owner. False when that is this node, or when it does not answer or does not give it."""
        owner = choose_owner(self._nodes, file)
        if owner == self._own_address:
            return False
        parts = urlsplit(owner)
        assert parts.hostname is not None
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=_CONNECT_TIMEOUT_S)
        try:
            connection.request("GET", _NONCE_PATH)
            nonce = connection.getresponse().read(_MAX_BODY_BYTES).decode("ascii", "replace")
            body = json.dumps([file.identity, file.name, file.size, file.sha256, file.role]).encode()
            headers = {_NONCE_HEADER: nonce, _PROOF_HEADER: compute_proof(self._partition, nonce, body)}
            connection.timeout = self._timeout_s
            connection.request("POST", _FILE_PATH, body=body, headers=headers)
            response = connection.getresponse()
            if response.status != 200 or response.length != file.size:
                return False
            while piece := response.read(_PIECE_BYTES):
                write(piece)
            return True
        except (OSError, http.client.HTTPException, ValueError):
            # A peer is a short cut; whatever is wrong with it, the bucket has the object.
            return False
        finally:
            connection.close()


def _parse_file(body: bytes) -> RemoteFile | None:
    try:
        identity, name, size, sha256, role = json.loads(body)
    except (ValueError, TypeError):
        return None
    texts = (identity, name, sha256, role)
    if not all(isinstance(text, str) for text in texts) or not is_identity(identity) or not is_file_name(name):
        return None
    if not isinstance(size, int) or size < 0 or len(sha256) != 64:
        return None
    return RemoteFile(identity, name, size, sha256, "", role)
