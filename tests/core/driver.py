"""Drives the machine with readable commands; used by the scenario files. Knows no timing and no randomness."""

from __future__ import annotations

import msgspec

from flashrec.core import effects as fx
from flashrec.core import events as e
from flashrec.core.limits import Limits, PoolLimits
from flashrec.core.machine import Machine
from flashrec.core.types import Assignment, Raised, Report


def snapshot(machine: Machine) -> object:
    """Everything the machine remembers, as plain data: two machines with equal snapshots behave alike."""
    return msgspec.to_builtins(
        {
            "phase": machine.phase,
            "generation": machine.generation,
            "nodes": list(machine.members.nodes.values()),
            "slots": machine.members.slots,
            "plan": machine.plan,
            "stop": (machine.stop_reason, machine.exit_code),
            "deadline": machine.next_deadline(),
            "pool": machine.pool,
            "private": {k: repr(v) for k, v in vars(machine).items() if k.startswith("_") and k != "_out"},
        }
    )


def _task(task: Assignment) -> str:
    former = f" from {task.former}" if task.former >= 0 else " from a replica"
    return f"{task.rank}.{task.incarnation}{'+' if task.joins else ''}{former if task.resized else ''}"


def show(effect: fx.AnyEffect) -> str:
    """One effect as one line."""
    match effect:
        case fx.ChangePhase(before, after, generation, reason):
            return f"{before} -> {after}  g{generation}: {reason}"
        case fx.AnnounceFence(generation, reason, at_boundary):
            return f"fence g{generation}{' at a step boundary' if at_boundary else ''}: {reason}"
        case fx.KillWorkers(node, workers, reason):
            return f"kill on {node}: {' '.join(f'{r}.{i}' for r, i in workers)} ({reason})"
        case fx.LaunchWorkers(placement, _):
            where = [f"{node}[{' '.join(map(_task, tasks))}]" for node, tasks in placement.items()]
            return f"launch {' '.join(where)}"
        case fx.RequestNode(request, avoid, reason):
            return f"request {request}{''.join(f', not {node}' for node in avoid)} ({reason})"
        case fx.ReleaseNode(request, node, reason):
            return f"release {request} {node or '(withdrawn)'} ({reason})"
        case fx.RetireNode(node, reason):
            return f"retire {node} ({reason})"
        case fx.Tell(text):
            return f"tell: {text}"
        case fx.TakeRung(rung, _, reason, _):
            return f"rung {rung}: {reason}"
        case fx.PublishPlan(plan) if plan.savers:
            forward = " ".join(map(str, plan.roll_forward)) or "-"
            savers = " ".join(map(str, plan.savers))
            return f"plan g{plan.generation}: {savers} save step {plan.resume_step}, forward {forward}"
        case fx.PublishPlan(plan) if plan.hands_over:
            ranks = " ".join(map(str, plan.hands_over))
            return f"plan g{plan.generation}: {ranks} put step {plan.resume_step} aside"
        case fx.PublishPlan(plan):
            sources = " ".join(f"{s}->{t}" for t, s in plan.sources.items()) or "-"
            forward = " ".join(map(str, plan.roll_forward)) or "-"
            moved = "".join(f", {rank}.{life} takes over" for rank, life in plan.successors.items())
            at = f"{plan.resume_step}{' (a step boundary)' if plan.at_boundary else ''}"
            return f"plan g{plan.generation}: resume at {at}, forward {forward}, restore {sources}{moved}"
        case fx.AnnounceResume(generation):
            return f"resume g{generation}"
        case fx.AnnounceComplete(generation):
            return f"complete g{generation}"
        case fx.StopJob(reason, code):
            return f"stop {code}: {reason.splitlines()[0]}"
    raise AssertionError(effect)


class Driver:
    """One scenario. `do(line)` carries out one command and returns the effects, one line each."""

    def __init__(self) -> None:
        self.machine = Machine(Limits())
        self.now = 0.0

    def do(self, line: str) -> list[str]:
        verb, *words = line.split()
        named = dict(word.split("=", 1) for word in words if "=" in word)
        plain = [word for word in words if "=" not in word]
        events = getattr(self, f"_{verb.replace('-', '_')}")(plain, named)
        out: list[str] = []
        for event in events:
            out += [show(effect) for effect in self.machine.handle(event, self.now)]
        return out or ["-"]

    def _ranks(self, plain: list[str]) -> list[int]:
        if plain[:1] == ["all"]:
            return [slot.rank for slot in self.machine.members.slots]
        return [int(word) for word in plain if word.isdigit()]

    def _life(self, rank: int, named: dict[str, str]) -> tuple[int, int]:
        slots = self.machine.members.slots
        return rank, int(named.get("life", slots[rank].incarnation if rank < len(slots) else 1))

    def _gen(self, named: dict[str, str]) -> int:
        return int(named.get("g", self.machine.generation))

    def _limits(self, _plain, named):
        changes = {k: float(v) if k.endswith("_s") else int(v) if v.isdigit() else v for k, v in named.items()}
        self.machine.limits = msgspec.structs.replace(self.machine.limits, **changes)
        return []

    def _pool(self, _plain, named):
        limits = PoolLimits(int(named["max_swaps"]), float(named.get("wait_s", 60)))
        self.machine = Machine(self.machine.limits, limits)
        return []

    def _grant(self, plain, _named):
        return [e.NodeGranted(int(plain[0]), plain[1])]

    def _refuse(self, plain, named):
        reason = " ".join(plain[1:]) or "no node free: 1 of 1 in use"
        return [e.NodeRefused(int(plain[0]), f"pool flashspare: {reason}", "retry" in named)]

    def _left(self, plain, named):
        node = self.machine.members.nodes[plain[0]]
        reason = " ".join(plain[1:]) or "companion job 17 is CANCELLED"
        return [e.NodeLeft(int(named.get("request", node.request)), plain[0], reason)]

    def _job(self, plain, named):
        return [e.JobStarted(tuple(plain), int(named["active"]), int(named["per_node"]))]

    def _agent(self, plain, _named):
        return [e.AgentJoined(n, self.machine.members.nodes[n].incarnation + 1) for n in plain]

    def _started(self, plain, named):
        return [e.WorkerStarted(*self._life(r, named), 1000 + r) for r in self._ranks(plain)]

    def _joined(self, plain, named):
        return [e.WorkerJoined(*self._life(r, named)) for r in self._ranks(plain)]

    def _report(self, plain, named):
        v = int(named.get("v", -1))
        voted, passed = int(named.get("voted", v - 1)), int(named.get("passed", v - 1))
        group = named.get("group", ",".join(str(s.rank) for s in self.machine.members.slots))
        report = Report(
            v, voted, passed, "invalid" not in plain, tuple(map(int, group.split(","))),
            unit=int(named.get("unit", 0)), rigid=named.get("rigid", "").replace("_", " "),
        )  # fmt: skip
        return [e.WorkerReported(*self._life(r, named), self._gen(named), report) for r in self._ranks(plain)]

    def _stalled(self, plain, _named):
        return [e.TrainingStalled(" ".join(plain))]

    def _formed(self, plain, named):
        return [e.WorkerFormed(*self._life(r, named), self._gen(named)) for r in self._ranks(plain)]

    def _restored(self, plain, named):
        g, v = self._gen(named), int(named["v"])
        return [e.WorkerRestored(*self._life(r, named), g, v, 0) for r in self._ranks(plain)]

    def _committed(self, plain, named):
        g, v = self._gen(named), int(named["v"])
        return [e.WorkerCommitted(*self._life(r, named), g, v) for r in self._ranks(plain)]

    def _kept(self, plain, named):
        g, step = self._gen(named), int(named.get("step", -1))
        return [e.CheckpointKept(*self._life(r, named), g, step, named["how"]) for r in self._ranks(plain)]

    def _not_kept(self, plain, named):
        reason = " ".join(word for word in plain if not word.isdigit())
        ranks = self._ranks(plain)
        return [e.CheckpointFailed(*self._life(r, named), self._gen(named), int(named["step"]), reason) for r in ranks]

    def _handed_over(self, plain, named):
        g, v = self._gen(named), int(named["v"])
        return [e.HandedOver(*self._life(r, named), g, v, 1 << 20) for r in self._ranks(plain)]

    def _not_handed_over(self, plain, named):
        reason = " ".join(word for word in plain if not word.isdigit())
        return [e.NotHandedOver(*self._life(r, named), self._gen(named), reason) for r in self._ranks(plain)]

    def _not_inherited(self, plain, named):
        reason = " ".join(word for word in plain if not word.isdigit())
        return [e.NotInherited(*self._life(r, named), self._gen(named), reason) for r in self._ranks(plain)]

    def _finished(self, plain, named):
        return [e.WorkerFinished(*self._life(r, named), int(named["v"])) for r in self._ranks(plain)]

    def _raised(self, plain, named):
        said = Raised(int(named["step"]), named["what"], f"Traceback\n{named['what']}")
        return [e.WorkerRaised(*self._life(r, named), said) for r in self._ranks(plain)]

    def _exit(self, plain, named):
        farewell = named.get("farewell", "none")
        joined = "unjoined" not in plain
        return [
            e.WorkerExited(*self._life(r, named), farewell, joined, f"process ended ({farewell})")
            for r in self._ranks(plain)
        ]

    def _condemn(self, plain, named):
        life = int(named.get("life", self.machine.members.nodes[plain[0]].incarnation))
        return [e.NodeCondemned(plain[0], life, " ".join(plain[1:]) or "silent for 2.0 s", named.get("kind", "lost"))]

    def _leaving(self, plain, named):
        return [e.NodeLeaving(plain[0], " ".join(plain[1:]) or "Slurm says DRAIN", named.get("cause", "drain"))]

    def _mended(self, plain, named):
        life = int(named.get("life", self.machine.members.nodes[plain[0]].incarnation))
        return [e.NodeMended(plain[0], life, " ".join(plain[1:]) or "well again", named.get("cause", ""))]

    def _launch_failed(self, plain, named):
        workers = tuple(self._life(int(r), named) for r in plain[1:])
        return [e.LaunchFailed(plain[0], workers, "srun: error")]

    def _wait(self, plain, _named):
        self.now += float(plain[0])
        return [e.TimePassed()]

    def _stop(self, plain, _named):
        return [e.StopRequested(" ".join(plain), 143)]
