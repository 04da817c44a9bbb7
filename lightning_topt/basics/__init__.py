"""What every folder may import and none of which imports anything of this package, nor torch."""
