"""Parked tasks: real launchers become real interpreters, wait, get a rank, and go with their agent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from flashrec.agent import memory, park
from flashrec.agent import workers as module
from flashrec.agent.launch import EXIT_REFUSED
from flashrec.core import events as e
from flashrec.wire import messages as m
from tests.agent.support import Node, is_running, node, play, task, until

IMPORTED = "import os, pathlib\npathlib.Path('imported').touch()\n"
SCRIPT = """
    import os, sys
    print("args", sys.argv[1:], "rank", os.environ["RANK"], flush=True)
"""


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not torch: a module that is quick to import stands for it (in the launched processes, by PYTHONPATH)."""
    (tmp_path / "heavy.py").write_text("import time\nbegan = time.monotonic()\n")
    (tmp_path / "gpu.py").write_text("def make(task):\n print('context of task', task)\n return 'no such device'\n")
    (tmp_path / "sitecustomize.py").write_text(
        "import flashrec.agent.park as p\np.IMPORTS = ('heavy',)\np.CONTEXT = 'gpu'\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{root}")


class Scene:
    """One parked task on a node that runs `text` as its script."""

    def __init__(self, it: Node, text: str, how: str = "imports", module_name: str = "", **options: str) -> None:
        self.it = it
        self.script = it.folder / "train.py"
        self.script.write_text(textwrap.dedent(text))
        words = ["--park", how, "--flags", "2"]
        for name, value in options.items():
            words += [f"--{name.replace('_', '-')}", *([value] if value else [])]
        what = ("-m", module_name) if module_name else (str(self.script),)
        self.process = it.launch(1, 0, (sys.executable, "-B", *what, "one", "two"), options=tuple(words))

    async def ready(self) -> None:
        await until(lambda: self.it.of(m.ParkedReady) or self.process.poll() is not None)
        assert self.it.of(m.ParkedReady), self.it.said()

    async def ended(self) -> Any:
        await until(lambda: self.it.of(e.WorkerExited))
        return self.it.of(e.WorkerExited)[0]

    def use(self, rank: int = 3, launch: int = 1) -> None:
        self.it.workers.use_parked(m.UseParked(launch, 0, task(rank, life=2, joins=True)))

    @property
    def log(self) -> str:
        return (self.it.folder / "rank-3.2.log").read_text()


def test_a_parked_task_becomes_the_worker_that_it_is_told_to_be() -> None:
    async def scene() -> None:
        async with node(env={"WORLD_SIZE": "4", "OMP_NUM_THREADS": "3"}) as it:
            parked = Scene(it, SCRIPT + "    print('loaded', 'heavy' in sys.modules, os.environ['OMP_NUM_THREADS'])\n")
            await parked.ready()
            assert not it.of(e.WorkerStarted), "it is nobody yet"
            parked.use()
            await parked.ended()
            assert parked.log == "args ['one', 'two'] rank 3\nloaded True 3\n"
            assert it.of(e.WorkerStarted) == [e.WorkerStarted(3, 2, parked.process.pid)]
            assert parked.process.wait() == 0

    play(scene)


SAME = """
    import __main__, inspect, json, multiprocessing, os, sys, threading

    def double(x):
        return 2 * x

    def facts():
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            doubled = pool.map(double, [21])
        return {
            "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__, "main": __main__.__file__,
            "spec": str(__spec__ and __spec__.name), "package": __package__, "doubled": doubled, "doc": __doc__,
            "flags": str(sys.flags), "orig": sys.orig_argv[1:], "source": inspect.getsource(double),
            "globals": sorted(name for name in globals() if not name.startswith("__annot")),
            "threads": threading.active_count(), "group": os.getpgrp() == os.getpid(),
            "loader": type(__loader__).__name__, "cwd": os.getcwd(), "interactive": hasattr(sys, "ps1"),
        }

    if __name__ == "__main__":
        print(json.dumps(facts(), indent=1, sort_keys=True), flush=True)
"""


@pytest.mark.parametrize("name", ["", "train"])
def test_a_script_cannot_tell_that_its_process_was_parked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        async with node() as it:
            monkeypatch.setenv("PYTHONPATH", f"{it.folder}:{os.environ['PYTHONPATH']}")
            parked = Scene(it, SAME, module_name=name)
            await parked.ready()
            parked.use()
            assert (await parked.ended()).farewell == "none"
            words = ("-m", name) if name else (str(parked.script),)
            fresh = subprocess.run(
                [sys.executable, "-B", *words, "one", "two"], capture_output=True, text=True, check=True,
                env=os.environ | {"PYTHONUNBUFFERED": "1"}, process_group=0,
            )  # fmt: skip
            assert parked.log == fresh.stdout, "but for the process itself they are the same"

    play(scene)


ENDS = {
    "exit": ("raise SystemExit(7)", 7),
    "message": ("raise SystemExit('no such data')", 1),
    "exception": ("raise ValueError('bad')", 1),
    "atexit": ("import atexit; atexit.register(print, 'last'); raise ValueError('bad')", 1),
    "signal": ("import os; os.kill(os.getpid(), 9)", -9),
    "interrupt": ("import atexit; atexit.register(print, 'last'); raise KeyboardInterrupt", -2),
}


def test_the_package_of_a_module_is_imported_when_there_is_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        async with node() as it:
            monkeypatch.setenv("PYTHONPATH", f"{it.folder}:{os.environ['PYTHONPATH']}")
            (it.folder / "pkg").mkdir()
            (it.folder / "pkg/__init__.py").write_text("import os\nRANK = os.environ.get('RANK', '0')\n")
            (it.folder / "pkg/__main__.py").write_text("import pkg, sys\nprint(pkg.RANK, __package__, sys.argv[1:])\n")
            parked = Scene(it, "", module_name="pkg")
            await parked.ready()
            parked.use()
            await parked.ended()
            assert parked.log == "3 pkg ['one', 'two']\n"

    play(scene)


@pytest.mark.parametrize("how", ENDS)
def test_it_ends_as_the_script_would_have_ended(how: str) -> None:
    text, code = ENDS[how]

    async def scene() -> None:
        async with node() as it:
            parked = Scene(it, f"\n    def work():\n        {text}\n    work()\n")
            await parked.ready()
            parked.use()
            await parked.ended()
            assert parked.process.wait() == code
            fresh = subprocess.run([sys.executable, str(parked.script)], capture_output=True, text=True, check=False)
            assert parked.log == fresh.stdout + fresh.stderr or "atexit" in text
            assert sorted(parked.log.splitlines()) == sorted((fresh.stdout + fresh.stderr).splitlines())

    play(scene)


WAITS = """
    import os, sys, time
    from flashrec.transport import task
    early = [name for name in task.OF_A_RANK if name in dict(os.environ)]
    try:
        os.environ.get("RANK", "0")
    except task.RankNotKnown as error:
        print("early", early, error, flush=True)
    task.await_assignment()
    print("rank", os.environ["RANK"], os.getenv("SLURM_LOCALID"), flush=True)
"""


def test_a_script_that_runs_before_it_has_a_rank_cannot_take_one_from_the_environment() -> None:
    async def scene() -> None:
        async with node() as it:
            parked = Scene(it, WAITS, how="script")
            await parked.ready()
            (early,) = it.folder.glob("parked-1.0-*.log")
            assert early.read_text().startswith("early [] RANK was looked up before flashrec.init()")
            parked.use()
            await parked.ended()
            assert parked.log == "rank 3 0\n"

    play(scene)


def test_a_script_that_wants_its_rank_too_early_ends_and_says_why() -> None:
    async def scene() -> None:
        async with node() as it:
            Scene(it, SCRIPT, how="script")
            await until(lambda: it.of(m.ParkedEnded))
            (ended,) = it.of(m.ParkedEnded)
            assert ended.ran and "RANK was looked up before flashrec.init()" in ended.reason
            assert not it.of(m.ParkedReady)

    play(scene)


def test_one_that_is_gone_or_never_was_is_told() -> None:
    async def scene() -> None:
        async with node() as it:
            parked = Scene(it, SCRIPT)
            await parked.ready()
            os.kill(parked.process.pid, signal.SIGKILL)
            await until(lambda: it.of(m.ParkedEnded))
            parked.use()
            parked.use(launch=5)
            assert [(said.launch, said.local_id) for said in it.of(m.ParkedEnded)] == [(1, 0), (1, 0), (5, 0)]
            assert not it.of(e.WorkerStarted)

    play(scene)


def test_one_that_is_stopped_gets_no_rank() -> None:
    async def scene() -> None:
        async with node() as it:
            parked = Scene(it, SCRIPT)
            await parked.ready()
            os.kill(parked.process.pid, signal.SIGSTOP)
            await until(lambda: Path(f"/proc/{parked.process.pid}/stat").read_text().split()[2] == "T")
            parked.use()
            await until(lambda: it.of(m.ParkedEnded))
            assert not it.of(e.WorkerStarted)

    play(scene)


def test_one_that_does_not_take_its_rank_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TAKEN_TIMEOUT_S", 0.1)

    async def scene() -> None:
        async with node() as it:
            parked = Scene(it, SCRIPT)
            await parked.ready()
            pid = parked.process.pid
            real = type(it.workers._parked).take

            def take_and_stop(self: Any, launch: int, local_id: int) -> Any:
                found = real(self, launch, local_id)
                os.kill(pid, signal.SIGSTOP)
                return found

            monkeypatch.setattr(type(it.workers._parked), "take", take_and_stop)
            parked.use()
            assert "did not take its rank" in (await parked.ended()).reason

    play(scene)


@pytest.mark.parametrize("when", ["importing", "ready"])
def test_none_outlives_its_agent(when: str, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\nopen(__file__ + '.begun', 'w').close()\ntime.sleep(60)\n")

    async def scene() -> None:
        async with node() as it:
            parked = Scene(it, SCRIPT, **({"import": "slow"} if when == "importing" else {}))
            if when == "ready":
                await parked.ready()
            else:
                await until((tmp_path / "slow.py.begun").exists)
            it.workers.close("the agent lost its manager")
            await it.workers.closed()
            assert not is_running(parked.process.pid)

    play(scene)


def test_one_whose_agent_is_suddenly_gone_ends_by_itself() -> None:
    async def scene() -> None:
        async with node() as it:
            parked = Scene(it, SCRIPT)
            await parked.ready()
            for ended in it.workers._parked._tasks.values():
                asyncio.get_running_loop().remove_reader(ended.process.fileno())
                ended.channel.abort("as if killed")
            await until(lambda: parked.process.poll() is not None)
            assert parked.process.returncode == 0
            it.workers._parked._tasks.clear()

    play(scene)


def test_when_parking_is_over_nobody_waits_and_nobody_comes() -> None:
    async def scene() -> None:
        async with node() as it:
            parked = Scene(it, SCRIPT)
            await parked.ready()
            it.workers.end_parking(m.ParkingOver("not wanted"))
            await until(lambda: parked.process.poll() is not None)
            second = it.launch(
                2, 0, (sys.executable, str(parked.script)), options=("--park", "imports", "--flags", "1")
            )
            await until(lambda: second.poll() is not None)
            assert second.returncode == EXIT_REFUSED and "not wanted" in it.said(1)

    play(scene)


def test_those_of_one_launch_can_be_ended_alone() -> None:
    async def scene() -> None:
        async with node() as it:
            parked = Scene(it, SCRIPT)
            await parked.ready()
            it.workers.end_parking(m.ParkingOver("it came too late", 7))
            await asyncio.sleep(0.1)
            assert parked.process.poll() is None
            it.workers.end_parking(m.ParkingOver("it came too late", 1))
            await until(lambda: it.of(m.ParkedEnded))

    play(scene)


def test_a_node_without_memory_parks_nothing_and_says_so() -> None:
    async def scene() -> None:
        async with node() as it:
            parked = Scene(it, SCRIPT, memory_mb="1e12")
            await until(lambda: parked.process.poll() is not None)
            assert parked.process.returncode == EXIT_REFUSED
            (ended,) = it.of(m.ParkedEnded)
            assert "MB of memory are left, hot.memory_mb asks for 1e+12" in ended.reason and not ended.ran

    play(scene)


@pytest.mark.parametrize(("options", "has_one"), [({"cuda": ""}, True), ({}, False)], ids=["cuda", "default"])
@pytest.mark.parametrize("how", ["imports", "script"])
def test_a_context_is_made_before_it_is_ready_and_is_not_missed(
    how: str, options: dict[str, str], has_one: bool
) -> None:
    async def scene() -> None:
        async with node() as it:
            waits = "\n    import flashrec.transport.task\n    flashrec.transport.task.await_assignment()"
            parked = Scene(it, waits + SCRIPT if how == "script" else SCRIPT, how, **options)
            await parked.ready()
            said = "".join(log.read_text() for log in it.folder.glob("parked-1.0-*.log"))
            assert ("context of task 0" in said) == has_one
            assert ("no CUDA context while parked: no such device" in said) == has_one
            parked.use()
            assert (await parked.ended()).reason
            assert "args ['one', 'two'] rank 3" in parked.log

    play(scene)


def test_a_module_that_cannot_be_imported_is_left_out(tmp_path: Path) -> None:
    async def scene() -> None:
        async with node() as it:
            parked = Scene(it, SCRIPT, **{"import": "nowhere.to_be_found,heavy"})
            await parked.ready()
            (log,) = it.folder.glob("parked-1.0-*.log")
            assert "nowhere.to_be_found cannot be imported while parked" in log.read_text()
            parked.use()
            assert (await parked.ended()).reason

    play(scene)


def test_while_parked_it_is_the_first_that_the_kernel_would_end_for_want_of_memory() -> None:
    async def scene() -> None:
        async with node() as it:
            text = SCRIPT + "    print('score', open('/proc/self/oom_score_adj').read())\n"
            own = Path("/proc/self/oom_score_adj").read_text().strip()
            parked = Scene(it, text)
            await parked.ready()
            assert Path(f"/proc/{parked.process.pid}/oom_score_adj").read_text() == "1000\n"
            parked.use()
            await parked.ended()
            assert f"score {own}\n" in parked.log

    play(scene)


def test_python_looks_for_modules_where_the_script_is(tmp_path: Path) -> None:
    argv = park.argv(["python3", "-u", str(tmp_path / "a b" / "t.py"), "x"], 2, "imports", ["", "numpy"])
    assert argv[:3] == ["python3", "-u", "-c"] and argv[4:] == [
        "imports",
        "numpy",
        "",  # no GPU
        "--",
        str(tmp_path / "a b" / "t.py"),
        "x",
    ]
    assert repr(str(tmp_path / "a b")) in argv[3]
    assert repr(os.getcwd()) in park.argv(["python3", "-m", "train"], 1, "imports", [])[2]


def test_memory_is_what_node_and_cgroups_leave(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable:    4000000 kB\n")
    (proc / "self/cgroup").write_text("0::/job/step\n")
    (groups / "job/step").mkdir(parents=True)
    assert memory.objection(4000, proc, groups) == ""
    assert memory.objection(4100, proc, groups) == "4096 MB of memory are left, hot.memory_mb asks for 4100"
    (groups / "job/step/memory.max").write_text("max\n")
    (groups / "job/memory.max").write_text("2000000000\n")
    (groups / "job/memory.stat").write_text("anon 900000000\ninactive_file 600000000\n")
    (groups / "job/memory.current").write_text("1500000000\n")
    assert memory.objection(1100, proc, groups) == ""
    assert memory.objection(1101, proc, groups) == "1100 MB of memory are left, hot.memory_mb asks for 1101"
    assert memory.objection(1101, tmp_path / "nothing", groups) == "", "what cannot be seen is no objection"
