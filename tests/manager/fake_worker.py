"""A worker without torch that speaks the runtime's protocol: `fake_worker.py FOLDER`. One step is one heartbeat.

It finishes when FOLDER/finish exists; FOLDER/<rank> makes that rank do what it contains, once: `exit` (in good order),
`raise`, `die`.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from pathlib import Path

from flashrec.core.types import Raised, Report
from flashrec.transport.handshake import connect_authenticated, read_secret
from flashrec.wire import frames
from flashrec.wire import messages as m

RANK, LIFE = int(os.environ["RANK"]), int(os.environ["FLASHREC_INCARNATION"])
WORLD = tuple(range(int(os.environ["WORLD_SIZE"])))


def main(folder: Path) -> None:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(os.environ["FLASHREC_SOCKET"])
    connect_authenticated(sock, read_secret(Path(os.environ["FLASHREC_SECRET_FILE"])))

    def say(message: m.Message) -> None:
        sock.sendall(frames.frame(frames.encode(message)))

    joins = os.environ["FLASHREC_JOINS"] == "1"
    generation, reader = int(os.environ["FLASHREC_GENERATION"]), frames.FrameReader()
    say(m.WorkerHello(RANK, LIFE, os.getpid()))
    print(f"hello of rank {RANK}, life {LIFE}", flush=True)
    if not joins:
        say(m.WorkerRestored(RANK, LIFE, generation, 5))
    while True:
        readable, _, _ = select.select([sock], [], [], 0.05)
        for payload in reader.feed(sock.recv(65536)) if readable else []:
            message = frames.to_worker.decode(payload)
            match message:
                case m.WorkerWelcome() if joins:
                    generation = max(generation, message.generation)
                    say(m.WorkerReported(RANK, LIFE, generation, Report(-1, -1, -1, False, WORLD)))
                case m.Fence():
                    generation = message.generation
                    report = Report(-1, -1, -1, False, WORLD) if joins else Report(5, 4, 4, True, WORLD)
                    say(m.WorkerReported(RANK, LIFE, generation, report))
                case m.PlanPublished():
                    say(m.WorkerFormed(RANK, LIFE, generation))
                    say(m.WorkerRestored(RANK, LIFE, generation, message.plan.resume_step))
                    joins = False
                case m.Resume():
                    say(m.WorkerCommitted(RANK, LIFE, generation, 6))
        say(m.WorkerBeat(RANK, LIFE, 5, 4, 4, "step"))
        order = folder / str(RANK)
        if order.exists():
            what = order.read_text()
            order.unlink()
            if what == "raise":
                say(m.WorkerRaised(RANK, LIFE, Raised(5, "ValueError: the data is wrong", "Traceback\nValueError")))
            if what in ("raise", "exit"):
                say(m.WorkerFarewell(RANK, LIFE))
            sys.exit(1)
        if (folder / "finish").exists():
            say(m.WorkerFinished(RANK, LIFE, 10))
            say(m.WorkerFarewell(RANK, LIFE))
            return


main(Path(sys.argv[1]))
