"""How long a recovery takes, phase by phase: kinds of faults and what the replacement had done before."""
