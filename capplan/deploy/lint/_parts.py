"""Parts of inputs, which rules look at: documents, servers with their flags, adapter folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from capplan.deploy._deployed import Served
from capplan.errors import InputError
from capplan.spec import FolderAdapter, Key, Plan, Workload, parse_json

RUNTIME_UPDATES: Final = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
_MOST_DIGITS: Final = 9


@dataclass(frozen=True, kw_only=True)
class Part:
    """Something in an input, at a line of a file if there is one."""

    file: str
    line: int | None = None


@dataclass(frozen=True, kw_only=True)
class BrokenFile(Part):
    """A file of a known kind that cannot be loaded."""

    error: InputError


@dataclass(frozen=True, kw_only=True)
class TextFile(Part):
    """The text of a file."""

    text: str


@dataclass(frozen=True, kw_only=True)
class PlanFile(Part):
    """A plan."""

    plan: Plan


@dataclass(frozen=True, kw_only=True)
class WorkloadFile(Part):
    """A workload."""

    workload: Workload


@dataclass(frozen=True, kw_only=True)
class AdapterFolder(Part):
    """A PEFT folder."""

    folder: Path
    found: FolderAdapter


@dataclass(frozen=True, kw_only=True)
class RunningServer(Part):
    """A running OpenAI-compatible server."""

    served: Served


@dataclass(frozen=True, kw_only=True)
class Document(Part):
    """A YAML document that is a mapping, such as an object of Kubernetes."""

    data: Mapping[str, Any]
    locate: Callable[[Key], str]
    """Function of a key that returns ``:LINE: key``, of the document alone."""
    start: int
    """Lines of the file before it."""

    @property
    def kind(self) -> str:
        """Kind of an object of Kubernetes; empty for others."""
        return str(self.data.get("kind", ""))

    @property
    def api_group(self) -> str:
        """API group of an object of Kubernetes; empty for the core group and for others."""
        return str(self.data.get("apiVersion", "")).rpartition("/")[0]

    @property
    def spec(self) -> Mapping[str, Any]:
        """The ``spec`` of an object of Kubernetes; empty for others."""
        return mapping(self.data.get("spec"))

    def line_at(self, *key: str | int) -> int:
        """Return the line of a key, or of the deepest part of it that is there."""
        return self.start + int(self.locate(key).split(":")[1])


class ServedAdapter(NamedTuple):
    """An adapter that a server starts with; without a path if its target fetches it."""

    name: str
    path: str = ""


@dataclass(frozen=True, kw_only=True)
class Server(Part):
    """A server of vLLM or SGLang, as it is started.

    `text` is that of the file, in which the lines of flags are found. `program` is ``vllm``, ``sglang``, or
    ``dynamo`` for vLLM under Dynamo. `flags` has values by flag, those of the last one of a name. `version`
    is that of vLLM by the tag of the image, and `gpus` are those of the resources; None, also as the model:
    not stated.
    """

    text: str
    program: str
    flags: Mapping[str, tuple[str, ...]]
    adapters: tuple[ServedAdapter, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    version: str | None = None
    gpus: int | None = None
    model: str | None = None

    @property
    def has_lora(self) -> bool:
        """Whether it serves adapters."""
        return not {"--enable-lora", "--lora-modules", "--lora-paths"}.isdisjoint(self.flags)

    @property
    def updates_at_run_time(self) -> bool:
        """Whether adapters can be loaded into it at run time."""
        return self.env.get(RUNTIME_UPDATES, "").lower() in ("1", "true")

    def number(self, flag: str, default: int | None = None) -> int | None:
        """Return the value of a flag; the default without the flag, None for what is no number."""
        values = self.flags.get(flag)
        if values is None:
            return default
        return whole(values[0]) if values else None

    def line_of(self, *words: str) -> int | None:
        """Return the first line from that of the server on that holds a word; without one, the server's."""
        first = self.line or 1
        for number, line in enumerate(self.text.splitlines()[first - 1 :], first):
            if any(word in line for word in words):
                return number
        return self.line


@dataclass(frozen=True, kw_only=True)
class ChartModel(Server):
    """A ``modelSpec`` in the values of the production-stack's chart."""

    name: str
    config: Mapping[str, Any]
    """Its ``vllmConfig``."""
    has_controller: bool
    """Whether the values turn the controller of adapters on."""


@dataclass(frozen=True, kw_only=True)
class RayModel(Server):
    """An ``LLMConfig`` of Ray Serve."""

    model_id: str
    lora: Mapping[str, Any]
    """Its ``lora_config``."""
    is_only: bool
    """Whether its file has no other."""


def served_adapters(flags: Mapping[str, tuple[str, ...]]) -> tuple[ServedAdapter, ...]:
    """Return the adapters of a command line."""
    return tuple(map(_served_adapter, flags.get("--lora-modules", flags.get("--lora-paths", ()))))


def _served_adapter(word: str) -> ServedAdapter:
    """Return an adapter of the command line: ``NAME=PATH``, JSON, or a path."""
    if word.startswith("{"):
        try:
            fields = mapping(parse_json(word, ""))
        except InputError:
            fields = {}
        name = fields.get("name", fields.get("lora_name", ""))
        return ServedAdapter(str(name), str(fields.get("path", fields.get("lora_path", ""))))
    name, equals, path = word.partition("=")
    return ServedAdapter(name, path if equals else name)


def whole(value: Any) -> int | None:
    """Return a whole number, or a text that is one; None for others, and for absurd ones."""
    text = str(value)
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else None


def mapping(value: Any) -> Mapping[str, Any]:
    """Return a value that is a mapping; an empty one for others."""
    return value if isinstance(value, Mapping) else {}


def mappings(value: Any) -> list[tuple[int, Mapping[str, Any]]]:
    """Return the mappings of a list with their places; nothing for others."""
    items = value if isinstance(value, list) else []
    return [(place, each) for place, each in enumerate(items) if isinstance(each, Mapping)]


def dig(value: Any, *keys: str) -> Any:
    """Return a value within mappings; None if there is none."""
    for key in keys:
        value = mapping(value).get(key)
    return value
