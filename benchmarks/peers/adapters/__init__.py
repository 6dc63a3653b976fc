"""One file a peer; `all_peers` is the table in the order of the results."""

from __future__ import annotations

from benchmarks.peers.adapters import guarded, plain, replicated, requeue, resiliency, torchrun
from benchmarks.peers.job import Peer

REFERENCE = plain.PEER


def all_peers() -> tuple[Peer, ...]:
    return (*guarded.PEERS, *replicated.PEERS, *resiliency.PEERS, *torchrun.PEERS, *requeue.PEERS)
