"""The setting `peers`: nodes of a cluster that read each object from the bucket once between them.

    gateway of node A: serves A's delivery cache at `peers.listen`
    gateway and replicas of node B: ask the file's owner among `peers.nodes` before the bucket

Owns: turning the setting into the two halves of snapshots/peers.py. Promises: a node that could prove nothing to the
others, because its partition is its own secret, is refused at its start.
Does not do: finding nodes; they are configured, the same list on each.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from hotloop.errors import InputError
from hotloop.service.config import DeploymentConfig
from hotloop.snapshots.cache import Cache
from hotloop.snapshots.peers import HttpPeers, PeerServer


def check_peers(config: DeploymentConfig) -> None:
    """Refuse peers that could never serve each other.

    Raises:
        InputError: `invalid_peer`, `peers_without_partition`.
    """
    peers = config.peers
    if not peers.nodes and not peers.listen:
        return
    if not peers.listen:
        raise InputError(
            "invalid_peer",
            "names no address of this node",
            where="peers.listen",
            do="Set peers.listen to this node's own entry of peers.nodes.",
        )
    if not config.partition:
        raise InputError(
            "peers_without_partition",
            "peers serve only who knows their partition, and this deployment makes a random one of its own",
            where="peers",
            do="Set partition to the name of a secret that is the same on every node.",
        )


def open_peers(nodes: Sequence[str], listen: str, partition: bytes) -> HttpPeers | None:
    """Make what a cache asks before the bucket; None without peers.

    Raises:
        InputError: `invalid_peer`.
    """
    return HttpPeers([*nodes, listen], listen, partition) if listen else None


def serve_peers(cache: Cache, listen: str, partition: bytes) -> PeerServer | None:
    """Start serving this node's cache; None without peers.

    Args:
        listen: an address that `open_peers` has accepted, or nothing.

    Raises:
        InputError: `address_in_use`.
    """
    if not listen:
        return None
    parts = urlsplit(listen)
    assert parts.hostname is not None and parts.port is not None
    try:
        return PeerServer(cache, partition, host=parts.hostname, port=parts.port)
    except OSError as error:
        raise InputError(
            "address_in_use",
            f"cannot listen there for peers ({error.strerror})",
            where=listen,
            do="Choose another port in peers.listen, and in every node's peers.nodes.",
        ) from None
