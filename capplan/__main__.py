"""``python -m capplan``: the command line, from an install or from a bare checkout."""

from capplan.cli import main
from capplan.processes import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    main()
