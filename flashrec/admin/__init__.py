"""What administrators do: pools of spare nodes, jobs of others, and whether an installation is sound."""
