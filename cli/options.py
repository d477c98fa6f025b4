"""Options of commands: shared declarations, parsing, and checks.

Options of re-balancing, and its settings from them and a plan.
"""

from __future__ import annotations

import inspect
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    NamedTuple,
    TypeAlias,
    TypeVar,
    get_args,
    get_type_hints,
)

import typer
from typer.models import ArgumentInfo, OptionInfo, ParameterInfo

from capplan.errors import InputError
from capplan.spec import (
    FORECASTS,
    NOT_PRINTABLE,
    ROUTER_NAMES,
    STATE_PERIOD_S,
    Cache,
    EngineArgs,
    EngineConfig,
    InputLimits,
    Queues,
    RebalanceSettings,
    Scheduler,
    cache_of,
    format_key,
    input_limits,
    is_printable,
    parse_yaml,
    path_kind,
    require_duration,
    scheduler_of,
    validate_document,
)

if TYPE_CHECKING:
    from capplan.spec import Plan, Profile, Workload


RebalancePeriod: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--rebalance",
        metavar="SECONDS",
        help="Re-balance the adapters over the GPUs of the plan this often; default: as in the plan.",
    ),
]

ForecastName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--forecast",
        metavar="NAME",
        help=f"Forecast of the demand for --rebalance: {', '.join(FORECASTS)}; default: holt.",
    ),
]

RebalanceSolverName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--rebalance-solver",
        metavar="NAME",
        help="Placement by --rebalance: loraserve (Algorithm 1) or capplan (moves from the placement in "
        "force, with a price on copied bytes); default: loraserve.",
    ),
]

_FLAGS: Final = {"every_s": "--rebalance", "forecast": "--forecast", "solver": "--rebalance-solver"}


@dataclass(frozen=True)
class RebalanceOptions:
    """Options of re-balancing; None: as in the plan."""

    every_s: float | None = None
    forecast: str | None = None
    solver: str | None = None

    @property
    def given(self) -> dict[str, float | str]:
        """The options that are given, by name of the setting."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def require_plan(self) -> None:
        """Raise an `InputError` if one is given, for a command without a plan."""
        for name, value in self.given.items():
            raise InputError("goes with --plan", value, _FLAGS[name])

    def settings(self, planned: RebalanceSettings | None) -> RebalanceSettings | None:
        """Return the settings of a plan, changed by the options; None without re-balancing."""
        changes = self.given
        if planned is None and self.every_s is None:
            for name, value in changes.items():
                raise InputError("goes with --rebalance", value, _FLAGS[name])
            return None
        try:
            return (planned or RebalanceSettings()).replace(**changes)
        except InputError as error:
            key = error.location.rpartition(".")[2]
            raise InputError(error.rule, error.value, _FLAGS.get(key, error.location)) from None


_HOUR_S: Final = 3600.0
_MOST_RANK_DIGITS: Final = 9

T = TypeVar("T")
Member = TypeVar("Member", bound=StrEnum)

WorkloadFile: TypeAlias = Annotated[str, typer.Argument(metavar="WORKLOAD", help="Workload file (YAML).")]

PlanFile: TypeAlias = Annotated[str, typer.Argument(metavar="PLAN", help="Plan file (JSON).")]

Unverified: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--unverified", help="Use the plan even if its verification is not ok, or the plan was changed since."
    ),
]

KnownProfile: TypeAlias = Annotated[
    str, typer.Argument(metavar="PROFILE", help="Shipped profile or path of a profile JSON.")
]

ProfileName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Shipped profile or path of a profile JSON, instead of that in the workload; not with pools.",
    ),
]

AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

Quiet: TypeAlias = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]

Seed: TypeAlias = Annotated[int, typer.Option(metavar="N", help="Same seed, same result.")]

HtmlFile: TypeAlias = Annotated[
    str | None, typer.Option(metavar="FILE", help="Write an HTML page with charts, readable offline.")
]

RequestsFile: TypeAlias = Annotated[
    str | None, typer.Option(metavar="FILE", help="Write every request as Parquet, one row each.")
]

ResultFile: TypeAlias = Annotated[
    str | None, typer.Option("--output", "-o", metavar="FILE", help="Write the result as JSON.")
]

ApiKey: TypeAlias = Annotated[
    str | None, typer.Option(metavar="KEY", envvar="OPENAI_API_KEY", help="Sent as bearer token.")
]

EngineVersion: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="VERSION", help="Version of vLLM, which has its rules; default: by --rules."),
]

EngineRules: TypeAlias = Annotated[
    str | None, typer.Option(metavar="NAME", help="Serving rules; default: by --engine-version.")
]

SchedulerName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--scheduler",
        metavar="NAME",
        help="Scheduler: chameleon, static, fifo, sjf, slora, slora-every-step, or a mapping such as "
        "'{policy: sjf, ageing_s: 10}'; default: the engine's own, or fifo beside --cache.",
    ),
]

CacheName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--cache",
        metavar="NAME",
        help="Adapter cache: chameleon, fairshare, lru, gdsf, none, or a mapping such as "
        "'{policy: lru, prefetch: none}'; default: the engine's own, or none beside --scheduler.",
    ),
]


def _known_router(name: str | None) -> str | None:
    if name is not None and name not in ROUTER_NAMES:
        raise InputError(f"must be one of {', '.join(ROUTER_NAMES)}", name, "--router")
    return name


RouterOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--router",
        metavar="NAME",
        callback=_known_router,
        help=f"Router: {', '.join(ROUTER_NAMES)}; default: that of the file.",
    ),
]

StatePeriod: TypeAlias = Annotated[
    float | None,
    typer.Option(
        metavar="S",
        help="Time between reports of an instance to the router of a plan; default: "
        f"{STATE_PERIOD_S:g}, as in the verification.",
    ),
]

SimulatedTime: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--duration",
        metavar="SECONDS",
        help="Simulated time; default: an hour, or the trace of the workload as a whole.",
    ),
]

Workers: TypeAlias = Annotated[
    int | None, typer.Option(metavar="N", help="Processes; default: one per core.")
]

RayAddress: TypeAlias = Annotated[
    str | None, typer.Option(metavar="ADDRESS", help="Simulate on this Ray cluster instead.")
]


def read_plan(path: str, *, unverified: bool) -> Plan:
    """Read a plan that is to be used, and check that it is verified unless `unverified`."""
    from capplan.spec import Plan

    plan = Plan.from_json(path)
    if not unverified:
        try:
            plan.require_verified()
        except InputError as error:
            rule = f"{error.rule}; --unverified uses it as it is"
            raise InputError(rule, error.value, f"{path}: {error.location}") from None
    return plan


def read_any_plan(path: str) -> Plan:
    """Read a plan, verified or not; a line on the standard error says if it was changed since."""
    plan = read_plan(path, unverified=True)
    if changed := plan.changed_after_verification():
        typer.echo(f"{path}: {changed}", err=True)
    return plan


def read_lora_modules(modules: list[str]) -> dict[str, str | Path | int]:
    """Return adapters by name from ``NAME=FOLDER`` and ``NAME=RANK``."""
    adapters: dict[str, str | Path | int] = {}
    for module in modules:
        name, equals, source = module.partition("=")
        if not (name and equals and source):
            raise InputError("must be NAME=FOLDER or NAME=RANK", module, "--lora-modules")
        if not is_printable(source):
            raise InputError(f"must be without {NOT_PRINTABLE}", module, "--lora-modules")
        if name in adapters:
            raise InputError("must be unique", name, "--lora-modules")
        is_rank = source.isdecimal() and len(source) <= _MOST_RANK_DIGITS
        if not is_rank and path_kind(source) == "url":
            rule = "must be NAME=FOLDER on this machine, to which URLs are downloaded, or NAME=RANK"
            raise InputError(rule, module, "--lora-modules")
        adapters[name] = int(source) if is_rank else Path(source)
    return adapters


def read_scheduler(text: str | None) -> Scheduler | None:
    """Return the scheduler of the command line: a name or a mapping."""
    return scheduler_of(_name_or_mapping(text, "--scheduler"), "--scheduler")


def read_cache(text: str | None) -> Cache | None:
    """Return the cache of the command line; as `read_scheduler`."""
    return cache_of(_name_or_mapping(text, "--cache"), "--cache")


def scheduling_flags(scheduler: str | None, cache: str | None) -> dict[str, str]:
    """Return the names in errors of scheduler and cache that the command line gives."""
    given = {"scheduler": scheduler, "cache": cache}
    return {name: f"--{name}" for name, text in given.items() if text is not None}


def read_queues(text: str | None) -> Queues | None:
    """Return the queues of the command line: a mapping, as in a plan."""
    if text is None:
        return None
    document = parse_yaml(text, "--queues").data
    return validate_document(Queues, document, lambda key: format_key(("--queues", *key)))


def _name_or_mapping(text: str | None, flag: str) -> Any:
    return parse_yaml(text, flag).data if text is not None and text.lstrip().startswith("{") else text


@dataclass(frozen=True)
class _EngineFlags:
    """Options of engine settings, by name."""

    options: tuple[tuple[str, OptionInfo], ...]


def engine_flags(
    *, without: Sequence[str] = (), least: Mapping[str, int] | None = None, **defaults: float
) -> Any:
    """Return the default of a field that holds engine settings; `command` makes an option of each.

    The field is an `EngineConfig` of the values as they are given: what they must be is checked by what the
    command does with them. Settings in `without` the command does not take, or declares itself; `least` has
    least values, and those without a default are None: not given.
    """
    options = []
    for name in EngineConfig.model_fields:
        if name in without:
            continue
        field = EngineArgs.model_fields[name]
        metavar = "SHARE" if field.annotation is float else "N"
        info = typer.Option(
            defaults.get(name), metavar=metavar, min=(least or {}).get(name), help=field.description
        )
        options.append((name, info))
    return _EngineFlags(tuple(options))


def command(function: Callable[[Any], None]) -> Callable[..., None]:
    """Turn a function of one options dataclass into a Typer command with one parameter per field.

    The fields are annotated as Typer's parameters are, or are `engine_flags`. The docstring of the function
    is the help text.
    """
    (options_type,) = (hint for name, hint in get_type_hints(function).items() if name != "return")
    hints = get_type_hints(options_type, include_extras=True)
    parameters = []
    for field in fields(options_type):
        own: Sequence[tuple[str, Any, Any]] = ((field.name, field.default, hints[field.name]),)
        if isinstance(field.default, _EngineFlags):
            kinds = get_type_hints(EngineConfig)
            own = [(name, info, kinds[name]) for name, info in field.default.options]
        for name, default, hint in own:
            given = inspect.Parameter.empty if default is MISSING else default
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=given, annotation=hint)
            )

    def invoke(**values: Any) -> None:
        for field in fields(options_type):
            if isinstance(field.default, _EngineFlags):
                settings = {name: values.pop(name) for name, _ in field.default.options}
                values[field.name] = EngineConfig.model_construct(**settings)
        args = options_type(**values)
        _require_keys(args)
        _require_other_files(args)
        try:
            function(args)
        except InputError as error:
            if (flag := _flag_given(error.location, args)) is None:
                raise
            raise InputError(error.rule, error.value, flag) from error

    paragraphs = inspect.getdoc(function).split("\n\n")  # type: ignore[union-attr]
    invoke.__doc__ = "\n\n".join(" ".join(each.split()) for each in paragraphs)
    invoke.__name__, invoke.__module__ = function.__name__, function.__module__
    invoke.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return invoke


class _Given(NamedTuple):
    """A parameter of a command, and its value."""

    name: str
    info: ParameterInfo
    default: Any
    names: Sequence[str]
    """Spellings on the command line, if not by `name`."""
    value: Any

    @property
    def flag(self) -> str:
        """Spelling of an option on the command line; ``--on/--off`` for one with two."""
        own = f"--{self.name.replace('_', '-')}"
        return next((each for each in self.names if each.startswith("--")), own)


def _given(args: Any) -> Iterator[_Given]:
    """Yield the parameters of a command with their values."""
    hints = get_type_hints(type(args), include_extras=True)
    for field in fields(args):
        name, default, value = field.name, field.default, getattr(args, field.name)
        if isinstance(default, _EngineFlags):
            for each, info in default.options:
                yield _Given(each, info, info.default, (), getattr(value, each))
        elif isinstance(default, ParameterInfo):
            yield _Given(name, default, default.default, default.param_decls or (), value)
        elif hints[name] is not typer.Context:
            hinted = next(each for each in get_args(hints[name]) if isinstance(each, ParameterInfo))
            yield _Given(name, hinted, default, (str(hinted.default), *(hinted.param_decls or ())), value)


def _require_other_files(args: Any) -> None:
    """Check that no option names the document that the command is about, which an output would replace."""
    given = list(_given(args))
    documents = [
        each.value
        for each in given
        if isinstance(each.info, ArgumentInfo) and each.info.metavar in ("PLAN", "WORKLOAD")
    ]
    for each in given:
        is_file = isinstance(each.info, OptionInfo) and each.info.metavar == "FILE"
        is_file = is_file and isinstance(each.value, str)
        if is_file and any(_is_same_file(each.value, document) for document in documents):
            raise InputError("must be another file than the one that is read", each.value, each.flag)


def _is_same_file(path: str, other: str) -> bool:
    with suppress(OSError, ValueError, TypeError):  # one is missing, not given, or no path
        return Path(path).samefile(other)
    return False


_OPTIONS: Final = {
    "a_max": ("max_loras",),
    "s_max": ("max_lora_rank",),
    "solver": ("solvers",),
    "time_limit_s": ("time_limit", "solver_time_limit"),
}
"""Settings that are named otherwise on the command line, with the fields of their options."""


def _flag_given(location: str, args: Any) -> str | None:
    """Return the flag that gave a setting another value than the default; None if none did."""
    names = (location, *_OPTIONS.get(location, ()))
    for each in _given(args):
        is_option = isinstance(each.info, OptionInfo) and each.name in names
        if is_option and each.value not in (None, each.default):
            return each.flag
    return None


def command_line(name: str, args: Any, without: Sequence[str] = ()) -> str:
    """Return a command with its options that differ from the defaults; it repeats the result from its folder.

    API keys and the fields named in `without` are left out.
    """
    words: list[str] = []
    for option in _given(args):
        value = option.value
        if option.name in without or value in (None, option.default) or option.info.metavar == "KEY":
            continue
        on, _, off = option.flag.partition("/")
        if isinstance(value, bool):
            words.append(on if value else off)
            continue
        for each in map(str, value if isinstance(value, list) else [value]):
            words += [each] if isinstance(option.info, ArgumentInfo) else [on, each]
    program, _, command = name.partition(" ")
    default = InputLimits()
    raised = [
        f"--{key.replace('_', '-')} {value}"
        for key, value in asdict(input_limits()).items()
        if value != getattr(default, key)
    ]
    return " ".join([program, *raised, command, *map(shlex.quote, words)])


def _require_keys(args: Any) -> None:
    """Check the API keys of a command; to the parser an empty variable of the environment counts as unset."""
    for each in _given(args):
        if not each.name.endswith("api_key"):
            continue
        variable = str(each.info.envvar)
        variable_value = os.environ.get(variable)
        is_flag = each.value not in (None, variable_value)
        key = each.value if is_flag else variable_value
        where = f"--{each.name.replace('_', '-')}" if is_flag else variable
        if key is not None and not key.strip():
            rule = (
                "must not be empty" if is_flag else f"must not be empty; `unset {variable}` if there is none"
            )
            raise InputError(rule, location=where)
        if key is not None and (key != key.strip() or not key.isprintable()):  # not shown
            raise InputError("must be printable characters without spaces around them", location=where)


def fill(kind: type[T], args: object, **given: Any) -> T:
    """Return a settings dataclass with the values of the options of the same names, and of ``given``."""
    taken = {field.name: getattr(args, field.name) for field in fields(kind) if hasattr(args, field.name)}  # type: ignore[arg-type]
    return kind(**(taken | given))


def chosen_profile(workload: Workload, name: str | None) -> Profile | None:
    """Return the profile of the command line, or else of the workload; None when the workload names pools."""
    from capplan.datasets import load_profile

    if name is None and workload.pools:
        return None
    wanted = workload.profile if name is None else name
    if wanted is None:
        raise InputError("is required: name one in the workload or with --profile", location="profile")
    profile = load_profile(wanted)
    profile.require_model(workload.base_model)
    return profile


def one_profile(workload: Workload, name: str | None) -> Profile:
    """Return the profile of the command line, or else of the workload, which must not name pools."""
    profile = chosen_profile(workload, name)
    if profile is None:
        raise InputError("is required, because the workload names pools", location="--profile")
    return profile


def gib_in_bytes(gib: float, flag: str) -> int:
    """Return a memory in bytes."""
    if not 0.0 < gib < float("inf"):
        raise InputError("must be a finite number above 0", gib, flag)
    return round(gib * 2**30)


def numbers(text: str, flag: str, least: int | None = None) -> tuple[int, ...]:
    """Return the numbers of a list separated by commas, each once and none below ``least``."""
    try:
        found = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise InputError("must be whole numbers separated by commas", text, flag) from None
    if least is not None and min(found) < least:
        raise InputError(f"must be >= {least}", min(found), flag)
    return found


def names(text: str, flag: str) -> tuple[str, ...]:
    """Return the names of a list separated by commas, each once; without any it is an error."""
    found = tuple(dict.fromkeys(each.strip() for each in text.split(",") if each.strip()))
    if not found:
        raise InputError("must name at least one", text, flag)
    return found


def member(kind: type[Member], name: str, flag: str) -> Member:
    """Return the member of an enumeration by its value."""
    try:
        return kind(name)
    except ValueError:
        raise InputError(f"must be one of {', '.join(kind)}", name, flag) from None


FAILED: Final = 1
ENGINE: Final = ("fastapi", "prometheus_client", "safetensors", "tokenizers", "torch", "uvicorn")


def require_extra(extra: str, modules: Sequence[str]) -> None:
    """Check that an extra is installed, without importing anything of it."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        rule = f"is missing: pip install '.[{extra}]', in the checkout"
        raise InputError(rule, missing, f"extra {extra!r}")


def simulated_s(workload: Workload, duration_s: float | None) -> float:
    """Return the simulated time: as given, or else an hour or the length of the workload's trace."""
    if duration_s is not None:
        require_duration(duration_s)
        return duration_s
    return workload.horizon_s(_HOUR_S)


def require_state_period(seconds: float) -> None:
    """Check the time between reports of an instance to its router."""
    if not 0.01 <= seconds <= 60.0:
        raise InputError("must be from 0.01 to 60", seconds, "--state-period-s")
