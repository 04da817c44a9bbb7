"""4. Frontier -> ParallelPlan: choose one and say why, write it, show it."""
