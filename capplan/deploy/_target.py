"""What a deployment target is: a function from a plan to files, with its options, settings and losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from capplan.spec import Plan

PLAN: Final = "plan.json"
"""File of the plan in every export."""


@dataclass(frozen=True)
class Setting:
    """A value that ``--set NAME=VALUE`` changes."""

    name: str
    default: str
    description: str


@dataclass(frozen=True)
class Loss:
    """Something of a plan that a target does not do.

    Parameters
    ----------
    text
        In words.
    router
        Router of `capplan.serving.routers` that the target's is like, if it is another than the plan's.
    everywhere
        Whether the target loads every adapter on every server.
    """

    text: str
    router: str | None = None
    everywhere: bool = False


@dataclass(frozen=True)
class Exporter:
    """Turns a plan into files."""

    files: Callable[..., dict[str, str]]
    """Function of a plan, of `options` as keywords, and, if there are `settings`, of their values by name as
    ``settings``; it returns the text of each file by its path in the exported directory. A file that ends in
    ``.sh`` is written as a program."""
    top_names: frozenset[str]
    """Entries at the top of the directory, which a later export may replace."""
    serves: bool
    """Whether servers run with what the files say, and must be verified as they run: without what the files
    leave out of the plan, its scheduler, cache and re-balancing."""
    options: tuple[str, ...] = ()
    """Those of `capplan.deploy.export` that it takes."""
    settings: tuple[Setting, ...] = ()
    """What ``--set`` changes."""
    losses: Callable[[Plan], tuple[Loss, ...]] = lambda _: ()
    """What the target does not do as the plan says; also in the files, as comments."""
    notes: Callable[[Plan], tuple[str, ...]] = lambda _: ()
    """Lines for who uses the files."""
