"""What heartbeats over MPI cost in CPU and memory: hub, beater, manager and agent. `make bench-mpi`."""
