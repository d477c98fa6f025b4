"""The application: its commands, the options that all of them share, and exit codes."""

from __future__ import annotations

import builtins
import errno
import io
import keyword
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from importlib import import_module
from types import FrameType
from typing import Annotated, Any, Final, cast

import typer
from pydantic import ValidationError
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from capplan.errors import NO_VALUE, CapplanError, InputError
from capplan.interrupt import INTERRUPTED, quit_at_once
from capplan.processes import end_with_parent
from capplan.spec import InputLimits, input_error, limited

_PIPE_CLOSED: Final = 141  # 128 + SIGPIPE
_REPEAT_S: Final = 0.01
_IMPORT_SYSTEM: Final = "<frozen importlib._bootstrap>"
_SYSTEM_ERRORS: Final = (
    *(
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EIO,
        errno.EBADF,
        errno.EROFS,
        errno.EMFILE,
        errno.ENFILE,
    ),
    *(errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR, errno.ENOTDIR),
)


@contextmanager
def reported(debug: bool) -> Iterator[None]:
    """Map exceptions to one line on stderr and an exit status; internal errors pass unchanged."""
    try:
        yield
        sys.stdout.flush()  # raises BrokenPipeError here rather than at interpreter exit
    except CapplanError as error:
        if debug:
            traceback.print_exc()
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
    except typer.TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the help page is printed already
            raise
        typer.echo(f"error: {_usage_error(error)}", err=True)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        raise _interrupted() from None
    except MemoryError:
        if debug:
            traceback.print_exc()
        typer.echo("error: out of memory: this machine has too little for an input of this size", err=True)
        raise typer.Exit(InputError.exit_code) from None
    except BrokenPipeError:
        _discard_stdout()
        raise typer.Exit(_PIPE_CLOSED) from None
    except Exception as error:
        if not _comes_of_interrupt(error):
            raise
        raise _interrupted() from None


def _interrupted() -> typer.Exit:
    """Say that the command was interrupted, and return its end."""
    typer.echo("interrupted", err=True)
    # CPython remembers an interrupt inside `exec`, as of a dataclass on import, until a text is executed
    # again, and `python -m` would end by the signal instead.
    exec("")  # noqa: S102
    return typer.Exit(INTERRUPTED)


def _comes_of_interrupt(error: BaseException | None) -> bool:
    """Tell whether an error was raised in place of an interrupt, as extension modules do on import.

    Some chain the interrupt, others (pydantic-core) quote it in their own text.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, KeyboardInterrupt) or KeyboardInterrupt.__name__ in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _usage_error(error: typer.TyperException) -> InputError:
    """Return an error of the parser in the form of all others: what it is about, the rule, the next step."""
    ctx: Any = getattr(error, "ctx", None)
    param: Any = getattr(error, "param", None)
    command = "capplan" if ctx is None else ctx.command_path
    option = getattr(error, "option_name", None)
    rule, value = error.format_message().rstrip("."), cast(object, NO_VALUE)
    if param is not None:
        option = param.metavar if param.param_type_name == "argument" else max(param.opts, key=len)
        rule = error.message.rstrip(".") or "is required"
        if isinstance(error.__cause__, ValidationError):
            found = input_error(error.__cause__, str)
            rule = found.rule.partition(", unable to")[0].removeprefix("Value error, ").rstrip(".")
            value = found.value
    elif hasattr(error, "possibilities"):
        near = " or ".join(sorted(error.possibilities or ()))
        rule = f"is not an option of {command}" + (f"; did you mean {near}" if near else "")
    else:
        rule = (rule[:1].lower() + rule[1:]).removeprefix(f"option {option!r} ")
    return InputError(f"{rule}; `{command} --help` shows what it takes", value, option or command)


def _show_version(wanted: bool) -> None:
    if wanted:
        import capplan

        typer.echo(f"capplan {capplan.__version__}")
        raise typer.Exit


def _limit(name: str, metavar: str, words: str) -> Any:
    """Return the option of a field of `InputLimits`."""
    return typer.Option(getattr(InputLimits(), name), metavar=metavar, help=words)


def _shared_options(
    ctx: typer.Context,
    version: Annotated[  # noqa: ARG001 - acted on as it is parsed
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and stop."),
    ] = False,
    debug: Annotated[  # noqa: ARG001 - read by the group
        bool, typer.Option("--debug", help="Show the traceback of an error.")
    ] = False,
    max_adapters: int = _limit("max_adapters", "N", "Refuse files with more adapters."),
    max_instances: int = _limit("max_instances", "N", "Refuse plans with more instances."),
    max_duration_s: float = _limit("max_duration_s", "SECONDS", "Refuse to simulate more time."),
    max_trace_rows: int = _limit("max_trace_rows", "N", "Refuse traces with more requests."),
) -> None:
    """From a workload file to a multi-LoRA serving plan that is verified before anyone deploys it.

    Exit status: 0 done, 1 a verification disagrees, 2 something given is wrong, 3 no plan is possible.
    """
    try:
        limits = InputLimits(
            max_adapters=max_adapters,
            max_instances=max_instances,
            max_duration_s=max_duration_s,
            max_trace_rows=max_trace_rows,
        )
    except InputError as error:
        raise InputError(error.rule, error.value, f"--{error.location.replace('_', '-')}") from None
    ctx.with_resource(limited(limits))


_COMMANDS: Final = {
    "observe": "Observe traffic, write it as a workload, and compare the workload with what was observed.",
    "plan": "Plan which adapters share which GPUs, with which engine settings, and verify it with the twin.",
    "compare": "Compare solvers on a workload: raw answers, and the verdict of the twin on fresh seeds.",
    "simulate": "Simulate one GPU that serves the whole workload, or the instances of a plan.",
    "capacity": "Find the highest load of a cluster within its SLO, or the fewest instances for its load.",
    "tune": "Search settings of Chameleon's scheduler and cache, and compare them on held-out windows.",
    "explain": "Explain a plan: bottleneck of each group, predictions, verification, and the number of GPUs.",
    "report": "Write a plan as one HTML page that works offline: groups, predictions, bottlenecks, adapters.",
    "diff": "Compare two plans: GPUs, groups, settings, and adapters with the bytes to copy.",
    "export": "Write what a target deploys: for vllm a script per server, routing.json and plan.json.",
    "lint": "Check workloads, plans, exports, adapter folders and running servers for known mistakes.",
    "profiles": "List the shipped profiles, or show one with its coefficients, ranges and source.",
    "calibrate": "Fit a profile to measured steps or whole runs, and report its error on left-out data.",
    "train": "Simulate scenarios of one GPU, train surrogates on the results, and write them.",
    "serve": "Serve a model and its adapters over HTTP until SIGTERM or Ctrl-C, then drain and exit 0.",
    "bench": "Load an OpenAI-compatible server with the requests of a workload, at their arrival times.",
    "validate": "Run one engine per group of a plan under the requests of the twin, and compare the two.",
    "reproduce": "Simulate the papers' figures on the papers' own settings, beside the papers' numbers.",
    "registry": "Keep a registry of adapters that planning and servers share.",
    "registry add": "Add adapters by folder or by reference, all or none.",
    "registry list": "List the adapters of a registry.",
    "registry remove": "Remove adapters, or a server that does not come back.",
    "registry show": "Show an adapter: properties, location, and the servers that store it.",
    "schema": "Print the JSON Schema of plan.json, workload.yaml or a profile.",
    "dataset": "Make training data for surrogates.",
    "dataset generate": "Simulate scenarios of one GPU, and write the results as training data.",
    "profile": "Measure the tables that profiles are fitted to.",
    "profile accuracy": "Show errors on measured engines of a profile's kind, nearest rows first.",
    "profile compose": "Compose a profile from measured operators of a GPU.",
    "profile cpu-lora": "Measure the CPU cores that can assist the loading of adapters, into a profile.",
    "profile engine": "Measure the reference engine: KV memory, adapter loads, steps, and its server.",
    "profile for": "Name the best profile of a GPU and a model, its error, and the command that makes it.",
    "profile kernels": "Time shrink and expand of padded and grouped LoRA kernels, and fit Toppings' models.",
    "profile roofline": "Compute a profile from a GPU's datasheet and a model's architecture.",
    "profile server": "Measure a running OpenAI-compatible server from outside; it should be idle otherwise.",
    "surrogate": "Inspect the surrogates of a profile.",
    "surrogate rules": "Print the decision rules of a profile's small trees, those that cover most first.",
    "workload": "Write workload files of papers and public traces, and train predictors of output lengths.",
    "workload predictor": "Train a predictor of output lengths, and report its accuracy.",
    "workload preset": "List the presets, or write the workload file of one.",
}
"""Commands and groups with the first lines of their help, in the order of the help pages."""

_MODULES: Final = {
    **{"report": "explain", "profiles": "documents", "schema": "documents"},
    **{"dataset generate": "dataset", "surrogate rules": "surrogate", "workload preset": "workload"},
    "workload predictor": "workload",
    **{f"registry {name}": "registry" for name in ("add", "list", "remove", "show")},
}
"""Modules of commands that are not named after their command."""


class _Commands(Mapping[str, Any]):
    """Commands of a group by name, each imported on first access."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def __iter__(self) -> Iterator[str]:
        names = (path.removeprefix(self.prefix) for path in _COMMANDS if path.startswith(self.prefix))
        return (name for name in names if " " not in name)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Any:
        return _load(self.prefix + name)


@cache
def _load(path: str) -> Any:
    """Return a command or group; KeyError if there is none at ``path``."""
    line = _COMMANDS[path]
    if any(each.startswith(f"{path} ") for each in _COMMANDS):
        return CommandGroup(name=path, help=line, no_args_is_help=True)
    name = path.rpartition(" ")[2]
    module = _MODULES.get(path, path.replace(" ", "_").replace("-", "_"))
    made = typer.Typer(add_completion=False)
    is_taken = hasattr(builtins, name) or keyword.iskeyword(name)
    function = f"{name}_" if is_taken else name.replace("-", "_")
    made.command(name)(getattr(import_module(f"capplan.cli.{module}"), function))
    found = get_command(made)
    if signal.getsignal(signal.SIGINT) is quit_at_once:
        signal.signal(signal.SIGINT, _interrupt)  # there may be something to clean up
    return found


class CommandGroup(TyperGroup):
    """Group whose commands are imported on use; its help page needs only their first lines."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._prefix = f"{self.name} " if self.name in _COMMANDS else ""
        commands: Any = _Commands(self._prefix)
        self.commands = commands

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands."""
        return list(self.commands)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help page."""
        lines = [TyperCommand(name, help=_COMMANDS[self._prefix + name]) for name in self.commands]
        page = TyperGroup(name=self.name, commands=lines, params=self.params, help=self.help)
        page.format_help(ctx, formatter)

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        """Parse the options of the group; a usage error becomes an exit status."""
        with reported(debug=False) if parent is None else nullcontext():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; exceptions become an exit status."""
        if ctx.parent is not None:
            return super().invoke(ctx)
        with reported(debug=ctx.params.get("debug", False)):
            return super().invoke(ctx)


app = typer.Typer(
    name="capplan",
    cls=CommandGroup,
    callback=_shared_options,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line; never returns."""
    end_with_parent()
    _require_streams()
    sys.unraisablehook = _interrupt_again
    try:
        try:
            app(prog_name="capplan")
        finally:
            sys.stdout.flush()
    except OSError as error:
        raise SystemExit(_reported_by_system(error)) from None


def _interrupt_again(unraisable: Any) -> None:
    """Repeat an interrupt that was raised where exceptions are ignored, as in a callback of the collector."""
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
        return
    _repeat_interrupt()  # after this function, in which exceptions are ignored, too


def _interrupt(_: int, frame: FrameType | None) -> None:
    """Raise an interrupt; one within an import waits for its end, since modules suppress errors on import."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT_SYSTEM:
            _repeat_interrupt()
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _repeat_interrupt() -> None:
    again = threading.Timer(_REPEAT_S, signal.raise_signal, [signal.SIGINT])
    again.daemon = True
    again.start()


def _require_streams() -> None:
    """Open what is closed of the standard streams, whose numbers files would get; stdout must be open.

    Characters that a terminal cannot show are replaced.
    """
    if sys.stdout is None:
        typer.echo("error: standard output: is closed", err=True)
        raise SystemExit(InputError.exit_code)
    for stream, flags in ((sys.stdin, os.O_RDONLY), (sys.stderr, os.O_WRONLY)):
        if stream is None:
            os.open(os.devnull, flags)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - until the end of the process
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="replace")


def _discard_stdout() -> None:
    """Redirect buffered output, which would otherwise raise at interpreter exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _reported_by_system(error: OSError) -> int:
    """Report what the machine or a name of the user is to blame for, in one line; others pass unchanged."""
    if error.errno not in _SYSTEM_ERRORS:
        raise error
    where, what = error.filename, "cannot be used"
    if where is None:
        _discard_stdout()
        where, what = "standard output", "cannot be written"
    with suppress(OSError):
        typer.echo(f"error: {InputError(f'{what}: {error.strerror}', location=str(where))}", err=True)
    return InputError.exit_code
