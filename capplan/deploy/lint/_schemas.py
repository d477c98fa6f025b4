"""Schemas of custom resources and of the values of a chart, as a cluster or a repository has them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from capplan.deploy.lint._parts import Document, mapping, mappings
from capplan.deploy.lint._servers import documents
from capplan.errors import InputError
from capplan.spec import parse_json, read_text

_DEFINITION: Final = "CustomResourceDefinition"
_SUFFIXES: Final = (".yaml", ".yml", ".json")
_LONGEST: Final = 300
"""Characters of a message, which may hold the whole object."""


@dataclass(frozen=True)
class Schemas:
    """Schemas of kinds, by ``apiVersion`` and kind, and of the values of a chart."""

    kinds: Mapping[tuple[str, str], Any]
    values: Any = None

    def of(self, document: Document) -> Any:
        """Return the schema of a document; None without one."""
        if not document.kind:
            return self.values if "servingEngineSpec" in document.data else None
        return self.kinds.get((str(document.data.get("apiVersion")), document.kind))

    def errors(self, document: Document) -> Iterator[tuple[tuple[str | int, ...], str]]:
        """Yield the key and the message of what is not valid; nothing without a schema."""
        from jsonschema import Draft202012Validator
        from referencing import Registry
        from referencing.exceptions import Unresolvable

        schema = self.of(document)
        if schema is None:
            return
        try:
            # An empty registry: nothing that a schema refers to is fetched.
            for error in Draft202012Validator(schema, registry=Registry()).iter_errors(document.data):
                yield tuple(error.absolute_path), error.message[:_LONGEST]
        except Unresolvable as error:
            yield (), f"its schema refers to {error.ref}, which it does not hold"


def read_schemas(paths: Iterable[str | os.PathLike[str]]) -> Schemas:
    """Return the schemas of files and folders: definitions of custom resources, and a schema of values.

    A file that cannot be read, or holds none, is an error.
    """
    kinds: dict[tuple[str, str], Any] = {}
    values = None
    for path in map(Path, paths):
        files = (
            sorted(each for each in path.iterdir() if each.suffix in _SUFFIXES) if path.is_dir() else [path]
        )
        known = len(kinds), values
        for file in files:
            text = read_text(file)
            if file.suffix == ".json" and "properties" in (data := mapping(parse_json(text, str(file)))):
                values = _checked(_closed(data), str(file))
            else:
                kinds |= _definitions(documents(str(file), text))
        if known == (len(kinds), values):
            wanted = (
                "CustomResourceDefinitions (kubectl get crd -o yaml) or the values.schema.json of a chart"
            )
            raise InputError(f"must hold {wanted}", location=str(path))
    return Schemas(kinds, values)


def _definitions(found: Iterable[Document]) -> dict[tuple[str, str], Any]:
    """Return the schemas of definitions, also of those in a list, as ``kubectl`` prints them."""
    kinds = {}
    for document in found:
        items = document.data.get("items") if document.kind == "List" else [document.data]
        for _, data in mappings(items):
            spec = mapping(data.get("spec")) if data.get("kind") == _DEFINITION else {}
            kind = str(mapping(spec.get("names")).get("kind"))
            for _, version in mappings(spec.get("versions")):
                schema = mapping(version.get("schema")).get("openAPIV3Schema")
                if version.get("served") and schema is not None:
                    name = f"{spec.get('group')}/{version.get('name')}"
                    kinds[name, kind] = _checked(_closed(schema), document.file)
    return kinds


def _checked(schema: Any, file: str) -> Any:
    """Return a schema that is one; another document is an error."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError

    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise InputError(f"must hold JSON Schemas: {error.message[:_LONGEST]}", location=file) from None
    return schema


def _closed(schema: Any) -> Any:
    """Return a schema of Kubernetes or Helm as JSON Schema that refuses properties which it does not list.

    The API server rejects them, or drops them without a word.
    """
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            result[key] = {name: _closed(each) for name, each in value.items()}
        elif not key.startswith("x-kubernetes-") and key not in ("nullable", "default", "description"):
            result[key] = _closed(value)
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        result.setdefault("additionalProperties", False)
    if schema.get("nullable") and isinstance(schema.get("type"), str):
        result["type"] = [schema["type"], "null"]
    return result
