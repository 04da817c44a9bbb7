"""A line on the terminal that says what a command is doing, and goes when something is printed.

Where standard error is no terminal, nothing is written. It needs no thread, so a command may fork
processes while it is shown.
"""

from __future__ import annotations

import os
import sys

_CLEAR = "\r\x1b[K"


class StatusLine:
    """The line of one command; ranks of torchrun other than 0 have none."""

    def __init__(self) -> None:
        self._is_shown = False

    def show(self, text: str) -> None:
        """Show `text` in the place of what was shown."""
        if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"{_CLEAR}{text} ...")
            sys.stderr.flush()
            self._is_shown = True

    def clear(self) -> None:
        """Take the line away; call it before anything is printed."""
        if self._is_shown:
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()
            self._is_shown = False


STATUS = StatusLine()
