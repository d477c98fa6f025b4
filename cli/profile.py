"""`capplan profile`: measure kernels, engines or servers; reckon profiles of what nobody measured."""

from __future__ import annotations

import typer

from capplan.cli.profile_engine import engine
from capplan.cli.profile_kernels import kernels
from capplan.cli.profile_roofline import roofline
from capplan.cli.profile_server import server

profile = typer.Typer(no_args_is_help=True, help="Measure what profiles are made of.")


@profile.callback()
def _group() -> None:
    """Measure what profiles are made of."""


profile.command()(engine)
profile.command()(kernels)
profile.command()(roofline)
profile.command()(server)
