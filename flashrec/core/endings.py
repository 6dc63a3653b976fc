"""How a job ends, in words and as an exit code. Pure: the state of the machine in, (reason, exit code) out."""

from __future__ import annotations

from flashrec.core.last_words import LastWords
from flashrec.core.membership import Members

EXIT_BUG = 1  # the training script raises: a retry would raise again
EXIT_REQUEUE = 75  # nothing wrong with the script: the job may be requeued (EX_TEMPFAIL)
Ending = tuple[str, int]


def all_gone(members: Members, last_words: LastWords) -> Ending:
    """No worker lives. Ranks lost after the final vote did all steps, but not their last lines."""
    late = next((words for rank, words in last_words.said.items() if members.slots[rank].finished), None)
    if late is not None:
        return f"rank {late.rank} raised an exception after the last step\n{late.raised.traceback}", EXIT_BUG
    lost = members.unplaced()
    if not lost:
        done = all(slot.finished for slot in members.slots)
        return ("all ranks have finished" if done else "all ranks have ended"), 0
    names = ", ".join(str(slot.rank) for slot in lost)
    why = lost[0].lost_because
    return f"all steps were done, but rank {names} ended before the end of the script: {why}", EXIT_REQUEUE


def nothing_left(reason: str, last_words: LastWords) -> Ending:
    """No worker with a state is left. If exceptions did it, the script is at fault."""
    words = next(iter(last_words.said.values()), None)
    if words is not None:
        return f"every rank ended with an exception; rank {words.rank}:\n{words.raised.traceback}", EXIT_BUG
    return f"{reason}; no rank with a valid state is left to restore from", EXIT_REQUEUE


def left_early(rank: int, when: str) -> Ending:
    """A rank has ended in good order without having done all steps: its state is gone and nobody else is at fault."""
    rule = "nothing can be restored then (every rank must run its step loop to the end)"
    return f"rank {rank} left its script before the last step, {when}; {rule}", EXIT_BUG


def no_room(members: Members, start_timeout_s: float, pool_said: str) -> Ending:
    """Ranks have no node. pool_said: the pool's last word, '' if it was not asked."""
    then = f"; {pool_said}" if pool_said else ""
    if not any(slot.incarnation for slot in members.slots):
        absent = [node.name for node in members.nodes.values() if not node.alive][: members.num_active]
        return f"no agent on node {', '.join(absent)} within {start_timeout_s:g} s{then}", EXIT_REQUEUE
    waiting = members.unplaced()
    why = "; ".join(sorted({slot.lost_because for slot in waiting if slot.lost_because}))
    names = ", ".join(str(slot.rank) for slot in waiting)
    return f"no spare is left for rank {names} ({why}){then}", EXIT_REQUEUE
