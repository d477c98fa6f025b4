"""Servers that files start: command lines in scripts, and YAML of Kubernetes, Compose, Helm and Ray Serve."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, Final, NamedTuple

from capplan.deploy.lint._parts import (
    ChartModel,
    Document,
    Part,
    RayModel,
    ServedAdapter,
    Server,
    dig,
    mapping,
    mappings,
    served_adapters,
    whole,
)
from capplan.errors import InputError
from capplan.spec import parse_yaml

ENGINE: Final = re.compile(
    r"\bvllm\s+serve\b|vllm\.entrypoints\.openai|sglang\.launch_server|\bsglang\s+serve\b|dynamo\.vllm"
    r"|vllm-openai:"
)
"""What a text with a command line of an engine contains."""

_COMMANDS: Final = (
    (("vllm", "serve"), "vllm"),
    (("-m", "vllm.entrypoints.openai.api_server"), "vllm"),
    (("sglang", "serve"), "sglang"),
    (("-m", "sglang.launch_server"), "sglang"),
    (("-m", "dynamo.vllm"), "dynamo"),
)
"""First words of command lines, with the program."""

_ALIASES: Final = {
    **dict.fromkeys(("-tp", "--tp", "--tp-size"), "--tensor-parallel-size"),
    **dict.fromkeys(("-pp", "--pp", "--pp-size"), "--pipeline-parallel-size"),
    **dict.fromkeys(("-dp", "--dp", "--dp-size"), "--data-parallel-size"),
}
_IMAGE: Final = re.compile(r"(?:^|/)vllm-openai(?:@|:|$)")
_TAG: Final = re.compile(r"vllm-openai:v?(\d+\.\d+(?:\.\d+)?)")
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_]\w*=")
_OPERATOR: Final = re.compile(r"[();<>|&]+")
_NUMBER: Final = re.compile(r"-[\d.]+")


class Command(NamedTuple):
    """A command line of an engine."""

    program: str
    arguments: Sequence[str]
    image: str = ""


def engine_command(words: Sequence[str], image: str = "") -> Command | None:
    """Return the command line of an engine in words; None if there is none.

    The image of the container counts, because that of vLLM starts it.
    """
    for at in range(len(words)):
        for first, program in _COMMANDS:
            if (PurePosixPath(words[at]).name, *words[at + 1 : at + 2]) == first:
                return Command(program, words[at + 2 :], image)
        if not image and _IMAGE.search(words[at]):  # docker run
            return engine_command(words[at + 1 :], words[at])
    return Command("vllm", words, image) if _IMAGE.search(image) else None


def version_of(image: str) -> str | None:
    """Return the version of vLLM by the tag of its image."""
    found = _TAG.search(image)
    return found[1] if found else None


def flags_of(words: Iterable[str]) -> tuple[list[str], dict[str, tuple[str, ...]]]:
    """Return the words before the first flag, and the values by flag."""
    flags: dict[str, tuple[str, ...]] = {}
    before: list[str] = []
    name: str | None = None
    for word in words:
        if word.startswith("-") and not _NUMBER.fullmatch(word):
            flag, equals, value = word.partition("=")
            name = _ALIASES.get(flag, flag.replace("_", "-"))
            flags[name] = (value,) if equals else ()
        elif word == "$@":
            name = None
        elif name is not None:
            flags[name] = (*flags[name], word)
        elif not flags:
            before.append(word)
    return before, flags


def model_of(before: Sequence[str], flags: dict[str, tuple[str, ...]]) -> str | None:
    """Return the model of a command line; None if it is not stated."""
    named = (*before[:1], *flags.get("--model", ()), *flags.get("--model-path", ()))
    return named[0] if named else None


def script_servers(file: str, text: str) -> Iterator[Server]:
    """Yield the servers that a text of the shell starts."""
    env: dict[str, str] = {}
    for line, words in _shell_commands(text):
        env |= dict(_assignments(words))
        command = engine_command(words)
        if command is not None:
            yield replace(_server_of(command, file, line, text), env=dict(env))


def _server_of(command: Command, file: str, line: int, text: str) -> Server:
    """Return the server that a command line starts, as far as its words say."""
    before, flags = flags_of(command.arguments)
    return Server(
        file=file,
        line=line,
        text=text,
        program=command.program,
        flags=flags,
        adapters=served_adapters(flags),
        version=version_of(command.image),
        model=model_of(before, flags),
    )


def inner_command(words: Sequence[str], image: str) -> Command | None:
    """Return the command line of an engine in the words of a container, or in a script among them."""
    for word in words:
        if ENGINE.search(word) and " " in word:
            found = (engine_command(inner) for _, inner in _shell_commands(word))
            return next((each._replace(image=image) for each in found if each is not None), None)
    return engine_command(words, image)


def _assignments(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield variables that a command sets: those before its name, or after ``export``."""
    for word in words[1:] if words[:1] == ["export"] else words:
        if not _ASSIGNMENT.match(word):
            return
        name, _, value = word.partition("=")
        yield name, value


def _shell_commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the commands of a text of the shell with their lines; what is no command is skipped."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        first, parts = at, [lines[at]]
        while parts[-1].endswith("\\") and at + 1 < len(lines):
            at += 1
            parts[-1] = parts[-1][:-1]
            parts.append(lines[at])
        at += 1
        for words in _simple_commands(" ".join(parts)):
            yield first + 1, words


def _simple_commands(line: str) -> Iterator[list[str]]:
    """Yield the words of the commands of a line, between operators."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    try:
        tokens = list(lexer)
    except ValueError:  # an open quotation mark: prose, or text over several lines
        return
    for token in tokens:
        if _OPERATOR.fullmatch(token):
            yield words
            words = []
        else:
            words.append(token)
    yield words


_SEPARATOR: Final = re.compile(r"---(\s|$)")
_GPU: Final = "nvidia.com/gpu"

_CHART_FLAGS: Final = {
    "tensorParallelSize": "--tensor-parallel-size",
    "maxLoras": "--max-loras",
}
"""Flags by field of ``vllmConfig``."""

_KSERVE_FLAGS: Final = {
    "maxRank": "--max-lora-rank",
    "maxAdapters": "--max-loras",
    "maxCpuAdapters": "--max-cpu-loras",
}
"""Flags by field of ``lora``."""


def documents(file: str, text: str) -> Iterator[Document]:
    """Yield the documents of a YAML text that are mappings; a broken one is an error."""
    lines = text.splitlines(keepends=True)
    starts = [at for at, line in enumerate(lines) if _SEPARATOR.match(line)]
    for start, end in zip([0, *(at + 1 for at in starts)], [*starts, len(lines)], strict=True):
        chunk = "".join(lines[start:end])
        try:
            source = parse_yaml(chunk, "")
        except InputError:
            parse_yaml("\n" * start + chunk, file)  # raises with the line of the file
            raise
        if isinstance(source.data, Mapping):
            yield Document(file=file, line=start + 1, data=source.data, locate=source.locate, start=start)


def deployment_parts(file: str, text: str) -> Iterator[Part]:
    """Yield the documents of a YAML text, and the servers that they start."""
    for document in documents(file, text):
        yield document
        yield from _servers(document, text)


def _servers(document: Document, text: str) -> Iterator[Server]:
    data = document.data
    if "servingEngineSpec" in data:
        yield from _chart_models(document, text)
    elif "services" in data:
        yield from _compose_servers(document, text)
    elif "applications" in data or "llm_configs" in data:
        yield from _ray_models(document, text)
    elif document.kind == "LLMInferenceService":
        yield from _kserve_servers(document, text)
    elif document.kind == "DynamoGraphDeployment":
        for place, component in mappings(document.spec.get("components")):
            at = ("spec", "components", place, "podTemplate")
            yield from _pod_servers(document, text, mapping(component.get("podTemplate")), at)
    elif document.kind == "Pod":
        yield from _pod_servers(document, text, data, ())
    else:
        template = mapping(document.spec.get("template"))
        yield from _pod_servers(document, text, template, ("spec", "template"))


def _pod_servers(
    document: Document, text: str, pod: Mapping[str, Any], at: tuple[str | int, ...]
) -> Iterator[Server]:
    """Yield the servers of a pod, which is at a key of its document."""
    labels = {str(name): str(value) for name, value in mapping(dig(pod, "metadata", "labels")).items()}
    for place, container in mappings(dig(pod, "spec", "containers")):
        words = [*_words(container.get("command")), *_words(container.get("args"))]
        command = inner_command([word.replace("$$(", "$(") for word in words], _image(container))
        if command is not None:
            line = document.line_at(*at, "spec", "containers", place)
            server = _server_of(command, document.file, line, text)
            env = _variables(container.get("env"))
            yield replace(server, env=env, labels=labels, gpus=_gpus(container))


def _kserve_servers(document: Document, text: str) -> Iterator[Server]:
    """Yield the server of an LLMInferenceService, with the flags that KServe sets by its fields.

    If one of the maxima is missing, which is a rule of its own, the adapters are left out.
    """
    lora = mapping(dig(document.spec, "model", "lora"))
    fields = {flag: lora.get(name) for name, flag in _KSERVE_FLAGS.items()}
    flags: dict[str, tuple[str, ...]] = {}
    if tensor := dig(document.spec, "parallelism", "tensor"):
        flags["--tensor-parallel-size"] = (str(tensor),)
    adapters: tuple[ServedAdapter, ...] = ()
    if lora and None not in fields.values():
        flags |= {"--enable-lora": (), **{flag: (str(value),) for flag, value in fields.items()}}
        adapters = tuple(ServedAdapter(str(each.get("name"))) for _, each in mappings(lora.get("adapters")))
    for _, container in mappings(dig(document.spec, "template", "containers")):
        if container.get("name") == "main":
            env = _variables(container.get("env"))
            _, given = flags_of(_split(env.get("VLLM_ADDITIONAL_ARGS", "")))
            yield Server(
                file=document.file,
                line=document.line_at("spec"),
                text=text,
                program="vllm",
                flags=flags | given,
                adapters=adapters,
                env=env,
                version=version_of(_image(container)),
                gpus=_gpus(container),
            )


def _chart_models(document: Document, text: str) -> Iterator[ChartModel]:
    """Yield the models of the production-stack's values."""
    has_controller = dig(document.data, "loraController", "enableLoraController") is True
    for place, model in mappings(dig(document.data, "servingEngineSpec", "modelSpec")):
        config = mapping(model.get("vllmConfig"))
        set_fields = (pair for pair in _CHART_FLAGS.items() if config.get(pair[0]) is not None)
        flags: dict[str, tuple[str, ...]] = {flag: (str(config[field]),) for field, flag in set_fields}
        if model.get("enableLoRA") is True:
            flags["--enable-lora"] = ()
        _, given = flags_of(word.replace("$$(", "$(") for word in _words(config.get("extraArgs")))
        yield ChartModel(
            file=document.file,
            line=document.line_at("servingEngineSpec", "modelSpec", place),
            text=text,
            program="vllm",
            flags=flags | given,
            adapters=served_adapters(flags | given),
            env=_variables(model.get("env")),
            version=version_of(f"{model.get('repository')}:{model.get('tag')}"),
            gpus=whole(model.get("requestGPU")),
            model=_text(model.get("modelURL")),
            name=str(model.get("name", "")),
            config=config,
            has_controller=has_controller,
        )


def _compose_servers(document: Document, text: str) -> Iterator[Server]:
    """Yield the servers of the services of Compose."""
    for name, service in mapping(document.data["services"]).items():
        words = [*_words(mapping(service).get("entrypoint")), *_words(mapping(service).get("command"))]
        command = inner_command([word.replace("$$", "$") for word in words], _image(mapping(service)))
        if command is not None:
            server = _server_of(command, document.file, document.line_at("services", name), text)
            env = _variables(mapping(service).get("environment"))
            yield replace(server, env=env, gpus=_devices(service))


def _ray_models(document: Document, text: str) -> Iterator[RayModel]:
    """Yield the models of Ray Serve LLM; those that are paths of other files are left out."""
    found: list[tuple[tuple[str | int, ...], Mapping[str, Any]]] = [
        (("llm_configs", place), each) for place, each in mappings(document.data.get("llm_configs"))
    ]
    for number, application in mappings(document.data.get("applications")):
        for place, each in mappings(dig(application, "args", "llm_configs")):
            found.append((("applications", number, "args", "llm_configs", place), each))
    for key, config in found:
        yield RayModel(
            file=document.file,
            line=document.line_at(*key),
            text=text,
            program="vllm",
            flags=dict(_keyword_flags(mapping(config.get("engine_kwargs")))),
            model=_text(dig(config, "model_loading_config", "model_source")),
            model_id=str(dig(config, "model_loading_config", "model_id")),
            lora=mapping(config.get("lora_config")),
            is_only=len(found) == 1,
        )


def _keyword_flags(kwargs: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield arguments of vLLM's engine as flags."""
    for key, value in kwargs.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}", ()
        else:
            yield f"--{name}", tuple(map(str, value if isinstance(value, list) else [value]))


def _words(value: Any) -> list[str]:
    """Return a command, which is a list of words or a text."""
    if isinstance(value, str):
        return _split(value)
    return list(map(str, value)) if isinstance(value, list) else []


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _variables(value: Any) -> dict[str, str]:
    """Return the environment of a container: a mapping, ``NAME=VALUE`` texts, or names with values."""
    if isinstance(value, Mapping):
        return {str(name): str(each) for name, each in value.items()}
    entries = value if isinstance(value, list) else []
    texts = [each.partition("=")[::2] for each in entries if isinstance(each, str)]
    named = [(each.get("name"), each.get("value")) for _, each in mappings(value)]
    return {str(name): str(text) for name, text in (*texts, *named) if text is not None}


def _image(container: Mapping[str, Any]) -> str:
    return str(container.get("image", ""))


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _gpus(container: Mapping[str, Any]) -> int | None:
    """Return the GPUs of a container of Kubernetes; None if it states none."""
    found = (mapping(dig(container, "resources", key)).get(_GPU) for key in ("limits", "requests"))
    return next((gpus for each in found if (gpus := whole(each)) is not None), None)


def _devices(service: Any) -> int | None:
    """Return the GPUs of a service of Compose; None if it states none."""
    for _, device in mappings(dig(service, "deploy", "resources", "reservations", "devices")):
        ids = device.get("device_ids")
        count = len(ids) if isinstance(ids, list) else whole(device.get("count"))
        if "gpu" in str(device.get("capabilities")):
            return count
    return None
