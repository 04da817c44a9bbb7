"""Ways to place blocks on a mesh: what each makes legal, what that costs, and how it is applied and undone."""
