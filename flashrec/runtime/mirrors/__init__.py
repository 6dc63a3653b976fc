"""Mirrors: the state of a rank, step by step, in the memory of a rank on another node. See docs/concepts/mirrors.md.

`slots` is memory for one copy of a state, `copying` fills one from the live state, `shipping` sends it to the holder,
`holder` is the holder's end, `messages` what both say to each other, `placement` who holds whose, `part` all of it
together.
"""

from flashrec.runtime.mirrors.part import Mirrors

__all__ = ["Mirrors"]
