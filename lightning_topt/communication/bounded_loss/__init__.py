"""Sums of gradients by datagrams that need not all arrive; `exchange` says how it works."""
