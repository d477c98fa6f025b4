"""Compilation of requests, serving rules and twin, with a disk cache keyed by their sources.

numba's own cache checks the file of a compiled function, but not the files of the functions that it calls:
after an edit, old code could run. Here the name of the cache folder is a digest of all sources.

Two decorators. An `inner` function is only lowered to LLVM IR and linked into its callers: it has no Python
wrapper and no machine code. A `jit` function is an entry: it can be called from Python, and its first call
optimizes and emits code for the entry and its callees together. Compiled callers use its `inner` form. An
entry thus compiles in about half the time of separately compiled functions.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import itertools
import os
import pickle
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar, cast

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, event, types
from numba.core.caching import FunctionCache, IndexDataCacheFile, UserProvidedCacheLocator
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.registry import CPUDispatcher
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    NativeValue,
    infer_getattr,
    lower_getattr_generic,
    models,
    register_model,
    typeof_impl,
    unbox,
)

F = TypeVar("F", bound=Callable[..., object])
C = TypeVar("C", bound=type)

_ENTRY_OPTIONS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "nopython": True,
        "nogil": True,  # the planner verifies GPUs in threads
        "error_model": "numpy",
        "no_cfunc_wrapper": True,
        # Undocumented: without numba's runtime, compiled code counts no references. Counting those of all the
        # state's arrays at every call takes more than 80 % of the twin's time. A function that allocates an
        # array fails to compile.
        "_nrt": False,
    }
)
_INNER_OPTIONS: Final[Mapping[str, Any]] = MappingProxyType(
    dict(_ENTRY_OPTIONS) | {"no_cpython_wrapper": True, "forceinline": True}
)

_PACKAGE = Path(__file__).resolve().parent
_SOURCES = ("serving", "models", "twin", "workload", "spec")
"""Packages with compiled functions, and `spec`, of whose constants they fold some into their code."""
_IMPORT = re.compile(r"^\s*from (capplan[\w.]*) import (\([^)]*\)|[^\n]*)", re.MULTILINE)
_STUB = re.compile(r"^from \.([\w.]+) import (\([^)]*\)|[^\n]*)", re.MULTILINE)
_WORD = re.compile(r"\w+")

_ADDRESS: Final = ir.LiteralStructType([]).as_pointer()
"""Type of the address of a tuple, and of nothing else in one."""
_FIRST_ARGUMENT: Final = 2
"""Of a compiled function, after the pointers to its result and to its exception."""
_DIGEST_BYTES: Final = 32
_PRIVATE_FOLDER: Final = 0o700
_PRIVATE_FILE: Final = 0o600
_numbers = itertools.count()
_TWIN_FUNCTIONS: Final = 155
"""Approximate number of functions that the first simulation compiles."""
_LOWERED: Final = 0.8
"""Share of the compile time before the optimization of the entry."""


@functools.cache
def source_digest() -> str:
    """Return the digest of numba's version and of the sources that compiled code depends on.

    These are the modules with compiled functions, and their direct and indirect imports from `_SOURCES`.
    """
    digest = hashlib.sha256(numba.__version__.encode())
    digest.update(Path(__file__).read_bytes())
    sources, faces = _sources()
    pending = sorted(name for name, source in sources.items() if b"capplan._jit" in source)
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        if name in seen or name not in sources:
            continue
        seen.add(name)
        for module, words in _IMPORT.findall(sources[name].decode()):
            rooms = faces.get(module, {})
            pending += [rooms.get(word, f"{module}.{word}") for word in _WORD.findall(words)]
            pending.append(module)
    for name in sorted(seen):
        digest.update(name.encode())
        digest.update(sources[name])
    return digest.hexdigest()[:16]


def _sources() -> tuple[dict[str, bytes], dict[str, dict[str, str]]]:
    """Return the sources of modules by name, and the modules that the names of each face are from."""
    sources, faces = {}, {}
    for folder in ((_PACKAGE / package).resolve() for package in _SOURCES):
        for file in folder.rglob("*.py*"):
            parts = file.relative_to(folder).with_suffix("").parts
            name = ".".join(("capplan", folder.name, *parts)).removesuffix(".__init__")
            if file.suffix == ".pyi":
                rooms = _STUB.findall(file.read_text(encoding="utf-8"))
                pairs = ((word, f"{name}.{room}") for room, words in rooms for word in _WORD.findall(words))
                faces[name] = dict(pairs)
            elif file.suffix == ".py":
                sources[name] = file.read_bytes()
    return sources, faces


@functools.cache
def cache_dir() -> Path:
    """Return the folder of the compiled code, below ``$CAPPLAN_CACHE_DIR`` or ``~/.cache/capplan``.

    A variable that is empty or a relative path counts as unset: others may have written below the working
    directory.
    """
    root, caches = (Path(os.environ.get(name, "")) for name in ("CAPPLAN_CACHE_DIR", "XDG_CACHE_HOME"))
    if not root.is_absolute():
        home = os.path.expanduser("~")  # noqa: PTH111 - Path.home raises without a home folder
        root = (caches if caches.is_absolute() else Path(home) / ".cache") / "capplan"
    return root / f"compiled-{source_digest()}"


@functools.cache
def _is_cache_usable() -> bool:
    # Otherwise numba falls back to a folder without a digest.
    folder = cache_dir()
    if not folder.is_absolute():  # no home folder
        return False
    try:
        folder.parent.mkdir(_PRIVATE_FOLDER, parents=True, exist_ok=True)
        folder.mkdir(_PRIVATE_FOLDER, exist_ok=True)
        return _is_private(folder) and os.access(folder, os.W_OK)
    except OSError:
        return False


def _is_private(path: Path) -> bool:
    """Return whether nobody but the user can have written a path below the cache's root; no link is followed.

    Files of the cache are unpickled and run.
    """
    root = cache_dir().parent
    for part in (path, *path.parents):
        found = part.stat() if part == root else part.lstat()
        by_others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if found.st_uid != os.geteuid() or by_others or stat.S_ISLNK(found.st_mode):
            return False
        if part == root:
            return True
    return False


TWIN_ENTRY: Final = "_core.advance"
"""The twin's entry in the cache: module and name of its compiled function."""
ENGINE_ENTRY: Final = "stored.schedule"
"""An entry that every engine has compiled once it has started."""


def is_compiled(entry: str = TWIN_ENTRY) -> bool:
    """Return whether an entry is in the cache of these sources."""
    return _is_cache_usable() and any(cache_dir().rglob(f"{entry}*.nbc"))


def on_compiled(progress: Callable[[float], None] | None) -> None:
    """Call `progress` after each compiled function with the completed share of the twin; None: stop.

    The share counts functions, and reaches 1 with the twin's entry.
    """
    listener = _listener()
    listener.progress, listener.functions = progress, 0


class _Listener(event.Listener):
    def __init__(self) -> None:
        self.progress: Callable[[float], None] | None = None
        self.functions = 0

    def on_start(self, event: object) -> None:
        pass

    def on_end(self, event: Any) -> None:
        if self.progress is None:
            return
        self.functions += 1
        done = event.data["dispatcher"].__name__ == "advance"
        self.progress(1.0 if done else _LOWERED * min(1.0, self.functions / _TWIN_FUNCTIONS))
        if done:
            self.progress = None


@functools.cache
def _listener() -> _Listener:
    """Return the one listener, registered with numba."""
    listener = _Listener()
    event.register("numba:compile", listener)
    return listener


def jit(function: F) -> F:
    """Compile `function` as an entry, cached on disk under the digest of all compiled sources.

    If the cache folder cannot be written, or others can write to it, every process compiles for itself.
    """
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]  # made at run time
        return function
    entry = _Entry(function, inner(function), targetoptions=dict(_ENTRY_OPTIONS))
    cache_on_disk(entry)
    return cast("F", entry)


def cache_on_disk(dispatcher: Any) -> None:
    """Let a compiled function load its code from the cache folder and store it there, if that is usable."""
    if not _is_cache_usable():
        return
    config: Any = numba.config
    before = config.CACHE_DIR
    config.CACHE_DIR = str(cache_dir())  # numba fixes a function's cache folder here
    try:
        dispatcher._cache = _Cache(dispatcher.py_func)
    finally:
        config.CACHE_DIR = before


def inner(function: F) -> F:
    """Compile `function` as a part of its compiled callers; a call from Python raises `TypeError`."""
    return _linked(function, _LinkedCompiler, _INNER_OPTIONS)


def inner_once(function: F) -> F:
    """Compile a function as `inner` does, but let callers call it: an entry has one copy, not one per call.

    For what is long, or called from many places, and not at each step: it saves compile time. Fields of a
    tuple are read from memory then, not from registers.
    """
    return _linked(function, _CalledCompiler, {**_INNER_OPTIONS, "forceinline": False})


def inner_sum(function: F) -> F:
    """Compile a function as `inner` does, with sums in any order: LLVM vectorises loops that add up."""
    options = {**_INNER_OPTIONS, "fastmath": {"reassoc", "contract"}}
    return _linked(function, _LinkedCompiler, options)


def _linked(function: F, compiler: type[_LinkedCompiler], options: Mapping[str, Any]) -> F:
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]  # made at run time
        return function
    return cast("F", _Linked(function, targetoptions=dict(options), pipeline_class=compiler))


def inner_with(part: type, otherwise: object) -> Callable[[F], F]:
    """Compile a function as `inner` does where its first argument has a field of type `part`, at any depth.

    Elsewhere its calls are the constant `otherwise`: rules that a state has no room for take no compile time.
    """

    def decorate(function: F) -> F:
        constant = _constant(otherwise, function.__code__.co_argcount)
        if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]  # made at run time

            @functools.wraps(function)
            def chosen(first: Any, *rest: Any) -> object:
                return (function if _holds(first, part) else constant)(first, *rest)

            return cast("F", chosen)

        def implementation(kinds: Any, _named: Any) -> Callable[..., object]:
            return function if _holds_kind(kinds[0], part) else constant

        linked: Any = inner(function)
        linked._compiler._get_implementation = implementation
        return cast("F", linked)

    return decorate


def _holds(value: object, part: type) -> bool:
    """Return whether a field of a named tuple, or of its named tuples, is a `part`."""
    return isinstance(value, tuple) and any(isinstance(each, part) or _holds(each, part) for each in value)


def _holds_kind(kind: Any, part: type) -> bool:
    """Return the same of a compiled type."""
    members = getattr(kind, "members", ())
    return any(getattr(each, "record", None) is part or _holds_kind(each, part) for each in members)


def _constant(value: object, parameters: int) -> Callable[..., object]:
    """Return a function of one to five parameters that returns a constant; numba requires their number."""
    return (
        lambda _a: value,
        lambda _a, _b: value,
        lambda _a, _b, _c: value,
        lambda _a, _b, _c, _d: value,
        lambda _a, _b, _c, _d, _e: value,
    )[parameters - 1]


class _Linked(CPUDispatcher):
    """A function that becomes part of its callers, compiled once for a type and all its constants."""

    def __call__(self, *_args: object, **_kwargs: object) -> object:
        """Refuse a call from Python: there is no machine code."""
        raise TypeError(f"{self.py_func.__name__} is part of compiled callers; from Python, call its py_func")

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """Return the typing of a call; numba would compile another version for every constant argument."""
        named = {name: types.unliteral(kind) for name, kind in kws.items()}
        return super().get_call_template([types.unliteral(kind) for kind in args], named)


class _Entry(CPUDispatcher):
    """A function callable from Python; compiled callers use its linked form."""

    def __init__(self, function: Callable[..., object], linked: Any, **options: Any) -> None:
        super().__init__(function, **options)
        self._linked = linked

    @property
    def _numba_type_(self) -> Any:
        return types.Dispatcher(self._linked)


class _Cache(FunctionCache):
    """Cache on disk; a file that cannot be read or written counts as absent.

    A process that is killed, a full disk or a power failure leaves any part of a file.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        below = UserProvidedCacheLocator.get_suitable_cache_subpath(inspect.getfile(function))
        with contextlib.suppress(OSError):  # numba's modes are those of the umask
            (cache_dir() / below).mkdir(_PRIVATE_FOLDER, exist_ok=True)
        super().__init__(function)
        impl = self._impl
        self._cache_file = _CheckedFiles(
            self._cache_path, impl.filename_base, impl.locator.get_source_stamp()
        )

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save compiled code if the disk takes it."""
        with contextlib.suppress(OSError):
            super().save_overload(sig, data)


class _CheckedFiles(IndexDataCacheFile):
    """Index and code of a function; code begins with its digest, because damaged code would run."""

    def _load_index(self) -> dict[Any, str]:
        try:
            return dict(super()._load_index()) if _is_private(Path(self._index_path)) else {}
        except Exception:  # noqa: BLE001 - what unpickling any bytes raises
            return {}

    def _load_data(self, name: str) -> Any:
        path = Path(self._data_path(name))
        if not _is_private(path):
            raise OSError("written by others")  # `load` compiles then, as for a missing file
        contents = path.read_bytes()
        digest, code = contents[:_DIGEST_BYTES], contents[_DIGEST_BYTES:]
        if hashlib.sha256(code).digest() != digest:
            raise OSError("damaged")
        return pickle.loads(code)  # noqa: S301 - written by this class

    def _save_data(self, name: str, data: Any) -> None:
        code = self._dump(data)
        with self._open_for_write(self._data_path(name)) as file:
            file.write(hashlib.sha256(code).digest() + code)

    @contextlib.contextmanager
    def _open_for_write(self, filepath: str) -> Iterator[Any]:
        with super()._open_for_write(filepath) as file:
            Path(file.name).chmod(_PRIVATE_FILE)
            yield file


class _LinkedLibrary(JITCodeLibrary):
    """LLVM IR of one function and its callees, optimized only as part of an entry."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def create_ir_module(self, name: str) -> Any:
        """Return an empty module that says that its functions are parts of others."""
        module = super().create_ir_module(name)
        module.is_linked = True
        return module

    def get_pointer_to_function(self, name: str) -> int:
        """Return the null pointer: there is no machine code."""
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> Any:
        """A code generator that has no environment to fill in."""
        return _NO_ENVIRONMENT


class _CalledLibrary(_LinkedLibrary):
    """A function that LLVM does not inline."""

    def add_ir_module(self, module: Any) -> None:
        """Add the module of the function, which becomes a call of its body with tuples that last.

        Tuples in registers stay there: their copies on the stack would have an address that a call knows.
        """
        for function in [each for each in module.functions if not each.is_declaration]:
            body = ir.Function(module, function.function_type, f"{function.name}.body")
            body.linkage, body.blocks, function.blocks = function.linkage, function.blocks, []
            body.args, function.args = function.args, body.args
            body.attributes.add("noinline")
            function.attributes.add("alwaysinline")
            builder = ir.IRBuilder(function.append_basic_block())
            given = list(function.args)
            for at in range(_FIRST_ARGUMENT, len(given)):
                if _is_tuple(getattr(given[at].type, "pointee", None)):
                    given[at] = _lasting(builder, given[at])
                    body.args[at].add_attribute("noalias")  # no code writes tuples while it runs
            builder.ret(builder.call(body, given))
        super().add_ir_module(module)


def _is_tuple(kind: Any) -> bool:
    """Return whether a type is the layout of a `Reference`."""
    return isinstance(kind, ir.LiteralStructType) and kind.elements[:1] == (_ADDRESS,)


def _lasting(builder: Any, tuple_: Any) -> Any:
    """Return the pointer that a tuple in registers has of itself, in memory that lasts for the entry."""
    address = builder.load(cgutils.gep_inbounds(builder, tuple_, 0, 0))
    return builder.bitcast(address, tuple_.type)


def note_address(builder: Any, tuple_: Any, address: Any) -> None:
    """Store in a tuple, and in those inside, the address at which they last; `Reference.layout` says why."""
    pointer = builder.bitcast(address, _ADDRESS)
    builder.store(pointer, cgutils.gep_inbounds(builder, tuple_, 0, 0))
    for at, kind in enumerate(tuple_.type.pointee.elements):
        if _is_tuple(kind):
            inside = [cgutils.gep_inbounds(builder, each, 0, at) for each in (tuple_, address)]
            note_address(builder, *inside)


class _NoEnvironment:
    def set_env(self, env_name: str, env: object) -> None:
        pass


_NO_ENVIRONMENT: Final = _NoEnvironment()


class _LinkedCompiler(Compiler):
    _library: type[_LinkedLibrary] = _LinkedLibrary

    def __init__(self, typing: Any, target: Any, library: Any, *rest: Any) -> None:
        library = self._library(target.codegen(), f"linked.{next(_numbers)}")
        super().__init__(typing, target, library, *rest)


class _CalledCompiler(_LinkedCompiler):
    _library = _CalledLibrary


def by_reference(record: C) -> C:
    """Pass the named tuples of class `record` between compiled functions as one pointer.

    numba passes a tuple's arrays one by one, each as seven numbers, which is most of the code of a short
    function. An entry copies the tuple to its stack, where LLVM replaces it by registers. That requires field
    names known at compile time: no choice between two fields of one tuple by a condition or a loop.
    """

    @typeof_impl.register(record)
    def _type(value: Any, context: Any) -> types.Type | None:
        members = tuple(typeof_impl(member, context) for member in value)
        return None if None in members else Reference(record, members)

    return record


class Reference(types.Type):
    """The type of a pointer to the fields of a named tuple."""

    def __init__(self, record: Any, members: tuple[types.Type, ...]) -> None:
        self.record = record
        self.members = members
        digest = hashlib.sha256(repr([str(member) for member in members]).encode()).hexdigest()[:12]
        super().__init__(f"{record.__name__}_{digest}")

    @property
    def key(self) -> tuple[Any, tuple[types.Type, ...]]:
        """Identity of the type: its class, and the types of the fields."""
        return self.record, self.members

    def layout(self, value_type: Callable[[types.Type], Any]) -> Any:
        """Return the structure in memory; nested tuples are stored inside.

        Its first field is the address of the tuple, for calls: a copy in registers has none.
        """
        parts = [m.layout(value_type) if isinstance(m, Reference) else value_type(m) for m in self.members]
        return ir.LiteralStructType([_ADDRESS, *parts])


@register_model(Reference)
class _ReferenceModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Reference) -> None:
        layout = kind.layout(lambda member: manager.lookup(member).get_value_type())
        super().__init__(manager, kind, layout.as_pointer())

    def from_argument(self, builder: Any, value: Any) -> Any:
        if getattr(builder.module, "is_linked", False):
            return value
        return cgutils.alloca_once_value(builder, builder.load(value))


@infer_getattr
class _ReferenceAttributes(AttributeTemplate):
    key = Reference

    def generic_resolve(self, value: Any, attr: str) -> Any:  # type: ignore[override]  # annotated as None
        fields = value.record._fields
        return value.members[fields.index(attr)] if attr in fields else None


@lower_getattr_generic(Reference)
def _field(_context: Any, builder: Any, kind: Reference, value: Any, name: str) -> Any:
    at = kind.record._fields.index(name)
    pointer = cgutils.gep_inbounds(builder, value, 0, at + 1)  # behind the address
    return pointer if isinstance(kind.members[at], Reference) else builder.load(pointer)


@unbox(Reference)
def _unbox(kind: Reference, tuple_: Any, c: Any) -> Any:
    pointer = cgutils.alloca_once(c.builder, kind.layout(c.context.get_value_type))
    failed = cgutils.alloca_once_value(c.builder, cgutils.false_bit)
    cleanups = []
    for at, member in enumerate(kind.members):
        native = c.unbox(member, c.pyapi.tuple_getitem(tuple_, at))
        if native.cleanup is not None:
            cleanups.append(native.cleanup)
        value = c.builder.load(native.value) if isinstance(member, Reference) else native.value
        c.builder.store(value, cgutils.gep_inbounds(c.builder, pointer, 0, at + 1))
        with c.builder.if_then(native.is_error, likely=False):
            c.builder.store(cgutils.true_bit, failed)
    note_address(c.builder, pointer, pointer)

    def cleanup() -> None:
        for release in cleanups:
            release()

    return NativeValue(pointer, is_error=c.builder.load(failed), cleanup=cleanup)
