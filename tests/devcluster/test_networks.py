"""Two networks, and faults of a link that are less than a pulled plug: what the peers see, and that nothing is left."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashrec.devcluster import forwarder, netns
from flashrec.devcluster.cluster import DevCluster
from flashrec.devcluster.errors import DevClusterError
from flashrec.devcluster.linkfaults import LinkFaults, nft_rules
from flashrec.devcluster.process import InitRecord
from flashrec.devcluster.slurmconf import render_hosts
from flashrec.devcluster.spec import ClusterSpec, Layout
from tests.devcluster.test_faults import SILENCE_S, Watch
from tests.support.cluster import dev_cluster, wait_for

# Sends COUNT datagrams to PEER, one each 2 ms, which come back; prints the round trips in ms of those that did.
ECHO = "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('', 7001)); print('up', flush=True)\nwhile True: d, a = s.recvfrom(99); s.sendto(d, a)"  # noqa: E501
ASK = """
import socket, struct, sys, time
peer, count, wait_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect((peer, 7001)); s.settimeout(0.002)
trips, order, sent, end = [], [], 0, None
while end is None or (time.monotonic() < end and len(trips) < count):
    if sent < count:
        s.send(struct.pack("=Id", sent, time.monotonic())); sent += 1
        if sent == count: end = time.monotonic() + wait_s
    try: number, at = struct.unpack("=Id", s.recv(99))
    except (TimeoutError, ConnectionRefusedError): continue
    trips.append(1000 * (time.monotonic() - at)); order.append(number)
print(len(trips), min(trips, default=0), max(trips, default=0), order == sorted(order))
"""
PYTHON = [sys.executable, "-I", "-S", "-u", "-c"]


# ---- without a cluster


def test_names_and_addresses_of_the_second_network() -> None:
    spec = ClusterSpec(num_nodes=2, fabric=True)
    assert spec.address("n0") == "10.77.0.2" and spec.address("n0", "fabric") == "10.78.0.2"
    assert spec.mac("n0") != spec.mac("n0", "fabric")
    assert "10.77.0.3 n1\n" in render_hosts(spec) and "10.78.0.3 n1-fab\n" in render_hosts(spec)
    assert "fab" not in render_hosts(ClusterSpec(num_nodes=2)), "opt-in"


def test_directions_are_the_stations() -> None:
    """What a station sends comes in through its port at the switch."""
    assert "iifname" in nft_rules("t", ["n0"], "out", "") and "oifname" not in nft_rules("t", ["n0"], "out", "")
    assert "oifname" in nft_rules("t", ["n0"], "in", "") and "iifname" not in nft_rules("t", ["n0"], "in", "")


def test_a_delay_is_within_its_bounds_and_keeps_the_order() -> None:
    class Draw:
        def random(self) -> float:
            return 0.5

        def uniform(self, low: float, high: float) -> float:
            return draws.pop(0) * high

    draws = [1.0, -1.0, -1.0]
    direction = forwarder.Direction(0.05, 0.05, 0.01, Draw())  # type: ignore[arg-type]
    assert direction.due(10.0) == pytest.approx(10.1)
    assert direction.due(10.01) == pytest.approx(10.1), "not before the one ahead of it"
    assert direction.due(10.2) == pytest.approx(10.2)
    assert forwarder.Direction(0.05, 0.05, 0.51, Draw()).due(10.0) is None  # type: ignore[arg-type]


class Kernel:
    """Stands in for `netns.run_in`: one that has netem, or none; notes what it was asked."""

    def __init__(self, has_netem: bool) -> None:
        self.has_netem, self.asked = has_netem, []

    def run_in(self, pid: int, station: str, argv: list[str], *, stdin: str = "") -> str:
        if "netem" in argv and not self.has_netem:
            raise DevClusterError(f"{station}: cannot set up the network: tc: Error: Specified qdisc kind is unknown.")
        self.asked.append(" ".join([station, *argv[1:]]))
        return ""


class Powered:
    is_alive = True

    def living_init(self) -> InitRecord:
        return InitRecord(1, 1, 1)


@pytest.fixture
def netem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[LinkFaults, Kernel]:
    kernel, layout = Kernel(has_netem=True), Layout(tmp_path, "dev")
    layout.faults("n0").parent.mkdir(parents=True)
    monkeypatch.setattr(netns, "run_in", kernel.run_in)
    return LinkFaults(ClusterSpec(num_nodes=1, fabric=True), layout, Powered()), kernel  # type: ignore[arg-type]


def test_a_kernel_that_can_delays_by_itself_at_both_ends(netem: tuple[LinkFaults, Kernel]) -> None:
    faults, kernel = netem
    faults.delay("n0", 50, 50, 1, "fabric", Powered())  # type: ignore[arg-type]
    assert kernel.asked[-2:] == [
        "switch qdisc replace dev n0-fab root netem delay 50ms 50ms loss 1%",
        "n0 qdisc replace dev fab0 root netem delay 50ms 50ms loss 1%",
    ]
    assert [str(fault) for fault in faults.standing("n0")] == ["fabric: delay 50 ± 50 ms, 1 % lost"]
    with pytest.raises(DevClusterError, match="tc does one of both; `heal-node n0` first"):
        faults.thin("n0", "10mbit", "fabric", Powered())  # type: ignore[arg-type]
    faults.undo("n0", Powered())  # type: ignore[arg-type]
    assert kernel.asked[-1] == "n0 qdisc del dev fab0 root" and faults.standing("n0") == ()


def test_a_thin_link_is_not_delayed_by_the_same_kernel(netem: tuple[LinkFaults, Kernel]) -> None:
    faults, _ = netem
    faults.thin("n0", "10mbit", "both", Powered())  # type: ignore[arg-type]
    with pytest.raises(DevClusterError, match="fabric: thin 10mbit stands"):
        faults.delay("n0", 5, 0, 0, "fabric", Powered())  # type: ignore[arg-type]


# ---- on a cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[DevCluster]:
    with dev_cluster(num_nodes=3, slurmd_timeout_s=3600, fabric=True) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def all_links_whole(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "cluster" in request.fixturenames:
        cluster = request.getfixturevalue("cluster")
        for node in cluster.status().nodes:
            if not node.is_whole:
                cluster.heal(node.name)


@pytest.fixture(scope="module")
def echo(cluster: DevCluster) -> Iterator[None]:
    process = cluster.popen([*PYTHON, ECHO], node="n1", cwd="/", stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    yield
    process.kill()
    process.communicate()


def answers(cluster: DevCluster, peer: str, count: int = 5, wait_s: float = 0.5) -> tuple[int, float, float, bool]:
    """Of `count` datagrams from n0 to a name of n1: how many came back, their shortest and longest trips in ms, and
    whether they came in the order they were sent."""
    said = cluster.run([*PYTHON, ASK, peer, str(count), str(wait_s)], node="n0", cwd="/").stdout.split()
    return int(said[0]), float(said[1]), float(said[2]), said[3] == "True"


def assert_reaches(cluster: DevCluster, *, control: bool, fabric: bool) -> None:
    """Whether n0 gets answers from n1 over each network: patient for a yes, brief for a no."""
    for peer, is_expected in (("n1", control), ("n1-fab", fabric)):
        came, *_ = answers(cluster, peer, wait_s=10 if is_expected else 0.5)
        assert (came > 0) == is_expected, peer


def left_in_switch(cluster: DevCluster) -> str:
    """Tables, queues and forwarders that stand."""
    switch = cluster._stations["switch"]
    found = ""
    for command in (["nft", "list", "tables"], ["tc", "qdisc", "show"], ["ip", "-br", "link"]):
        done = subprocess.run(switch.command(command), capture_output=True, text=True, check=True)
        found += "\n".join(line for line in done.stdout.splitlines() if re.search("table|tbf|netem|-tap", line))
    return found


@pytest.mark.devcluster
@pytest.mark.usefixtures("echo")
class TestLinks:
    def test_each_network_is_cut_alone(self, cluster: DevCluster) -> None:
        assert_reaches(cluster, control=True, fabric=True)
        cluster.partition("n1", "fabric")
        assert_reaches(cluster, control=True, fabric=False)
        assert (cluster.status().nodes[1].link_up, cluster.status().nodes[1].fabric_up) == (True, False)
        cluster.heal("n1")
        cluster.partition("n1", "control")
        assert_reaches(cluster, control=False, fabric=True)
        cluster.heal("n1")
        cluster.partition("n1")
        assert_reaches(cluster, control=False, fabric=False)
        cluster.heal("n1")
        assert_reaches(cluster, control=True, fabric=True)

    @pytest.mark.parametrize("direction", ["in", "out"])
    def test_one_direction_is_cut_alone(self, cluster: DevCluster, direction: str) -> None:
        def received() -> int:
            said = cluster.run(["ip", "-s", "-j", "link", "show", "fab0"], node="n1").stdout
            return int(json.loads(said)[0]["stats64"]["rx"]["packets"])

        assert_reaches(cluster, control=True, fabric=True)  # each knows the other's MAC from here on
        before = received()
        cluster.partition("n1", "fabric", direction)  # type: ignore[arg-type]
        assert_reaches(cluster, control=True, fabric=False)
        assert cluster.dropped("n1") >= 3
        assert (received() - before >= 3) == (direction == "out"), "deaf or dumb"
        assert cluster.status().nodes[1].faults == (f"fabric: cut ({direction})",)

    def test_packets_are_lost_at_the_rate_asked_for(self, cluster: DevCluster) -> None:
        cluster.lose("n1", 30, "fabric")
        came, *_ = answers(cluster, "n1-fab", count=400)
        assert 0.3 < came / 400 < 0.7, "0.7 twice is 0.49; five standard deviations are 0.125"
        assert answers(cluster, "n1", count=20)[0] == 20

    def test_a_link_is_thinned(self, cluster: DevCluster) -> None:
        def take_s() -> float:
            script = "import socket, sys, time\ns = socket.create_server(('', 7002)); print('up', flush=True)\nc, _ = s.accept(); b = time.monotonic(); n = 0\nwhile n < 2**18: n += len(c.recv(65536))\nprint(time.monotonic() - b)"  # noqa: E501
            server = cluster.popen([*PYTHON, script], node="n1", cwd="/", stdout=subprocess.PIPE)
            assert server.stdout is not None and server.stdout.readline() == b"up\n"
            client = "import socket; s = socket.create_connection(('n1-fab', 7002)); s.sendall(bytes(2**18)); s.recv(1)"
            cluster.run([*PYTHON, client], node="n0", cwd="/")
            return float(server.communicate()[0])

        cluster.thin("n1", "2mbit", "fabric")
        assert take_s() > 0.6, "2 Mbit at 2 Mbit/s take 1 s, less the burst"

    def test_packets_are_delayed_in_order(self, cluster: DevCluster) -> None:
        cluster.delay("n1", 50, 50, network="fabric")
        came, shortest, longest, in_order = answers(cluster, "n1-fab", count=100, wait_s=5)
        assert came == 100 and longest > 90 and shortest < longest
        by = cluster._faults.standing("n1")[0].by
        assert in_order or by == "netem"
        # A stream in large segments, with checksums left to the card, arrives unharmed.
        sender = cluster.popen(
            [*PYTHON, "import socket, hashlib; s = socket.create_server(('', 7003)); print('up', flush=True); c, _ = s.accept(); d = bytes(range(256)) * 1024; c.sendall(d)"],  # noqa: E501
            node="n1", cwd="/", stdout=subprocess.PIPE,
        )  # fmt: skip
        assert sender.stdout is not None and sender.stdout.readline() == b"up\n"
        receiver = "import socket; s = socket.create_connection(('n1-fab', 7003)); f = s.makefile('rb'); print(f.read() == bytes(range(256)) * 1024)"  # noqa: E501
        assert cluster.run([*PYTHON, receiver], node="n0", cwd="/").stdout == "True\n"
        sender.communicate()
        # Other faults hold beside it.
        cluster.partition("n1", "fabric", "in")
        assert_reaches(cluster, control=True, fabric=False)

    def test_healing_leaves_nothing(self, cluster: DevCluster) -> None:
        cluster.thin("n1", "50mbit")
        cluster.delay("n1", 5, network="control") if not _has_netem(cluster) else None
        cluster.lose("n1", 10)
        cluster.partition("n1", "fabric", "out")
        assert left_in_switch(cluster) != ""
        cluster.heal("n1")
        assert left_in_switch(cluster) == ""
        assert cluster.status().nodes[1].is_whole
        came, _, longest, _ = answers(cluster, "n1", count=20)
        assert came == 20 and longest < 1000

    def test_what_cannot_be_is_refused_by_name(self, cluster: DevCluster) -> None:
        with pytest.raises(DevClusterError, match="no node n9"):
            cluster.lose("n9", 30)
        with pytest.raises(DevClusterError, match="1 to 100 percent, not 0"):
            cluster.lose("n1", 0)
        with pytest.raises(DevClusterError, match="for example 10mbit"):
            cluster.thin("n1", "fast")
        with pytest.raises(DevClusterError, match="jitter <= mean"):
            cluster.delay("n1", 10, 20)
        assert cluster.status().nodes[1].faults == ()


def _has_netem(cluster: DevCluster) -> bool:
    return cluster._faults._has_netem()


@pytest.mark.devcluster
def test_a_power_cut_takes_both_links_and_a_boot_brings_whole_ones(cluster: DevCluster) -> None:
    cluster.delay("n2", 5, network="fabric")
    cluster.lose("n2", 10, "control")
    watch = Watch(cluster, server="n2", client="n0", host="n2-fab")
    cluster.cut_power("n2")
    time.sleep(SILENCE_S)
    assert watch.said() == b"", "silent on the fabric too"
    watch.close()
    status = cluster.status().nodes[2]
    assert (status.has_power, status.link_up, status.fabric_up) == (False, False, False)
    cluster.heal("n2")
    assert cluster.status().nodes[2].is_whole and left_in_switch(cluster) == ""
    assert "10.78.0.4/16" in cluster.run(["ip", "-o", "addr", "show", "fab0"], node="n2").stdout
    assert cluster.run(["srun", "-N1", "-w", "n2", "hostname"]).stdout == "n2\n"


@pytest.mark.devcluster
def test_a_forwarder_ends_with_its_cluster() -> None:
    with dev_cluster(num_nodes=1, fabric=True) as cluster:
        if _has_netem(cluster):
            pytest.skip("this kernel delays by itself")
        cluster.delay("n0", 5)
        pids = [pid for pid in cluster._stations["switch"].processes() if _comm(pid) == "forwarder"]
        assert len(pids) == 2, "one a link"
    wait_for(lambda: not any(_comm(pid) == "forwarder" for pid in pids), "the forwarders to end", 5)


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


@pytest.mark.devcluster
def test_a_cluster_without_a_fabric_says_how_to_get_one() -> None:
    with dev_cluster(num_nodes=1) as cluster:
        assert cluster.status().nodes[0].fabric_up is None
        with pytest.raises(DevClusterError, match="no fabric; start it with `devcluster up --fabric`"):
            cluster.partition("n0", "fabric")
