"""The state of a rank from whoever holds it (a replica, or host memory that keeps it) into a `State`.

`holding` is what a source has to send, `source` sends it, `target` receives it or takes it from this rank's own memory,
`protocol` is what both ends say to each other, `digests` shows that what arrives is what left.
"""

from flashrec.runtime.transfer.holding import Holding
from flashrec.runtime.transfer.protocol import Address, Moved, Sockets
from flashrec.runtime.transfer.source import send
from flashrec.runtime.transfer.target import listen, load, receive_state

__all__ = ["Address", "Holding", "Moved", "Sockets", "listen", "load", "receive_state", "send"]
