"""Everything of this process that lives as long as the process: control plane, groups, limits. Assembled once."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from flashrec.runtime import late, nccl, stuck
from flashrec.runtime.board import Board
from flashrec.runtime.control import Control
from flashrec.runtime.environment import Environment
from flashrec.runtime.groups import Groups
from flashrec.runtime.interrupt import Interrupter
from flashrec.runtime.limits import Limits
from flashrec.runtime.native import choose
from flashrec.runtime.progress import Progress
from flashrec.runtime.store import TableStore
from flashrec.runtime.timeline import Timeline, logger
from flashrec.runtime.torch_private import groups as private
from flashrec.runtime.torch_private import versions
from flashrec.runtime.transfer import Sockets
from flashrec.transport.handshake import read_secret
from flashrec.transport.page import Page
from flashrec.transport.paths import page_path
from flashrec.wire import messages as m

_ROOT_GROUP = "root"


@dataclass(frozen=True)
class Worker:
    """The parts that a session works with."""

    env: Environment
    secret: bytes
    control: Control
    board: Board
    progress: Progress
    groups: Groups
    sockets: Sockets
    limits: Limits
    timeline: Timeline
    interrupter: Interrupter

    @property
    def rank(self) -> int:
        return self.env.rank

    def store(self, group: str, members: tuple[int, ...], generation: int, timeout_s: float) -> TableStore:
        """A store for `group` in `generation`, seen by `members`."""
        return _make_store(self.env, self.board, self.control, group, members, generation, timeout_s)


def start(env: Environment, limits: Limits) -> Worker:
    """Check torch, connect to the agent, take over the creation of process groups. Raises what says why not."""
    if dist.is_initialized():
        raise RuntimeError("flashrec.init() must come before dist.init_process_group(…)")
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        raise RuntimeError(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL wraps every backend, which recovery cannot replace; unset it"
        )
    can_release, engine_of = versions.self_test(), choose(env.engine)
    if not can_release:
        logger.warning("process groups are replaced with fresh keys: each recovery leaves some threads behind")
    if nccl.is_used() and (wanted := nccl.check_environment(os.environ)):
        logger.warning("NCCL may end this process before it can recover; set %s", " ".join(wanted))
    secret = read_secret(Path(env.secret_file))
    progress = Progress(
        rank=env.rank,
        incarnation=env.incarnation,
        generation=env.generation,
        v=-1 if env.joins else 0,
        valid=not env.joins,
    )
    control = Control.connect(env, secret, progress)
    progress.page = _make_page(env)
    board = Board(max(env.generation, control.welcome.generation) if env.joins else env.generation, env.joins)
    timeline, sockets = Timeline(env.rank), Sockets()
    engine = engine_of(
        board=board,
        make_store=lambda group, members, generation, timeout_s: _make_store(
            env, board, control, group, members, generation, timeout_s
        ),
        replacer=private.Replacer.best(can_release),
        address=control.welcome.address,
        interface=env.gloo_interface,
        limits=limits,
        timeline=timeline,
    )
    groups = Groups(engine, progress, is_shadow=env.joins, limits=limits)
    progress.look = groups.look
    interrupter = Interrupter(board, progress, limits, control.give_up, env.interrupt_signal)

    def on_fence(generation: int) -> None:
        num_cut = groups.unblock()
        sockets.shut()
        timeline.mark("unblocked", generation=generation, connections=num_cut)
        stuck.watch(progress, generation, limits.unblock_timeout_s, control.give_up)
        interrupter.on_fence(generation)

    control.start(board, on_fence)
    if unlike := late.objection(os.environ):
        control.send(m.WorkerUnlikeParked(env.rank, env.incarnation, unlike))
    if unlike := late.cuda_objection(os.environ):
        control.send(m.WorkerUnlikeParked(env.rank, env.incarnation, unlike, only_cuda=True))
    everybody = tuple(range(env.world_size))
    private.install(
        on_new_group=groups.add,
        make_store=lambda: _make_store(
            env, board, control, _ROOT_GROUP, everybody, env.generation, limits.first_form_timeout_s
        ),
        rank=env.rank,
        world_size=env.world_size,
    )
    timeline.mark("started", joins=env.joins, generation=board.announced, engine=engine.NAME)
    return Worker(
        env=env,
        secret=secret,
        control=control,
        board=board,
        progress=progress,
        groups=groups,
        sockets=sockets,
        limits=limits,
        timeline=timeline,
        interrupter=interrupter,
    )


def _make_page(env: Environment) -> Page | None:
    try:
        return Page(page_path(env.socket, env.rank, env.incarnation))
    except OSError as err:
        logger.warning("where this rank is cannot be read while it says nothing: %s", err)
        return None


def _make_store(
    env: Environment,
    board: Board,
    control: Control,
    group: str,
    members: tuple[int, ...],
    generation: int,
    timeout_s: float,
) -> TableStore:
    return TableStore(board, control.send, env.rank, env.incarnation, generation, group, members, timeout_s)
