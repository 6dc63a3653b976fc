"""A restore against raw TCP on the same path and against copying memory."""
