"""The Scheduler over the site's own commands, on every release.

User text comes from JSON only. squeue prints it on every release, for nodes sinfo does on 22.05 and scontrol from 23.11
on, which is found out by asking. 22.05 prints every job and node, whatever was asked for, so what comes back is always
filtered here, and the manager, which polls, uses `client`. An answer counts only if exit code, JSON and what is in it
agree. What was seen to lie, and is not used: `scontrol show job --json` and `show step --json` end with 0 and an empty
list when there is no controller; `scontrol show reservation --json` of 24.11 leaves out the flag REPLACE_DOWN.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from flashrec.slurm import plaintext, records, words
from flashrec.slurm.command import Commands
from flashrec.slurm.hostlist import compress
from flashrec.slurm.scheduler import JobInfo, NodeInfo, ReservationInfo, SlurmError, StepInfo

_NO_OPTION = "unrecognized option"
_ENDED = ("already completing or completed", "already has finished", "already finished", "invalid job id")


class CliScheduler:
    """Safe to use from several tasks. Remembers only whether scontrol can print JSON."""

    def __init__(self, commands: Commands | None = None) -> None:
        self._commands = commands or Commands()
        self._has_scontrol_json: bool | None = None

    async def version(self) -> tuple[int, int]:
        text = (await self._commands.call("sinfo", "--version")).split()[-1]
        parts = text.split(".")
        if len(parts) < 2 or not all(part.isdigit() for part in parts[:2]):
            raise SlurmError(f"sinfo --version printed {text!r}")
        return int(parts[0]), int(parts[1])

    async def job(self, job_id: int) -> JobInfo:
        matching = [raw for raw in await self._squeue_json(f"--jobs={job_id}") if raw.get("job_id") == job_id]
        if len(matching) != 1:
            raise SlurmError(f"Slurm knows no job {job_id}")
        return records.job_info(matching[0])

    async def jobs(
        self, user: str | None = None, name: str | None = None, states: Collection[str] | None = None
    ) -> tuple[JobInfo, ...]:
        options = [] if user is None else ["--user", words.name(user)]
        return chosen([records.job_info(raw) for raw in await self._squeue_json(*options)], user, name, states)

    async def steps(self, job_id: int) -> tuple[StepInfo, ...]:
        argv = ("squeue", "--all", "--noheader", "--steps", f"--jobs={job_id}", "--Format", plaintext.STEP_COLUMNS)
        return plaintext.steps_of(await self._commands.call(*argv), job_id)

    async def nodes(self, names: Sequence[str] | None = None) -> dict[str, NodeInfo]:
        asked = None if names is None else [words.node_name(name) for name in names]
        if asked == []:
            return {}
        found = await self._nodes_json(*([] if asked is None else [compress(asked)]))
        return asked_for([records.node_info(raw) for raw in found], asked)

    async def reservation(self, name: str) -> ReservationInfo | None:
        return next((found for found in await self.reservations() if found.name == name), None)

    async def reservations(self) -> tuple[ReservationInfo, ...]:
        argv = ("scontrol", "--all", "--oneliner", "show", "reservation")
        every = plaintext.reservations_of(await self._commands.call(*argv))
        return tuple(sorted(every, key=lambda reservation: reservation.name))

    async def config(self) -> Mapping[str, str]:
        found = plaintext.config_of(await self._commands.call("scontrol", "show", "config"))
        if "ClusterName" not in found:
            raise SlurmError("scontrol show config: printed no configuration")
        return found

    async def cancel(self, job_id: int) -> None:
        answer = await self._commands.run("scancel", str(job_id))
        if answer.exit_code != 0 and not any(sign in answer.said.lower() for sign in _ENDED):
            raise SlurmError(f"scancel {job_id}: {answer.said or 'failed'}")

    async def set_time_limit(self, job_id: int, minutes: int) -> None:
        await self._update(f"jobid={job_id}", f"timelimit={minutes}")

    async def set_admin_comment(self, job_id: int, text: str) -> None:
        await self._update(f"jobid={job_id}", f"admincomment={words.one_line(text)}")

    async def drain(self, node: str, reason: str) -> None:
        if not reason.strip():
            raise ValueError("draining needs a reason")
        await self._set_drain(words.node_name(node), words.one_line(reason))

    async def undrain(self, node: str) -> None:
        if "DRAIN" not in (await self.nodes([node]))[node].states:
            return  # Slurm would say yes or no, by release, and count the node as not responding until its next ping
        await self._clear_drain(node)

    async def create_reservation(
        self,
        name: str,
        *,
        nodes: Sequence[str] | None = None,
        node_count: int | None = None,
        features: str | None = None,
        partition: str | None = None,
        users: Sequence[str] | None = None,
        accounts: Sequence[str] | None = None,
        flags: Collection[str] = (),
        start: str = "now",
        duration: str = "infinite",
    ) -> None:
        asked = _reservation_words(nodes, node_count, features, partition, users, accounts)
        asked += [f"starttime={words.time(start)}", f"duration={words.time(duration)}"]
        asked += [f"flags={words.names(sorted(flags))}"] if flags else []
        await self._commands.call("scontrol", "create", "reservation", f"reservationname={words.name(name)}", *asked)

    async def update_reservation(
        self,
        name: str,
        *,
        nodes: Sequence[str] | None = None,
        node_count: int | None = None,
        features: str | None = None,
        partition: str | None = None,
        users: Sequence[str] | None = None,
        accounts: Sequence[str] | None = None,
        flags: Collection[str] = (),
        duration: str | None = None,
    ) -> None:
        asked = _reservation_words(nodes, node_count, features, partition, users, accounts)
        asked += [] if duration is None else [f"duration={words.time(duration)}"]
        asked += [f"flags+={words.names(sorted(flags))}"] if flags else []
        await self._update(f"reservationname={words.name(name)}", *asked)

    async def delete_reservation(self, name: str) -> None:
        argv = ("scontrol", "delete", f"reservationname={words.name(name)}")
        answer = await self._commands.run(*argv)
        if answer.exit_code != 0 and await self.reservation(name) is not None:
            raise SlurmError(f"{' '.join(argv)}: {answer.said or 'failed'}")

    async def _set_drain(self, node: str, reason: str) -> None:
        await self._update(f"nodename={node}", "state=drain", f"reason={reason}")

    async def _clear_drain(self, node: str) -> None:
        await self._update(f"nodename={node}", "state=undrain")

    async def _update(self, *asked: str) -> None:
        await self._commands.call("scontrol", "update", *asked)

    async def _squeue_json(self, *options: str) -> list[records.Raw]:
        argv = ("squeue", "--all", "--json", "--states=all", *options)
        return records.entries(await self._commands.call(*argv), "jobs", " ".join(argv))

    async def _nodes_json(self, *asked: str) -> list[records.Raw]:
        """scontrol's records of the nodes asked for; sinfo's of all of them if this scontrol cannot print JSON."""
        if self._has_scontrol_json is not False:
            argv = ("scontrol", "--all", "--json", "show", "nodes", *asked)
            answer = await self._commands.run(*argv)
            if answer.exit_code == 0:
                self._has_scontrol_json = True
                return records.entries(answer.out, "nodes", " ".join(argv))
            if self._has_scontrol_json or _NO_OPTION not in answer.said:
                raise SlurmError(f"{' '.join(argv)}: {answer.said or 'failed'}")
            self._has_scontrol_json = False
        argv = ("sinfo", "--all", "--json")
        return records.entries(await self._commands.call(*argv), "nodes", " ".join(argv))


def chosen(
    jobs: Iterable[JobInfo], user: str | None, name: str | None, states: Collection[str] | None
) -> tuple[JobInfo, ...]:
    """Those that `Scheduler.jobs` is asked for."""
    wanted = None if states is None else frozenset(state.upper() for state in states)
    found = [
        job
        for job in jobs
        if user in (None, job.user_name, str(job.user_id))
        and name in (None, job.name)
        and (not job.is_finished if wanted is None else bool(job.states & wanted or job.state in wanted))
    ]
    return tuple(sorted(found, key=lambda job: job.job_id))


def asked_for(nodes: Iterable[NodeInfo], names: Sequence[str] | None) -> dict[str, NodeInfo]:
    """Those that `Scheduler.nodes` is asked for, in that order. SlurmError if one is missing."""
    known = {node.name: node for node in nodes}
    missing = sorted(set(names or ()) - set(known))
    if missing:
        raise SlurmError(f"Slurm knows no node {', '.join(missing)}")
    return known if names is None else {name: known[name] for name in names}


def _reservation_words(
    nodes: Sequence[str] | None,
    node_count: int | None,
    features: str | None,
    partition: str | None,
    users: Sequence[str] | None,
    accounts: Sequence[str] | None,
) -> list[str]:
    asked = {
        "nodes": None if nodes is None else compress(words.node_name(node) for node in nodes),
        "nodecnt": None if node_count is None else str(node_count),
        "features": None if features is None else words.features(features),
        "partitionname": None if partition is None else words.name(partition),
        "users": None if users is None else words.users(users),
        "accounts": None if accounts is None else words.names(accounts),
    }
    return [f"{key}={value}" for key, value in asked.items() if value is not None]
