from tests.cli.conftest import process, run

__all__ = ["process", "run"]
