"""`python -m flashrec.transport.mpi hub|beater`: started by a `Supervisor`, which talks to it over stdin and stdout."""

from __future__ import annotations

import sys

from flashrec.transport.mpi.beater import main as beat
from flashrec.transport.mpi.hub import main as hear
from flashrec.transport.mpi.parent import Parent

if __name__ == "__main__":
    {"hub": hear, "beater": beat}[sys.argv[1]](Parent())
