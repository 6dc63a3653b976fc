"""Recovery timelines from a journal."""
