"""The console script `topt`: a subcommand, then Hydra overrides."""
