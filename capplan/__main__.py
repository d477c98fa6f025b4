"""``python -m capplan``: the command line, from an install or from a bare checkout."""

from capplan.cli import main

if __name__ == "__main__":
    main()
