"""`python -m topt_console` does as `topt` does, for launchers that take modules."""

from topt_console import main

main()
