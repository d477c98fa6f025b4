"""`capplan registry`: adapters of a fleet, their locations, and the servers that store them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from capplan.cli.options import AsJson, command
from capplan.errors import InputError
from capplan.reports import DASH, Table, counted, number, print_json, print_table
from capplan.spec import ALL_LINEAR, LORA_MODULES, local_folder, path_kind

if TYPE_CHECKING:
    from capplan.registry import RegisteredAdapter

RegistryUrl: TypeAlias = Annotated[
    str,
    typer.Option(
        "--registry", metavar="URL", envvar="CAPPLAN_REGISTRY", help="SQLite file, or URL of PostgreSQL."
    ),
]
_DEFAULT = "adapters.db"


@dataclass(frozen=True, kw_only=True)
class AddArgs:
    """Options of `capplan registry add`."""

    adapters: list[str] = typer.Argument(
        metavar="NAME=LOCATION ...",
        help="Adapters: a PEFT folder on this machine; or, with --rank, any reference, such as a URL.",
    )
    registry: RegistryUrl = _DEFAULT
    base_model: str | None = typer.Option(
        None, metavar="ID", help="Base model; default: the one that the folder's adapter_config.json names."
    )
    rank: int | None = typer.Option(None, metavar="N", min=1, help="LoRA rank of references.")
    target_modules: str | None = typer.Option(
        None,
        metavar="NAMES",
        help="Linear layers of references, separated by commas; default: all that the engine adapts.",
    )
    size_bytes: int | None = typer.Option(None, metavar="N", min=1, help="Bytes of a reference's files.")
    digest: str | None = typer.Option(
        None, metavar="SHA256", help="Digest of a reference; without one no server can fetch it."
    )
    replace: bool = typer.Option(False, "--replace", help="Replace adapters of the same names.")
    as_json: AsJson = False


@command
def add(args: AddArgs) -> None:
    """Add adapters by folder or by reference, all or none.

    The registry is made if there is none. A folder is checked as the engine does, and its rank, layers, bytes
    and digest are read.
    """
    from capplan.registry import AdapterRegistry

    found = [_described(word, args) for word in args.adapters]
    if len(found) > 1 and args.digest is not None:
        raise InputError("is of one adapter", args.digest, "--digest")
    with AdapterRegistry(args.registry, create=True) as registry:
        registry.add(*found, replace=args.replace)
        location = registry.location
    if args.as_json:
        print_json([each.model_dump(mode="json") for each in found])
    else:
        typer.echo(f"{counted(len(found), 'adapter')} in {location}")


def _described(word: str, args: AddArgs) -> RegisteredAdapter:
    """Return the entry of ``NAME=LOCATION``."""
    from capplan.registry import RegisteredAdapter, read_adapter

    name, equals, location = word.partition("=")
    if not (name and equals and location):
        raise InputError("must be NAME=LOCATION", word, "adapter")
    of_references = ("rank", "target_modules", "size_bytes", "digest")
    if (folder := local_folder(location)) is not None:
        for option in of_references:
            if getattr(args, option) is not None:
                flag = f"--{option.replace('_', '-')}"
                raise InputError(f"is read from the folder {location}", getattr(args, option), flag)
        return read_adapter(name, folder, args.base_model)
    if path_kind(location) == "folder" and not location.startswith("/"):
        raise InputError(
            "must be a folder on this machine, an absolute path, a Hugging Face id or a URL", location, name
        )
    for option in ("rank", "base_model"):
        if getattr(args, option) is None:
            flag = f"--{option.replace('_', '-')}"
            raise InputError(f"is required: {location} is no folder on this machine", location=flag)
    modules = args.target_modules
    chosen = modules if modules in (None, ALL_LINEAR) else tuple(modules.split(","))
    fields = {each: getattr(args, each) for each in (*of_references, "base_model")}
    return RegisteredAdapter(name=name, location=location, **fields | {"target_modules": chosen})


@dataclass(frozen=True, kw_only=True)
class ListArgs:
    """Options of `capplan registry list`."""

    registry: RegistryUrl = _DEFAULT
    base_model: str | None = typer.Option(None, metavar="ID", help="Those of this base model.")
    server: str | None = typer.Option(None, metavar="NAME", help="Those that this server stores.")
    as_json: AsJson = False


@command
def list_(args: ListArgs) -> None:
    """List the adapters of a registry."""
    from capplan.registry import AdapterRegistry

    with AdapterRegistry(args.registry, read_only=True) as registry:
        if args.server is not None and args.server not in registry.servers():
            raise InputError("must be the name of a server", args.server, registry.location)
        found = registry.adapters(args.base_model, args.server)
    if args.as_json:
        print_json([each.model_dump(mode="json") for each in found])
        return
    rows = [
        (
            each.name,
            each.base_model,
            _modules(each),
            each.location,
            str(each.rank),
            number(each.size_bytes),
            str(len(each.holders)),
        )
        for each in found
    ]
    head = ("adapter", "base model", "target modules", "location", "rank", "bytes", "servers")
    print_table(Table(head, rows, numbers_from=4))


@dataclass(frozen=True, kw_only=True)
class ShowArgs:
    """Options of `capplan registry show`."""

    name: str = typer.Argument(metavar="NAME", help="Which adapter.")
    registry: RegistryUrl = _DEFAULT
    as_json: AsJson = False


@command
def show(args: ShowArgs) -> None:
    """Show an adapter: properties, location, and the servers that store it."""
    from capplan.registry import AdapterRegistry

    with AdapterRegistry(args.registry, read_only=True) as registry:
        adapter = registry.get(args.name)
        servers = registry.servers()
    holders = {name: servers.get(name) for name in adapter.holders}
    if args.as_json:
        print_json({**adapter.model_dump(mode="json"), "holders": holders})
        return
    rows = [
        ("base model", adapter.base_model),
        ("rank", str(adapter.rank)),
        ("target modules", _modules(adapter)),
        ("bytes", number(adapter.size_bytes)),
        ("digest", adapter.digest or DASH),
        ("location", adapter.location),
        ("servers", ", ".join(f"{name} ({url})" for name, url in holders.items()) or DASH),
    ]
    print_table(Table(("adapter", adapter.name), rows, numbers_from=None))


@dataclass(frozen=True, kw_only=True)
class RemoveArgs:
    """Options of `capplan registry remove`."""

    names: list[str] | None = typer.Argument(None, metavar="[NAME ...]", help="Adapters to remove.")
    server: str | None = typer.Option(
        None, metavar="NAME", help="Remove this server, which does not come back, and what it holds."
    )
    registry: RegistryUrl = _DEFAULT


@command
def remove(args: RemoveArgs) -> None:
    """Remove adapters, or a server that does not come back.

    Files at the location of an adapter stay. Servers of a pool delete their copies.
    """
    from capplan.registry import AdapterRegistry

    if args.names and args.server is not None:
        raise InputError("does not go with NAME", args.server, "--server")
    if not args.names and args.server is None:
        raise InputError("is required, or --server", location="NAME")
    with AdapterRegistry(args.registry) as registry:
        registry.remove(*args.names or ())
        if args.server is not None:
            registry.forget(args.server)
        location = registry.location
    removed = counted(len(args.names), "adapter") if args.names else f"server {args.server}"
    typer.echo(f"{removed} removed from {location}")


def _modules(adapter: RegisteredAdapter) -> str:
    modules = adapter.target_modules
    return ALL_LINEAR if modules in (None, LORA_MODULES) else " ".join(modules)
