"""Every private name of torch that the runtime needs. No module outside of this package uses one.

`versions` checks at start-up that they are there, `groups` is about process groups and their backends, `ddp` and
`optim` about what training code holds. A module for a kind of parallelism that a script may not use names its own
needs in `needed()` and is checked when the session finds that kind: nobody pays for importing what is not used.
"""
