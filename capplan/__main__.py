"""The command line: ``capplan``, and ``python -m capplan`` from an install or from a bare checkout.

Nothing is imported here but what Ctrl-C needs: the imports of a command take longer than most of them.
"""

import os
import signal
from types import FrameType

INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def quit_at_once(_: int, __: FrameType | None) -> None:
    """End the process at SIGINT while nothing has been begun: an exception would pass through imports."""
    os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def main() -> None:
    """Run the command line; never returns."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else a shell ignores it for a job
        signal.signal(signal.SIGINT, quit_at_once)
    from capplan.cli import main as run

    run()


if __name__ == "__main__":
    from capplan.__main__ import main as run_main  # one module, under one name

    run_main()
