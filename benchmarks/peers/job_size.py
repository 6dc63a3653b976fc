"""Sizes that scripts and driver share; imports nothing."""

NUM_NODES, NUM_RANKS = 3, 2  # n0 is the batch host, the store's host and the spare; a rank on each other node
STEPS, EVERY = 40, 10  # of a run; from one checkpoint to the next
FAULT_AFTER = 24  # the step after whose log line the fault comes: in the middle between two checkpoints
