"""Reference pages of the documentation site, generated from the code when the site is built."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    from capplan.spec import Plan, Profile, WorkloadFile

    pages = {
        "reference/cli.md": cli_page(),
        "reference/workload.md": schema_page("Workload file", WorkloadFile, "workload"),
        "reference/plan.md": schema_page("Plan", Plan, "plan"),
        "reference/profile.md": schema_page("Profile", Profile, "profile"),
        "reference/routers.md": routers_page(),
        "start/gallery.md": gallery_page(),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def cli_page() -> str:
    """Return the Markdown page of every command with its arguments and options."""
    from capplan.cli.app import app

    root = typer.main.get_command(app)
    lines = ["# Command line", "", _help(root), "", *_exit_codes(), *_options(root)]
    for path, command in _commands(root, "capplan"):
        lines += [f"\n## `{path}`", "", _help(command), "", "```", _usage(path, command), "```", ""]
        lines += _options(command)
    return "\n".join(lines) + "\n"


def gallery_page() -> str:
    """Return the Markdown page of the examples, each with its commands and what they print."""
    note = "Each is a folder of `examples/`. A test runs the commands: what is below them is what they print."
    pages = (path.read_text(encoding="utf-8") for path in sorted(EXAMPLES.glob("*/README.md")))
    return "\n\n".join(["# Gallery", note, *(page.replace("# ", "## ", 1) for page in pages)])


def routers_page() -> str:
    """Return the Markdown page of the routers."""
    from capplan.serving.routers import ROUTERS

    rows = [f"| `{name}` | {entry.rule} | {entry.source} |" for name, entry in ROUTERS.items()]
    note = (
        "Use: [Cluster twin and routers](../how-it-works/cluster.md). "
        "New routers: [Extend capplan](../guides/extend.md)."
    )
    return "\n".join(["# Routers", "", note, "", "| name | rule | source |", "|---|---|---|", *rows]) + "\n"


def _exit_codes() -> list[str]:
    return [
        "| exit status | meaning |",
        "|---|---|",
        "| 0 | done |",
        "| 1 | a verification or comparison disagrees |",
        "| 2 | invalid input; one line on stderr names the file, key or flag, the rule, and the value |",
        "| 3 | infeasible; one line on stderr names the limit |",
        "| 130 | interrupted with Ctrl-C |",
        "| 141 | the reader of stdout closed the pipe |",
        "",
    ]


def _commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, command in getattr(group, "commands", {}).items():
        if getattr(command, "commands", None):
            yield from _commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def _help(command: Any) -> str:
    return inspect.cleandoc(command.help or "").replace("\b\n", "")


def _usage(path: str, command: Any) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    names = [(each.metavar or each.name.upper(), each.required) for each in arguments]
    return " ".join([path, *(name if required else f"[{name}]" for name, required in names), "[options]"])


def _options(command: Any) -> list[str]:
    rows = []
    for parameter in command.params:
        if "--help" in parameter.opts:
            continue
        metavar = parameter.metavar or ""
        if parameter.param_type_name == "argument":
            name = metavar or parameter.name.upper()
        else:
            names = ", ".join([*parameter.opts, *parameter.secondary_opts])
            name = f"{names} {metavar}".strip()
        text = (getattr(parameter, "help", None) or "").replace("|", "\\|").replace("\n", " ")
        if parameter.envvar:
            variables = [parameter.envvar] if isinstance(parameter.envvar, str) else parameter.envvar
            text += f" Environment: {', '.join(f'`{each}`' for each in variables)}."
        rows.append(f"| `{name}` | {text} | {_default(parameter)} |")
    return ["| option | meaning | default |", "|---|---|---|", *rows, ""] if rows else []


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    value = parameter.default
    if value is None or callable(value) or value in ((), [], "") or value is False:
        return ""
    return f"`{value}`" if value is not True else "on"


def schema_page(title: str, model: Any, name: str) -> str:
    """Return the Markdown page of a document's JSON Schema: one table per object."""
    schema = model.model_json_schema()
    definitions: dict[str, Any] = schema.get("$defs", {})
    lines = [f"# {title}", "", f"Generated from the JSON Schema that `capplan schema {name}` prints.", ""]
    lines += _object(title, schema)
    for key, definition in definitions.items():
        if "properties" in definition:
            lines += _object(key, definition)
        elif "enum" in definition:
            values = ", ".join(f"`{value}`" for value in definition["enum"])
            lines += [f"## {key}", "", f"One of {values}.", ""]
    return "\n".join(lines) + "\n"


def _object(title: str, schema: Mapping[str, Any]) -> list[str]:
    lines = [f"## {title}", "", inspect.cleandoc(schema.get("description", "")), ""]
    lines += ["| key | type | meaning | default |", "|---|---|---|---|"]
    required = schema.get("required", ())
    for key, value in schema.get("properties", {}).items():
        text = value.get("description", "").replace("|", "\\|").replace("\n", " ")
        default = "required" if key in required else _json_default(value)
        lines.append(f"| `{key}` | {_type(value)} | {text} | {default} |")
    return [*lines, ""]


def _json_default(value: Mapping[str, Any]) -> str:
    default = value.get("default")
    return "" if default in (None, [], {}) else f"`{default}`"


def _type(value: Mapping[str, Any]) -> str:
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for combination in ("anyOf", "oneOf", "allOf"):
        if combination in value:
            kinds = [_type(each) for each in value[combination] if each.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
    if value.get("type") == "array":
        return f"list of {_type(value.get('items', {}))}"
    if value.get("type") == "object" and isinstance(value.get("additionalProperties"), dict):
        return f"mapping to {_type(value['additionalProperties'])}"
    if "const" in value:
        return f"`{value['const']}`"
    if "enum" in value:
        return ", ".join(f"`{each}`" for each in value["enum"])
    return str(value.get("type", "any"))
