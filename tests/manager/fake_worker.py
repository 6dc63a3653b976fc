"""A worker without torch that speaks the runtime's protocol: `fake_worker.py FOLDER`. One step is one heartbeat.

It finishes when FOLDER/finish exists; FOLDER/<rank> makes that rank do what it contains, once: `exit` (in good order),
`raise`, `die`, `commit STEP` (asks for the permission; the answer is in FOLDER/committed). FOLDER/keeps: it has hooks
for checkpoints, and there is one of the step that the file contains. FOLDER/alone: nobody else holds the same shard.
FOLDER/full: no room to put a state aside. FOLDER/lost: what was put aside is not there.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from pathlib import Path

from flashrec.core.events import CheckpointKept, HandedOver, NotHandedOver, NotInherited
from flashrec.core.types import Raised, Report
from flashrec.transport.handshake import connect_authenticated, read_secret
from flashrec.transport.paths import state_path
from flashrec.wire import frames
from flashrec.wire import messages as m

RANK, LIFE = int(os.environ["RANK"]), int(os.environ["FLASHREC_INCARNATION"])
WORLD = tuple(range(int(os.environ["WORLD_SIZE"])))
SOCKET = Path(os.environ["FLASHREC_SOCKET"])
RESIZED, FORMER = int(os.environ.get("FLASHREC_RESIZED", "0")), int(os.environ.get("FLASHREC_FORMER", "-1"))


def main(folder: Path) -> None:
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(SOCKET))
    connect_authenticated(sock, read_secret(Path(os.environ["FLASHREC_SECRET_FILE"])))

    def say(message: m.Message) -> None:
        sock.sendall(frames.frame(frames.encode(message)))

    joins = os.environ["FLASHREC_JOINS"] == "1"
    generation, reader = int(os.environ["FLASHREC_GENERATION"]), frames.FrameReader()
    say(m.WorkerHello(RANK, LIFE, os.getpid()))
    print(f"hello of rank {RANK}, life {LIFE}", flush=True)
    keeps, group = folder / "keeps", (RANK,) if (folder / "alone").exists() else WORLD
    v = int(keeps.read_text()) if keeps.exists() else 5
    if keeps.exists() and not joins:
        say(CheckpointKept(RANK, LIFE, generation, v, "found"))
    if RESIZED and (folder / "lost").exists():
        (folder / "lost").unlink()
        say(NotInherited(RANK, LIFE, generation, "nothing is there"))
    elif not joins:
        if RESIZED and FORMER >= 0:
            v = int(state_path(SOCKET, FORMER, RESIZED).read_text())
        print(f"rank {RANK} of {len(WORLD)} begins at {v}", flush=True)
        say(m.WorkerRestored(RANK, LIFE, generation, v))
    while True:
        readable, _, _ = select.select([sock], [], [], 0.05)
        for payload in reader.feed(sock.recv(65536)) if readable else []:
            message = frames.to_worker.decode(payload)
            match message:
                case m.WorkerWelcome() if joins:
                    generation = max(generation, message.generation)
                    say(m.WorkerReported(RANK, LIFE, generation, Report(-1, -1, -1, False, group)))
                case m.Fence():
                    generation = message.generation
                    report = Report(-1, -1, -1, False, group) if joins else Report(v, v - 1, v - 1, True, group, unit=1)
                    say(m.WorkerReported(RANK, LIFE, generation, report))
                case m.PlanPublished() if message.plan.savers:
                    if message.plan.savers[0] == RANK:
                        say(m.CommitAsked(RANK, LIFE, generation, message.plan.resume_step, 1))
                case m.PlanPublished() if RANK in message.plan.hands_over:
                    if (folder / "full").exists():
                        say(NotHandedOver(RANK, LIFE, generation, "no room"))
                        continue
                    path = state_path(SOCKET, RANK, generation)
                    path.parent.mkdir(exist_ok=True)
                    path.write_text(str(message.plan.resume_step))
                    say(HandedOver(RANK, LIFE, generation, message.plan.resume_step))
                case m.CommitAnswered():
                    (folder / "committed").write_text(str(message.granted))
                    if message.granted and message.request == 1:
                        say(CheckpointKept(RANK, LIFE, generation, v, "dying", 0.5))
                case m.PlanPublished():
                    say(m.WorkerFormed(RANK, LIFE, generation))
                    v = message.plan.resume_step
                    say(m.WorkerRestored(RANK, LIFE, generation, v))
                    joins = False
                case m.Resume():
                    say(m.WorkerCommitted(RANK, LIFE, generation, v + 1))
        say(m.WorkerBeat(RANK, LIFE, v, v - 1, v - 1, "step"))
        order = folder / str(RANK)
        if order.exists():
            what = order.read_text()
            order.unlink()
            if what.startswith("commit "):
                say(m.CommitAsked(RANK, LIFE, generation, int(what.split()[1]), 2))
                continue
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
