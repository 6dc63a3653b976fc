"""What root does for FlashRecovery on a node when a job starts and ends. Called by flashrec-prolog and flashrec-epilog.

Standard library only, Python 3.6 or later: nothing of flashrec need be installed where root runs this.

Rules:
* a failing prolog or epilog drains the node, so nothing in here fails, and everything is bounded in time;
* what a user wrote (a report, a comment, a job's name) is a hint, never a fact. Facts are what slurmd told us about the
  job, what we wrote down ourselves when it started, and what Slurm says;
* undo only what bears our own mark, and never take over a node that somebody else has drained.

prolog  writes down which nodes the job has, makes a folder in which the job's user may leave a report, and, for a
        companion job, gives the repaired job the time that plugstack.conf grants (extend=, delay=).
epilog  cancels the companion jobs of a job that has ended (by their admin comment, which users cannot set), and drains
        the nodes that the job reported as faulty, if they were its own and the site allows it (drain=user, max_drain=)

In EpilogSlurmctld only the first of these two is done. Contract: docs/reference/plugin-contract.md.
"""

import glob
import json
import os
import pwd
import re
import signal
import stat
import subprocess
import sys
import syslog
import zlib

SPOOL = "/var/spool/flashrec"  # SPOOL/CLUSTER/NODE/JOBID/{nodes,report/faulty}
CALL_TIMEOUT_S = 6
MAX_REPORT_BYTES = 4096
MAX_REPORTED = 8
MAX_REASON = 100
MARK = "flashrec: job "
CLEANERS = 8  # about so many nodes of a large job look for companion jobs

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}\Z")
_NUMBER = re.compile(r"[0-9]{1,10}\Z")
_SERVES = re.compile(r"flashrec:spare-for=([0-9]{1,10})\Z")
_EXTENDED = re.compile(r"(?:\A|\s)flashrec:extended=([0-9]{1,4})\Z")
_ENDED = {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE"}
_ENDED |= {"OUT_OF_MEMORY", "COMPLETING", "REVOKED"}


class Unavailable(Exception):
    """Slurm could not be asked: that is not an answer."""


class Job:
    """The job whose hook we are, as slurmd (or slurmctld) describes it."""

    def __init__(self, environ):
        number = environ.get("SLURM_JOB_ID", "")
        uid = environ.get("SLURM_JOB_UID", environ.get("SLURM_UID", ""))
        if not _NUMBER.match(number) or not _NUMBER.match(uid):
            raise ValueError("SLURM_JOB_ID and SLURM_JOB_UID are not set: call this from Prolog or Epilog")
        self.id, self.uid = int(number), int(uid)
        self.node = environ.get("SLURMD_NODENAME", "")
        self.hostlist = environ.get("SLURM_JOB_NODELIST", environ.get("SLURM_NODELIST", ""))
        count = environ.get("SLURM_JOB_NUM_NODES", environ.get("SLURM_NNODES", ""))
        self.num_nodes = max(1, int(count)) if _NUMBER.match(count) else 1
        self.comment = environ.get("SLURM_JOB_COMMENT", "")
        self.is_controller = environ.get("SLURM_SCRIPT_CONTEXT", "").endswith("slurmctld")
        cluster = environ.get("SLURM_CLUSTER_NAME", "cluster")
        self.folder = None
        if _NODE.match(self.node) and _NODE.match(cluster):
            self.folder = os.path.join(SPOOL, cluster, self.node, str(self.id))


# ---- Slurm


def call(*argv):
    """Standard output of a command. Unavailable if it fails or does not end in time."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SQUEUE_", "SINFO_", "SLURM_TIME_FORMAT"))}
    environ["LC_ALL"] = "C"
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ,
            start_new_session=True,
        )  # fmt: skip
    except OSError as err:
        raise Unavailable(f"{argv[0]}: {err}") from err
    try:
        out, said = process.communicate(timeout=CALL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except OSError:
            pass
        raise Unavailable(f"{argv[0]} did not answer within {CALL_TIMEOUT_S} s") from None
    if process.returncode != 0:
        raise Unavailable("{}: {}".format(" ".join(argv), said.decode(errors="replace").strip()[-300:]))
    return out.decode(errors="replace")


def jobs_of(uid):
    """Slurm's records of the user's jobs, plain dicts: id, states, admin, nodes, submitted, started."""
    try:
        raws = json.loads(call("squeue", "--all", "--json", "--states=all", f"--user={uid}"))["jobs"]
        found = [job_record(raw) for raw in raws]
    except (ValueError, KeyError, TypeError) as err:
        raise Unavailable(f"squeue --json printed something else: {err!r}") from err
    return {job["id"]: job for job in found if job["uid"] == uid}  # 22.05 lists everybody's jobs


def job_record(raw):
    states = raw["job_state"] if isinstance(raw["job_state"], list) else [raw["job_state"]]
    return {
        "id": int(raw["job_id"]),
        "uid": int(raw["user_id"]),
        "states": {word for state in states for word in str(state).upper().split("+")},
        "admin": raw.get("admin_comment") or "",
        "nodes": raw.get("nodes") or "",
        "submitted": number(raw.get("submit_time")),
        "started": number(raw.get("start_time")),
    }


def number(value):
    """An integer, or a later release's {set, infinite, number}."""
    if isinstance(value, dict):
        value = value.get("number") if value.get("set") else 0
    return int(value or 0)


def has_ended(job):
    return bool(job["states"] & _ENDED)


def served(job):
    match = _SERVES.match(job["admin"])
    return int(match.group(1)) if match else None


def expand(hostlist):
    """Names of a host list. scontrol ends well and prints nothing for what is none."""
    if not hostlist or not re.match(r"[A-Za-z0-9_.,\[\]-]+\Z", hostlist):
        return []
    return call("scontrol", "show", "hostnames", hostlist).split()


# ---- our line in plugstack.conf


def settings(environ):
    """KEY=VALUE words of our line, found beside slurm.conf."""
    folder = os.path.dirname(environ.get("SLURM_CONF", "/etc/slurm/slurm.conf"))
    for path in [os.path.join(folder, "plugstack.conf")] + sorted(glob.glob(folder + "/plugstack.conf.d/*.conf")):
        try:
            with open(path, errors="replace") as file:
                lines = file.read(65536).splitlines()
        except OSError:
            continue
        for line in lines:
            words = line.partition("#")[0].split()
            if len(words) > 1 and words[0] in ("optional", "required") and words[1].endswith("flashrecovery.so"):
                return dict(word.partition("=")[::2] for word in words[2:])
    return {}


def whole_number(text):
    return int(text) if text and _NUMBER.match(text) and int(text) < 100000 else 0


# ---- prolog


def record(job):
    """Write down the job's nodes, and make the user's folder for a report."""
    attempt(remove, job.folder)  # of an earlier life of a requeued job
    os.makedirs(job.folder, mode=0o755, exist_ok=True)
    with open(os.path.join(job.folder, "nodes"), "w") as file:
        file.write(job.hostlist + "\n")
    report = os.path.join(job.folder, "report")
    os.mkdir(report, 0o700)
    os.chown(report, job.uid, pwd.getpwuid(job.uid).pw_gid)


def grant_time(job, granted):
    """After a replacement: the job that this companion job serves gets more time, and so do all its companions.

    Not more often than max_per_job, or a job would live for ever by taking nodes from the pool and giving them back.
    """
    extend, delay = whole_number(granted.get("extend")), whole_number(granted.get("delay"))
    is_companion = job.num_nodes == 1 and job.comment.startswith("flashrec:spare-for=")  # a hint that saves a question
    if not (extend or delay) or not is_companion:
        return
    jobs = jobs_of(job.uid)
    mine = jobs.get(job.id)
    main = jobs.get(served(mine)) if mine else None
    if main is None or "RUNNING" not in main["states"] or has_ended(main):
        return
    waited = max(0, mine["started"] - mine["submitted"] + 59) // 60 if mine["started"] else 0
    more = extend + min(delay, waited)
    if more and count_grant(main, whole_number(granted.get("max_per_job", "2"))):
        for other in [main] + [j for j in jobs.values() if served(j) == main["id"] and not has_ended(j)]:
            try:
                call("scontrol", "update", "jobid={}".format(other["id"]), f"timelimit=+{more}")
                log("job {}: time limit +{} min for its replacement by job {}".format(other["id"], more, job.id))
            except Unavailable as err:  # no limit at all, for example
                log(f"time limit: {err}")


def count_grant(main, allowed):
    """Note in the job's admin comment, behind what the site has there, that it gets more time. False: often enough."""
    before = _EXTENDED.search(main["admin"])
    times = int(before.group(1)) if before else 0
    if times >= allowed:
        log("job {}: no more time, it was given {} times already (max_per_job)".format(main["id"], times))
        return False
    text = "{} flashrec:extended={}".format(_EXTENDED.sub("", main["admin"]), times + 1).strip()
    call("scontrol", "update", "jobid={}".format(main["id"]), "admincomment=" + text)
    return True


# ---- epilog


def cancel_companions(job, policy):
    """Of a job that has ended: this also runs where a node leaves a job that goes on."""
    if not job.is_controller and zlib.crc32(f"{job.id} {job.node}".encode()) % job.num_nodes >= CLEANERS:
        return
    # Every job of the cluster ends here. This question is cheap; 22.05 answers the next one with all jobs of all users.
    pool = policy.get("pool") or "flashspare"
    if not call("squeue", "--all", "--noheader", f"--user={job.uid}", f"--reservation={pool}", "--format=%A").strip():
        return
    jobs = jobs_of(job.uid)
    main = jobs.get(job.id)
    if main is not None and not has_ended(main):
        return
    for other in jobs.values():
        if served(other) == job.id and not has_ended(other):
            attempt(cancel, job, other)


def cancel(job, companion):
    call("scancel", str(companion["id"]))
    log("job {}: companion job {} cancelled".format(job.id, companion["id"]))


def read_report(folder, uid):
    """(node, reason) pairs of what the user left in our folder. The folder is his: trust nothing about the file."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    place = os.open(os.path.join(folder, "report"), flags | os.O_DIRECTORY)
    try:
        file = os.open("faulty", flags, dir_fd=place)
    finally:
        os.close(place)
    try:
        seen = os.fstat(file)
        if not stat.S_ISREG(seen.st_mode) or seen.st_uid != uid or seen.st_nlink != 1:
            raise ValueError(f"not a plain file of user {uid}")
        if seen.st_size > MAX_REPORT_BYTES:
            raise ValueError(f"larger than {MAX_REPORT_BYTES} bytes")
        text = os.read(file, MAX_REPORT_BYTES).decode("ascii", errors="replace")
    finally:
        os.close(file)
    found = {}
    for line in text.split("\n"):
        node, _, reason = line.strip().partition(" ")
        if _NODE.match(node) and node not in found:
            found[node] = sanitised(reason)
    return list(found.items())[:MAX_REPORTED]


def remove(folder):
    """Half of it is the user's: rm follows no link, crosses no mount and knows no tree that is too deep."""
    call("rm", "-rf", "--one-file-system", "--", folder)


def sanitised(text):
    clean = "".join(char if " " <= char <= "~" else "?" for char in text)
    return clean.replace('"', "'").strip()[:MAX_REASON] or "no reason given"


def nodes_of(job):
    """Nodes that were the job's: by our own record and by slurmd, and the nodes of its companion jobs."""
    with open(os.path.join(job.folder, "nodes")) as file:
        recorded = expand(file.read(65536).strip())
    known = set(recorded) | set(expand(job.hostlist))
    for other in jobs_of(job.uid).values():
        if served(other) == job.id:
            known.update(expand(other["nodes"]))
    return (recorded[0] if recorded else None), known


def drain_reported(job, policy):
    """Only on the job's first node, so that one report speaks for a job and its drains can be counted."""
    try:
        reported = read_report(job.folder, job.uid)
    except FileNotFoundError:
        return
    first, known = nodes_of(job)
    if job.node != first:
        return
    allowed = int(policy["max_drain"]) if _NUMBER.match(policy.get("max_drain", "")) else 2
    for node, reason in reported:
        if node not in known:
            log(f"job {job.id}: reported node {node}, which was not its own")
        elif policy.get("drain") != "user":
            log(f"job {job.id}: reported node {node}: {reason} (drain=user would drain it)")
        else:
            drain(job, node, reason, allowed)


def drain(job, node, reason, allowed):
    """Drain one node, unless somebody has already or too many are. Counted again after: several jobs end at once."""
    if "drain" in call("sinfo", "--all", "--noheader", "--Node", "--nodes=" + node, "--format=%T").lower():
        return
    if len(marked()) >= allowed:
        log(f"job {job.id}: node {node} not drained: {allowed} nodes are already (max_drain)")
        return
    text = f"{MARK}{job.id}: {reason}"
    call("scontrol", "update", "nodename=" + node, "state=drain", "reason=" + text)
    if len(marked()) > allowed:
        call("scontrol", "update", "nodename=" + node, "state=undrain")
        log(f"job {job.id}: node {node} not drained: too many at once (max_drain)")
    else:
        log(f"node {node} drained: {text}")


def marked():
    """Nodes that are drained with our mark. Only administrators write reasons."""
    found = set()
    for line in call("sinfo", "--all", "--noheader", "--Node", "--format=%N|%T|%E").splitlines():
        node, _, rest = line.partition("|")
        state, _, reason = rest.partition("|")
        if "drain" in state.lower() and reason.startswith(MARK):
            found.add(node)
    return found


# ---- both


def log(text):
    syslog.syslog(syslog.LOG_NOTICE, text)


def attempt(part, *arguments):
    """One part failing keeps no other from its work, and never the hook from ending well."""
    try:
        part(*arguments)
    except Exception as err:
        log(f"{part.__name__}: {err!r}")


def main(which, environ):
    syslog.openlog("flashrec-" + which, syslog.LOG_PID, syslog.LOG_DAEMON)
    try:
        job = Job(environ)
    except ValueError as err:
        log(str(err))
        return
    if which == "prolog":
        if job.folder:
            attempt(record, job)
        attempt(grant_time, job, settings(environ))
    elif which == "epilog":
        attempt(cancel_companions, job, settings(environ))
        if job.folder and not job.is_controller:
            attempt(drain_reported, job, settings(environ))
            attempt(remove, job.folder)


if __name__ == "__main__":
    os.umask(0o022)
    main(sys.argv[1] if len(sys.argv) > 1 else "", dict(os.environ))
