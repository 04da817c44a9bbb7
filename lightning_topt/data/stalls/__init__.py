"""What waiting for data is made of: measured, modelled, and what would shorten it."""
