"""The datagram that slurmstepd sends when a task has ended: true, to the right socket, and never in anybody's way."""

from __future__ import annotations

import contextlib
import os
import pwd
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.plugin.conftest import Site

pytestmark = pytest.mark.devcluster

# What makes a job step one of ours, behind any command that does not mind.
LAUNCHER = ("-m", "flashrec.agent.launch", "--exit-socket")


class Told(msgspec.Struct, frozen=True):
    """A datagram, and which user the kernel says has sent it."""

    job: int
    step: int
    task: int
    pid: int
    status: int
    sender: int


class Agent:
    """Its socket for the ends of tasks, as the agent opens it. Sockets in files do not mind network namespaces."""

    def __init__(self, path: Path, owner: int = 0) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.socket.bind(str(path))
        os.chown(path, owner, owner)

    def hear(self, timeout_s: float = 20.0) -> Told:
        self.socket.settimeout(timeout_s)
        data, ancillary, _, _ = self.socket.recvmsg(256, socket.CMSG_SPACE(12))
        _, uid, _ = struct.unpack("3i", ancillary[0][2])
        assert len(data) <= 128 and data.endswith(b"\n")
        magic, verb, *numbers = data.decode("ascii").split()
        assert (magic, verb) == ("FLASHREC1", "task_exit")
        return Told(*map(int, numbers), sender=uid)

    def has_heard_nothing(self) -> bool:
        """Meant for after the end of the job step: what is sent, is sent before."""
        self.socket.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            return not self.socket.recv(256)
        return True

    def close(self) -> None:
        self.socket.close()
        self.path.unlink(missing_ok=True)


@pytest.fixture
def agent(site: Site) -> Iterator[Agent]:
    agent = Agent(site.folder / "n1.exit")
    yield agent
    agent.close()


def _srun(site: Site, script: str, where: Path | str, *options: str, user: str | None = None) -> tuple[str, int]:
    argv = [
        "srun",
        "-w",
        "n1",
        "-N1",
        "-Q",
        *options,
        "/bin/sh",
        "-c",
        script,
        "sh",
        *LAUNCHER,
        str(where),
        "--",
        "train",
    ]
    done = site.cluster.run(argv, check=False, cwd="/", user=user)
    return done.stdout, done.returncode


@pytest.mark.parametrize(
    ("script", "status"),
    [("exit 0", 0), ("exit 3", 3 << 8), ("kill -9 $$", 9), ("kill -SEGV $$", 11), ("exit 255", 255 << 8)],
)
def test_how_a_task_ended(site: Site, agent: Agent, script: str, status: int) -> None:
    ids = site.folder / "ids"  # output of a task that is killed may be lost
    _srun(site, f"echo $SLURM_JOB_ID $SLURM_STEP_ID $SLURM_PROCID $$ > {ids}; {script}", agent.path)
    job, step, task, pid = map(int, ids.read_text().split())
    told = agent.hear()
    assert (told.job, told.step, told.task, told.pid) == (job, step, task, pid)
    assert told.status & ~0x80 == status, "but for the bit that says that there is a core file"
    assert told.sender == 0
    assert agent.has_heard_nothing()


def test_every_task_and_every_node_tells_its_own_agent(site: Site) -> None:
    agents = {node: Agent(site.folder / f"many-{node}.exit") for node in site.cluster.nodes}
    try:
        pattern = site.folder / "many-%N.exit"
        argv = ["srun", "-N2", "--ntasks-per-node=2", "-Q", "sh", "-c", "echo $SLURMD_NODENAME $SLURM_PROCID $$",
                "sh", *LAUNCHER, str(pattern)]  # fmt: skip
        said = {tuple(line.split()) for line in site.cluster.run(argv).stdout.splitlines()}
        heard = {
            (node, str(told.task), str(told.pid))
            for node, agent in agents.items()
            for told in (agent.hear(), agent.hear())
        }
        assert heard == said
        assert len(heard) == 4
    finally:
        for agent in agents.values():
            agent.close()


def test_environment_that_is_not_passed_on(site: Site, agent: Agent) -> None:
    """The socket is told, and the tasks are marked as ours, whatever --export says."""
    output, _ = _srun(site, "echo ${FLASHREC_HANDED_OVER-none}; exit 4", agent.path, "--export=NONE")
    assert output == "1\n"
    assert agent.hear().status == 4 << 8


def test_srun_inside_a_rank_is_ordinary(site: Site, agent: Agent) -> None:
    """Also when the job was submitted with the option and passes no environment on."""
    before = site.started()
    rank = f"/bin/sh -c '/usr/bin/srun --overlap -w n1 -N1 /bin/hostname' sh {' '.join(LAUNCHER)} {agent.path}"
    inner = f"srun --export=NONE -Q -N1 -w n1 {rank}"
    argv = ["salloc", "-Q", "-N2", "--flashrecovery", "env", "FLASHREC_HANDED_OVER=1", "sh", "-c", inner]
    done = site.cluster.run(argv, check=False, cwd="/")
    assert (done.stdout, done.returncode) == ("n1\n", 0), done.stderr
    assert site.started() == before


def test_other_steps_tell_nothing_and_are_not_marked(site: Site, agent: Agent) -> None:
    words = ["sh", "-c", "echo ${FLASHREC_HANDED_OVER-none}", "sh", "--", *LAUNCHER, str(agent.path)]
    assert site.cluster.run(["srun", "-w", "n1", *words]).stdout == "none\n"
    assert agent.has_heard_nothing()


# ---- the agent of another user, and what a user may try with slurmstepd, which is root


def test_unprivileged_job(site: Site) -> None:
    nobody = pwd.getpwnam("nobody").pw_uid
    agent = Agent(site.folder / "nobody.exit", nobody)
    try:
        _srun(site, "exit 3", agent.path, user="nobody")
        told = agent.hear()
        assert (told.status, told.sender) == (3 << 8, 0)
    finally:
        agent.close()


def test_socket_of_another_user(site: Site, agent: Agent) -> None:
    agent.path.chmod(0o777)
    _, code = _srun(site, "exit 3", agent.path, user="nobody")
    assert code == 3
    assert agent.has_heard_nothing()


def test_folder_that_the_user_may_not_enter(site: Site) -> None:
    closed = site.folder / "closed"
    closed.mkdir(mode=0o700)
    agent = Agent(closed / "n1.exit", pwd.getpwnam("nobody").pw_uid)
    try:
        _srun(site, "exit 3", agent.path, user="nobody")
        assert agent.has_heard_nothing()
    finally:
        agent.close()


def test_link_to_a_socket(site: Site, agent: Agent) -> None:
    link = site.folder / "link.exit"
    link.symlink_to(agent.path)
    _srun(site, "exit 3", link)
    assert agent.has_heard_nothing()


# ---- nobody is hurt


@pytest.mark.parametrize(
    "where", ["/nowhere/n1.exit", "relative.exit", "/" + "x" * 300, "/etc/passwd", "/", "", "/%N%N"]
)
def test_no_agent(site: Site, where: str) -> None:
    log = site.cluster.layout.slurmd_log("n1")
    before = log.stat().st_size
    output, code = _srun(site, "echo out; exit 3", where)
    assert (output, code) == ("out\n", 3)
    with log.open() as file:
        file.seek(before)
        said = file.read().lower()
    assert "spank" not in said and "flashrec" not in said


def test_agent_that_has_died(site: Site, agent: Agent) -> None:
    agent.socket.close()
    assert _srun(site, "echo out; exit 3", agent.path) == ("out\n", 3)


def test_agent_that_reads_nothing(site: Site, agent: Agent) -> None:
    """Its socket is full: the datagram is lost, and the step ends as ever."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as flood:
        flood.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                flood.sendto(b"x", str(agent.path))
    assert _srun(site, "echo out; exit 3", agent.path) == ("out\n", 3)
