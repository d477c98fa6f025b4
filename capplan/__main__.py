"""The command line: ``capplan``, and ``python -m capplan`` from an install or from a bare checkout.

Nothing is imported here but what Ctrl-C needs: the imports of a command take longer than most of them.
"""

import signal

from capplan.interrupt import quit_at_once


def main() -> None:
    """Run the command line; never returns."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else a shell ignores it for a job
        signal.signal(signal.SIGINT, quit_at_once)
    from capplan.cli import main as run

    run()


if __name__ == "__main__":
    from capplan.__main__ import main as run_main  # one module, under one name

    run_main()
