"""Kinds of parallelism: what each hides inside torch, and how it is brought into a known state after a failure."""
