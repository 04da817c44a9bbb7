"""`python -m topt_console`: as `topt`, for launchers that take modules."""

from topt_console import main

main()
