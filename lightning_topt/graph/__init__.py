"""Stage 1: LightningModule and example batch to OpGraph."""
