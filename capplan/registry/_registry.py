"""Adapter registry: a table of adapters, and of the servers that store each, that processes share."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import sqlalchemy as sa

from capplan.errors import InputError
from capplan.registry._adapter import RegisteredAdapter, RegisteredServer
from capplan.registry._database import ADAPTERS, HOLDERS, SERVERS, Database
from capplan.spec import Plan, beyond, format_key, input_limits, validate_document

_MAX_CACHED: Final = 200_000
_BATCH: Final = 500
"""Names of one query; databases bound the number of parameters."""


class ServerOwner(NamedTuple):
    """Running server that has a name: its identity, URL, and a number that grows while it runs."""

    owner: str
    url: str
    renewals: int


class AdapterRegistry:
    """Adapters of a fleet: properties, location, and the servers that store each.

    Every change is one transaction, and changes of all processes follow each other. A look-up is answered
    from memory as long as no process has changed the registry. Methods can be called from several threads.

    Parameters
    ----------
    where
        SQLite file (in WAL mode), or URL of PostgreSQL where several machines share the registry.
    create
        Make the registry if there is none.
    timeout_s
        Time to wait for a lock of another process.
    read_only
        Read only, from one thread, and within bounds of time and bytes: for registries that a workload names.

    Raises
    ------
    RegistryUnavailableError
        If there is no registry, or it cannot be used; also by all methods.
    """

    def __init__(
        self,
        where: str | os.PathLike[str],
        *,
        create: bool = False,
        timeout_s: float = 5.0,
        read_only: bool = False,
    ) -> None:
        self._database = Database(os.fspath(where), create=create, timeout_s=timeout_s, read_only=read_only)
        self._lock = threading.Lock()
        self._changes: tuple[int, int] | None = None
        self._cached: dict[str, RegisteredAdapter] = {}

    @property
    def location(self) -> str:
        """File or URL, without its password."""
        return self._database.location

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections to the database."""
        self._database.close()

    def version(self) -> tuple[int, int]:
        """Return what every committed change of any process changes, at the least cost."""
        with self._lock:
            return self._database.changes()

    def find(self, name: str) -> RegisteredAdapter | None:
        """Return an adapter as of the last committed change; None if there is none of the name."""
        with self._lock:
            changes = self._database.changes()
            if changes != self._changes or len(self._cached) > _MAX_CACHED:
                self._cached.clear()
                self._changes = changes
            adapter = self._cached.get(name)
            if adapter is None:
                for adapter in self._several(sa.select(ADAPTERS).where(ADAPTERS.c.name == name)):
                    self._cached[name] = adapter
            return adapter

    def get(self, name: str) -> RegisteredAdapter:
        """Return an adapter.

        Raises
        ------
        InputError
            If there is none of the name.
        """
        adapter = self.find(name)
        if adapter is None:
            raise self._unknown(name)
        return adapter

    def with_digest(self, digest: str) -> list[RegisteredAdapter]:
        """Return the adapters whose files have a digest."""
        return self._several(sa.select(ADAPTERS).where(ADAPTERS.c.digest == digest))

    def adapters(
        self, base_model: str | None = None, server: str | None = None, *, holders: bool = True
    ) -> list[RegisteredAdapter]:
        """Return all adapters, or those of a base model or on a server, by name.

        Parameters
        ----------
        holders
            Whether to read the servers that store them.

        Raises
        ------
        InputError
            If they are more than `InputLimits.max_adapters`, or a row breaks a rule.
        """
        query = sa.select(ADAPTERS)
        if base_model is not None:
            query = query.where(ADAPTERS.c.base_model == base_model)
        if server is not None:
            query = query.join(HOLDERS).where(HOLDERS.c.server == server)
        return self._several(query, holders=holders)

    def servers(self) -> dict[str, str]:
        """Return the URLs of servers by name."""
        with self._database.reading() as connection:
            rows = list(self._database.rows(connection, sa.select(SERVERS)))
        return {server.name: server.url for server in map(self._server, rows)}

    def add(self, *adapters: RegisteredAdapter, replace: bool = False) -> None:
        """Add adapters, all or none. Their holders are those of the registry.

        Parameters
        ----------
        replace
            Replace adapters of the same names; if the digest changes, servers that store the former files no
            longer hold the adapter.

        Raises
        ------
        InputError
            If a name is taken by another adapter, and `replace` is off, or repeats.
        """
        new = {adapter.name: adapter.replace(holders=()) for adapter in adapters}
        if len(new) < len(adapters):
            raise InputError("must be unique", location=f"{self.location}: names of adapters")
        with self._database.writing() as connection:
            known = self._known(connection, new)
            for name in known.keys() & new.keys():
                if known[name] == new[name]:
                    del new[name]
                elif not replace:
                    rule = "is taken by another adapter; --replace replaces it"
                    raise InputError(rule, name, self.location)
                elif known[name].digest != new[name].digest:
                    connection.execute(sa.delete(HOLDERS).where(HOLDERS.c.adapter == name))
            for name in known.keys() & new.keys():
                connection.execute(sa.update(ADAPTERS).where(ADAPTERS.c.name == name).values(_row(new[name])))
            rows = [_row(adapter) for name, adapter in new.items() if name not in known]
            if rows:
                connection.execute(sa.insert(ADAPTERS), rows)

    def remove(self, *names: str) -> None:
        """Remove adapters, all or none; servers of a pool delete their copies.

        Raises
        ------
        InputError
            If there is none of a name, or one repeats.
        """
        for name, times in Counter(names).items():
            if times > 1:
                raise InputError("must be unique", name, f"{self.location}: names of adapters")
        with self._database.writing() as connection:
            for name in names:
                connection.execute(sa.delete(HOLDERS).where(HOLDERS.c.adapter == name))
                if connection.execute(sa.delete(ADAPTERS).where(ADAPTERS.c.name == name)).rowcount == 0:
                    raise self._unknown(name)

    def announce(
        self, server: str, url: str, owner: str | None = None, *, unrenewed: ServerOwner | None = None
    ) -> ServerOwner | None:
        """Set the URL of a server, and its owner, unless another one has the name.

        Parameters
        ----------
        owner
            Identity of the running server; None: the owner stays.
        unrenewed
            Owner that has not renewed for so long that its name is free, if that is still so.

        Returns
        -------
        ServerOwner or None
            The other owner, whose name it stays; None: the URL is set.

        Raises
        ------
        InputError
            If name or URL is not valid.
        """
        RegisteredServer(name=server, url=url)
        with self._database.writing() as connection:
            known = SERVERS.c.name == server
            row = connection.execute(sa.select(SERVERS).where(known)).first()
            if row is None:
                new = {"name": server, "url": url, "owner": owner, "renewals": 0}
                connection.execute(sa.insert(SERVERS).values(**new))
                return None
            before = self._server(row)
            if owner is not None and before.owner not in (None, owner):
                other = ServerOwner(before.owner, before.url, before.renewals)
                if other != unrenewed:
                    return other
            fields = {
                "url": url,
                "owner": owner or before.owner,
                "renewals": before.renewals + 1,
            }
            connection.execute(sa.update(SERVERS).where(known).values(**fields))
            return None

    def renew(self, server: str, url: str, owner: str) -> bool:
        """Note that a server runs; return False if another owner has its name.

        Parameters
        ----------
        url
            Used if the server was removed from the registry while it runs: it is entered again.
        """
        with self._database.writing(counts=False) as connection:
            known = SERVERS.c.name == server
            row = connection.execute(sa.select(SERVERS.c.owner).where(known)).first()
            if row is None:
                new = {"name": server, "url": url, "owner": owner, "renewals": 0}
                connection.execute(sa.insert(SERVERS).values(**new))
                return True
            if row.owner not in (None, owner):
                return False
            fields = {"owner": owner, "renewals": SERVERS.c.renewals + 1}
            connection.execute(sa.update(SERVERS).where(known).values(**fields))
            return True

    def leave(self, server: str, owner: str) -> None:
        """Leave the name of a server, which has stopped, to any owner; it stays a holder."""
        with self._database.writing(counts=False) as connection:
            own = (SERVERS.c.name == server) & (SERVERS.c.owner == owner)
            connection.execute(sa.update(SERVERS).where(own).values(owner=None))

    def forget(self, server: str) -> None:
        """Remove a server that does not come back, and what it holds.

        Raises
        ------
        InputError
            If there is none of the name.
        """
        with self._database.writing() as connection:
            connection.execute(sa.delete(HOLDERS).where(HOLDERS.c.server == server))
            if connection.execute(sa.delete(SERVERS).where(SERVERS.c.name == server)).rowcount == 0:
                raise InputError("must be the name of a server", server, self.location)

    def hold(self, name: str, digest: str, server: str) -> None:
        """Record that a server stores an adapter.

        Raises
        ------
        InputError
            If the adapter is not in the registry, or with another digest, or the server is not announced.
        """
        with self._database.writing() as connection:
            row = connection.execute(sa.select(ADAPTERS.c.digest).where(ADAPTERS.c.name == name)).first()
            if row is None:
                raise self._unknown(name)
            if row.digest != digest:
                raise InputError("must be the digest in the registry", digest, f"{self.location}: {name}")
            if connection.execute(sa.select(SERVERS.c.name).where(SERVERS.c.name == server)).first() is None:
                raise InputError("must be the name of a server", server, self.location)
            if not _holds(connection, name, server):
                connection.execute(sa.insert(HOLDERS).values(adapter=name, server=server))

    def release(self, name: str, server: str, keeper: str) -> bool:
        """Remove a server from the holders of an adapter if another one, `keeper`, stays among them.

        The caller has let `keeper` check its copy. Of two servers that have checked each other's copies only
        one leaves: transactions follow each other, and the second one finds that its keeper has left.

        Returns
        -------
        bool
            Whether the server may delete its copy. False: `keeper` does not hold the adapter.
        """
        with self._database.writing() as connection:
            if keeper == server or not _holds(connection, name, keeper):
                return False
            _drop(connection, name, server)
            return True

    def lose(self, name: str, server: str) -> None:
        """Remove a server from the holders of an adapter: its copy is gone, even if it was the last one."""
        with self._database.writing() as connection:
            _drop(connection, name, server)

    def _several(self, query: sa.Select[Any], *, holders: bool = True) -> list[RegisteredAdapter]:
        """Return the adapters of a query, by name, with their holders as of the same change."""
        most = input_limits().max_adapters
        held: dict[str, list[str]] = {}
        with self._database.reading() as connection:
            some = query.with_only_columns(ADAPTERS.c.rank).limit(most + 1).subquery()
            if connection.execute(sa.select(sa.func.count()).select_from(some)).scalar_one() > most:
                raise InputError(beyond(most, "adapters", "--max-adapters"), location=self.location)
            rows = list(self._database.rows(connection, query))
            if holders:
                pairs = sa.select(HOLDERS.c.adapter, HOLDERS.c.server)
                if len(rows) <= _BATCH:
                    pairs = pairs.where(HOLDERS.c.adapter.in_([row.name for row in rows]))
                for adapter, holder in self._database.rows(connection, pairs):
                    held.setdefault(adapter, []).append(holder)
        found = [self._adapter(row, held.get(row.name, ())) for row in rows]
        found.sort(key=lambda adapter: adapter.name)
        for first, second in pairwise(found):
            if first.name == second.name:
                raise InputError("must be unique", first.name, f"{self.location}: {ADAPTERS.name}: name")
        return found

    def _known(self, connection: sa.Connection, names: Iterable[str]) -> dict[str, RegisteredAdapter]:
        """Return the adapters of some names, without holders."""
        wanted, found = list(names), {}
        for start in range(0, len(wanted), _BATCH):
            query = sa.select(ADAPTERS).where(ADAPTERS.c.name.in_(wanted[start : start + _BATCH]))
            for row in self._database.rows(connection, query):
                found[row.name] = self._adapter(row, ())
        return found

    def _adapter(self, row: sa.Row[Any], holders: Iterable[str]) -> RegisteredAdapter:
        modules = row.target_modules
        fields = {
            **row._mapping,
            "target_modules": modules.split() if isinstance(modules, str) else modules,
            "holders": sorted(holders, key=repr),
        }
        where = f"{self.location}: adapter {row.name}"
        return validate_document(RegisteredAdapter, fields, lambda key: f"{where}: {format_key(key)}")

    def _server(self, row: sa.Row[Any]) -> RegisteredServer:
        where = f"{self.location}: server {row.name}"
        fields = dict(row._mapping)
        return validate_document(RegisteredServer, fields, lambda key: f"{where}: {format_key(key)}")

    def _unknown(self, name: str) -> InputError:
        return InputError("must be the name of an adapter in the registry", name, self.location)


def with_locations(plan: Plan, registry: AdapterRegistry) -> Plan:
    """Return a plan whose adapters have the paths of a registry; those that it does not hold keep theirs.

    Raises
    ------
    InputError
        If an adapter has another base model or rank in the registry: the plan is for another one.
    """
    paths: dict[str, str] = {}
    for adapter in plan.adapters.values():
        known = registry.find(adapter.name)
        if known is None:
            continue
        where = f"{registry.location}: adapter {adapter.name}"
        if known.base_model != plan.base_model:
            rule = f"must be that of the plan, {plan.base_model}"
            raise InputError(rule, known.base_model, f"{where}: base_model")
        if known.rank != adapter.rank:
            raise InputError(f"must be that of the plan, {adapter.rank}", known.rank, f"{where}: rank")
        paths[adapter.name] = known.location
    groups = [
        group.model_copy(
            update={
                "adapters": tuple(
                    each.model_copy(update={"path": paths.get(each.name, each.path)})
                    for each in group.adapters
                )
            }
        )
        for group in plan.groups
    ]
    return plan.model_copy(update={"groups": tuple(groups)})


def _row(adapter: RegisteredAdapter) -> dict[str, Any]:
    modules = adapter.target_modules
    return {
        **adapter.model_dump(exclude={"holders"}),
        "target_modules": None if modules is None else " ".join(modules),
    }


def _holds(connection: sa.Connection, name: str, server: str) -> bool:
    pair = (HOLDERS.c.adapter == name) & (HOLDERS.c.server == server)
    return connection.execute(sa.select(HOLDERS.c.server).where(pair)).first() is not None


def _drop(connection: sa.Connection, name: str, server: str) -> None:
    connection.execute(sa.delete(HOLDERS).where((HOLDERS.c.adapter == name) & (HOLDERS.c.server == server)))
