"""Heartbeats over MPI on the training fabric, so that a lost link can be told from a lost node.

libmpi may hang, spin or abort when a peer dies. So it lives in a child process of its own that may be killed at any
time: the manager has a *hub*, each agent a *beater*, and a `Supervisor` on either side starts, watches and replaces it.
No MPI world is shared: each process is an MPI singleton, and each beater has one intercommunicator with the hub, over
which only the beater sends. Who is to meet whom, and when, is said over the control connection (docs/decisions/0017).

mpi4py is imported in these children only (`library.load`).
"""
