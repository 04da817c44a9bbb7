"""The wait for data is measured and modelled: what it is made of, and what would shorten it."""
