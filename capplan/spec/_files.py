"""Files: the rule for what may be opened, text, YAML with line numbers, and JSON.

Writing: a file or folder at a path is the old one or the new one, also after a crash. The new one is written
beside the old one under an unused name, flushed to the disk, and put in its place by one call of the system.
What a killed process leaves are hidden files with the ending .tmp.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Final, TypeAlias

import yaml

from capplan.errors import InputError
from capplan.spec._validation import Key, format_key

_READ_AND_RUN: Final = 0o755
_NEW_FILE: Final = 0o666  # less the umask
_PRIVATE: Final = 0o600
_LONGEST_STEM: Final = 100  # characters; file systems allow names of 255 bytes
_WITHOUT_SYNC: Final = (errno.EINVAL, errno.ENOTSUP)  # file systems that cannot flush a folder
_WITHOUT_EXCHANGE: Final = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
_AT_WORKING_DIRECTORY: Final = -100  # AT_FDCWD of <fcntl.h>
_EXCHANGE: Final = 2  # RENAME_EXCHANGE of <linux/fs.h>


def write_text_atomic(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` as UTF-8; as :func:`write_bytes_atomic`."""
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"cannot be written: {error.reason}", location=os.fspath(path)) from None
    write_bytes_atomic(path, data)


def write_bytes_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Write ``data`` so that readers see the old file or the new one, never a part.

    The data is written beside the target and renamed; see :func:`create_beside`. A device, or a pipe that is
    read, is written to directly.

    Raises
    ------
    InputError
        When the file cannot be written; an existing file is then left as it was.
    """
    try:
        target = resolved_output(path)
        if target.exists() and not target.is_file():
            # A FIFO that nobody reads would block.
            flags = os.O_WRONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
            with os.fdopen(os.open(target, flags), "wb") as file:
                os.set_blocking(file.fileno(), True)
                file.write(data)
            return
        beside = create_beside(target)
        try:
            beside.write_bytes(data)
            replace_durably(beside, target)
        except BaseException:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise InputError(f"cannot be written: {error_reason(error)}", location=os.fspath(path)) from None


def resolved_output(path: str | os.PathLike[str]) -> Path:
    """Return the path that an output is written to: a link stays, and what it points to is replaced.

    Raises
    ------
    OSError
        For links in a loop.
    """
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return target


def create_beside(target: Path) -> Path:
    """Create an empty hidden file in the folder of ``target``, to be filled and put in its place.

    It has mode and owner of an existing target, as far as this user may set the owner, from the start.
    Other hard links to the target keep the old contents.

    Raises
    ------
    OSError
        If it cannot be created, or the target exists and is no regular file, which a rename would replace.
    """
    before = target.stat() if target.exists() else None
    if before is not None and not stat.S_ISREG(before.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    beside = unused_beside(target)
    mode = _NEW_FILE if before is None else _PRIVATE
    number = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        if before is not None:
            with contextlib.suppress(PermissionError):
                os.fchown(number, before.st_uid, before.st_gid)
            os.fchmod(number, stat.S_IMODE(before.st_mode))
    finally:
        os.close(number)
    return beside


def unused_beside(target: Path) -> Path:
    """Return an unused hidden path in the folder of ``target``: ``.NAME.RANDOM.tmp``."""
    return target.with_name(f".{target.name[:_LONGEST_STEM]}.{secrets.token_hex(8)}.tmp")


def replace_durably(beside: Path, target: Path) -> None:
    """Move a complete file to ``target``, which may exist, and flush both to the disk."""
    sync(beside)
    beside.replace(target)
    sync(target.parent)


def write_folder_atomic(target: Path, files: Mapping[str, str], executable: frozenset[str]) -> None:
    """Write a folder so that readers see the old one or the new one, never a part.

    Parameters
    ----------
    target : Path
        The folder, no link; one that exists is replaced.
    files : mapping of str to str
        Text of each file, by its path within the folder.
    executable : frozenset of str
        Files that can be run.

    Raises
    ------
    OSError
        When the folder cannot be written; an existing one is then left as it was.
    """
    beside = unused_beside(target)
    try:
        _fill(beside, files, executable)
        if target.is_dir():
            _exchange(beside, target)  # afterwards the old folder is beside the new one
        else:
            beside.rename(target)
        sync(target.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _fill(folder: Path, files: Mapping[str, str], executable: frozenset[str]) -> None:
    folder.mkdir()
    folders = {folder}
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8", newline="\n")
        if name in executable:
            file.chmod(_READ_AND_RUN)
        sync(file)
        folders.add(file.parent)
    for each in folders:
        sync(each)


def _exchange(new: Path, old: Path) -> None:
    """Exchange two folders, in one call if the operating system has one."""
    call = _renameat2()
    here = _AT_WORKING_DIRECTORY
    if call is not None and call(here, os.fsencode(new), here, os.fsencode(old), _EXCHANGE) == 0:
        return
    code = errno.ENOSYS if call is None else ctypes.get_errno()
    if code not in _WITHOUT_EXCHANGE:
        raise OSError(code, os.strerror(code))
    aside = unused_beside(old)
    old.rename(aside)
    try:
        new.rename(old)
    except BaseException:
        aside.rename(old)
        raise
    aside.rename(new)


@cache
def _renameat2() -> Any:
    """Return the C library's function, which Python has not; None without one."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return call


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    try:
        number = os.open(path, os.O_RDONLY)
    except PermissionError:  # a folder that may be written, but not listed
        return
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in _WITHOUT_SYNC:
            raise
    finally:
        os.close(number)


_PART_BYTES: Final = 2**20
_FLAGS: Final = os.O_RDONLY | sum(
    # O_NONBLOCK: a FIFO without a writer blocks its reader. O_BINARY is a flag of Windows.
    getattr(os, name, 0)
    for name in ("O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_BINARY")
)
MAX_BYTES: Final = 64 * 2**20  # a workload or plan beyond this is a mistake, not a document


def read_text(path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> str:
    """Return the text of a UTF-8 file, without a byte-order mark.

    Raises
    ------
    InputError
        When it is missing, no regular file, unreadable, larger than ``max_bytes``, or not UTF-8.
    """
    raw = read_bytes(path, max_bytes)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError("must be UTF-8 text", location=f"{os.fspath(path)}:{line}") from None


def read_at_most(file: BinaryIO, max_bytes: int) -> bytes:
    """Return the contents of a file, and a byte more if it is larger; `read` would allocate the maximum."""
    parts: list[bytes] = []
    left = max_bytes + 1
    while left and (part := file.read(min(left, _PART_BYTES))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def read_bytes(path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> bytes:
    """Return the contents of a regular file.

    Raises
    ------
    InputError
        When it is missing, no regular file, unreadable, or larger than ``max_bytes``.
    """
    name = os.fspath(path)
    with open_regular(path, None, name) as file:
        is_larger = os.fstat(file.fileno()).st_size > max_bytes
        try:
            raw = b"" if is_larger else read_at_most(file, max_bytes)
        except OSError as error:
            raise InputError(f"cannot be read: {error_reason(error)}", location=name) from None
    if is_larger or len(raw) > max_bytes:
        raise InputError(f"must not be larger than {max_bytes / 2**20:g} MiB", location=name)
    return raw


def open_stream(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading; see :func:`open_regular`."""
    return io.BufferedReader(open_regular(path, None, os.fspath(path)))  # type: ignore[type-var]  # a FileIO


def open_regular(file: str | os.PathLike[str], root: Path | None, location: str) -> BinaryIO:
    """Open a regular file without waiting; below a root, follow no link.

    Every file that a user, a document or another file names is opened here. Other kinds may block or have no
    end, as may the files of ``/proc`` and ``/sys``, which only look regular.

    Parameters
    ----------
    root
        Folder that holds `file`, with all links resolved; None: links are followed.

    Raises
    ------
    InputError
        If it cannot be opened, or is a folder, a FIFO, a socket, a device or a file of the kernel.
    """
    try:
        number = (
            os.open(file, _FLAGS) if root is None else _open_below(root, Path(file).relative_to(root).parts)
        )
        kind = _other_kind(os.fstat(number))
        opened = None if kind else os.fdopen(number, "rb", buffering=0, closefd=True)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise InputError(f"cannot be read: {error_reason(error)}", location=location) from None
    if opened is None:
        os.close(number)
        raise InputError(f"must be a regular file, not a {kind}", location=location)
    return opened


def _other_kind(found: os.stat_result) -> str:
    """Return the kind of a file that is not regular; empty for a regular one."""
    if stat.S_ISREG(found.st_mode):
        return "file of the kernel" if found.st_dev in _kernel_devices() else ""
    kinds = {stat.S_IFDIR: "directory", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}
    return kinds.get(stat.S_IFMT(found.st_mode), "device")


@cache
def _kernel_devices() -> frozenset[int]:
    return frozenset(Path(at).stat().st_dev for at in ("/proc", "/sys") if Path(at).is_mount())


def _open_below(root: Path, parts: Sequence[str]) -> int:
    """Open a file by its path below a folder; a link on the way is an error."""
    folder = os.open(root, _FLAGS | os.O_DIRECTORY)
    try:
        for part in parts[:-1]:
            inner = os.open(part, _FLAGS | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        return os.open(parts[-1], _FLAGS | os.O_NOFOLLOW, dir_fd=folder)
    finally:
        os.close(folder)


def error_reason(error: Exception) -> str:
    """Return the reason of an error of the operating system."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


Scalar: TypeAlias = str | int | float | bool | None
_MAX_NODES: Final = 1_000_000
_MAX_DEPTH: Final = 64

_UNQUOTED: Final = re.compile(r"\{i\}")
_QUOTE: Final = 'quote text with {i}, as in name: "a-{i}"'

_CORE_SCHEMA: Final = MappingProxyType(
    {
        "null": re.compile(r"(?:null|Null|NULL|~|)\Z"),
        "bool": re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"),
        "int": re.compile(r"[-+]?[0-9]+\Z"),
        "float": re.compile(
            r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z|[-+]?\.(?:inf|Inf|INF)\Z|\.(?:nan|NaN|NAN)\Z"
        ),
    }
)


@dataclass(frozen=True)
class Node:
    """A value and the line it begins on; the children of a mapping come with the lines of their keys."""

    line: int
    value: Scalar | list[Node] | dict[str, tuple[int, Node]]


@dataclass(frozen=True)
class YamlSource:
    """A parsed YAML file: its path as the user wrote it, its data, and the same with line numbers."""

    path: str
    data: Any
    root: Node | None

    def locate(self, key: Key) -> str:
        """Return ``FILE:LINE: dotted.key``; the line is that of the deepest part of ``key`` that is there."""
        if self.root is None:
            return self.path
        line = _line_of_key(self.root, key)
        return f"{self.path}:{line}: {format_key(key)}" if key else f"{self.path}:{line}"


def read_yaml(path: str) -> YamlSource:
    """Read one YAML document.

    Raises
    ------
    InputError
        For an unreadable file, broken YAML, a duplicate key, a key that is not text, a tag.
    """
    return parse_yaml(read_text(path), path)


def parse_yaml(text: str, path: str) -> YamlSource:
    """Parse one YAML document; ``path`` is the name used in errors."""
    try:
        loader = (yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader)(text)
        try:
            root = _Builder(_events(loader), path).document()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else path
        words = getattr(error, "problem", None) or getattr(error, "reason", None) or "broken document"
        marks = [each for each in (mark, getattr(error, "context_mark", None)) if each]
        lines = text.splitlines()
        if any(_UNQUOTED.search(lines[each.line]) for each in marks if each.line < len(lines)):
            words = f"{words}; {_QUOTE}"
        raise InputError(f"must be YAML: {words}", location=where) from None
    return YamlSource(path, None if root is None else _Expansion(path).data(root), root)


class YamlDumper(yaml.SafeDumper):
    """Writes YAML that `parse_yaml` reads as it was: texts that YAML 1.2 takes for numbers have quotes."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write equal parts in full, without references."""
        return True


YamlDumper.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"([-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|0o[0-7]+)\Z"),
    list("-+.0123456789"),
)


def yaml_text(document: Any, dumper: type[YamlDumper] = YamlDumper) -> str:
    """Return a document of YAML, its keys in their order."""
    text: str = yaml.dump(document, Dumper=dumper, sort_keys=False, allow_unicode=True, width=2**16)
    return text


def parse_scalar(text: str) -> Scalar:
    """Return the value of a plain scalar under the core schema of YAML 1.2."""
    if _CORE_SCHEMA["null"].match(text):
        return None
    if _CORE_SCHEMA["bool"].match(text):
        return text.lower() == "true"
    if _CORE_SCHEMA["int"].match(text) and len(text) <= 300:  # longer ones overflow to infinity below
        return int(text)
    if _CORE_SCHEMA["float"].match(text):
        return float(text.replace(".", "", 1) if text[-1] in "fFnN" else text)
    return text


def _events(loader: Any) -> Iterator[yaml.Event]:
    while loader.check_event():
        yield loader.get_event()


class _Builder:
    """Builds nodes from parser events. PyYAML's own composer recurses without a limit, and crashes."""

    def __init__(self, events: Iterator[yaml.Event], path: str) -> None:
        self._events = events
        self._path = path
        self._anchors: dict[str, Node] = {}
        self._nodes_left = _MAX_NODES

    def document(self) -> Node | None:
        """Return the only document of the stream, or None when there is none."""
        root = None
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    raise self._error(event, "must be a single YAML document")
                root = self._node(next(self._events), 0)
        return root

    def _node(self, event: yaml.Event, depth: int) -> Node:
        self._nodes_left -= 1
        if self._nodes_left < 0:
            raise self._error(event, f"must not hold over {_MAX_NODES} values")
        if depth > _MAX_DEPTH:
            raise self._error(event, f"must not be nested more than {_MAX_DEPTH} levels deep")
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                raise self._error(event, f"alias *{event.anchor} has no anchor before it")
            return self._anchors[event.anchor]
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag is not None:
            raise self._error(event, f"must not carry the tag {event.tag}: plain values only")
        node = Node(_line_of(event), self._value(event, depth))
        if isinstance(event, yaml.NodeEvent) and event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _value(self, event: yaml.Event, depth: int) -> Any:
        if isinstance(event, yaml.ScalarEvent):
            return parse_scalar(event.value) if event.implicit[0] else event.value
        if isinstance(event, yaml.SequenceStartEvent):
            items = []
            while not isinstance(item := next(self._events), yaml.SequenceEndEvent):
                items.append(self._node(item, depth + 1))
            return items
        return self._mapping(depth)

    def _mapping(self, depth: int) -> dict[str, tuple[int, Node]]:
        result: dict[str, tuple[int, Node]] = {}
        merged: Node | None = None
        while not isinstance(key := next(self._events), yaml.MappingEndEvent):
            if not isinstance(key, yaml.ScalarEvent):
                raise self._error(key, "a key must be text")
            is_merge = key.value == "<<" and key.implicit[0]
            if key.value in result or (is_merge and merged is not None):
                raise self._error(key, f"duplicate key {key.value!r}")
            value = self._node(next(self._events), depth + 1)
            if is_merge:
                merged, merge_key = value, key
            else:
                result[key.value] = (_line_of(key), value)
        if set(result) == {"i"} and result["i"][1].value is None:
            raise self._error(key, f"must be text: {_QUOTE}")
        return result if merged is None else self._merged(result, merged, merge_key)

    def _merged(
        self, fields: dict[str, tuple[int, Node]], merged: Node, event: yaml.Event
    ) -> dict[str, tuple[int, Node]]:
        """Return the fields of a mapping and those that its merge key adds: the first of a name counts."""
        for source in merged.value if isinstance(merged.value, list) else [merged]:
            if not isinstance(source.value, dict):
                raise self._error(event, "<< must be followed by a mapping, or by a list of mappings")
            self._nodes_left -= len(source.value)
            if self._nodes_left < 0:
                raise self._error(event, f"must not hold over {_MAX_NODES} values")
            fields = fields | {key: value for key, value in source.value.items() if key not in fields}
        return fields

    def _error(self, event: yaml.Event, rule: str) -> InputError:
        return InputError(rule, location=f"{self._path}:{_line_of(event)}")


def _line_of(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 1


class _Expansion:
    """Turns nodes into data; counts them, because aliases of aliases can stand for more than memory holds."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._nodes_left = _MAX_NODES

    def data(self, node: Node, depth: int = 0) -> Any:
        """Return dicts, lists and scalars."""
        if depth > _MAX_DEPTH:
            rule = f"must not be nested more than {_MAX_DEPTH} levels deep, aliases included"
            raise InputError(rule, location=f"{self._path}:{node.line}")
        self._nodes_left -= 1
        if self._nodes_left < 0:
            raise InputError(f"must not hold over {_MAX_NODES} values, aliases included", location=self._path)
        if isinstance(node.value, dict):
            return {key: self.data(child, depth + 1) for key, (_, child) in node.value.items()}
        if isinstance(node.value, list):
            return [self.data(child, depth + 1) for child in node.value]
        return node.value


def _line_of_key(node: Node, key: Key) -> int:
    line = node.line
    for part in key:
        if isinstance(node.value, dict) and part in node.value:
            line, node = node.value[str(part)]
        elif isinstance(node.value, list) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.line
        else:
            break
    return line


def read_json_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the fields of a file that holds one JSON object; see :func:`parse_json`."""
    name = os.fspath(path)
    fields = parse_json(read_text(path), name)
    if not isinstance(fields, dict):
        raise InputError("must be a JSON object", location=name)
    return fields


def parse_json(text: str, name: str) -> Any:
    """Parse JSON, strictly: no duplicate keys, no NaN; ``name`` is the file's name in errors.

    Raises
    ------
    InputError
        For the first fault, with its line where the parser knows it.
    """
    constants: list[str] = []  # NaN and infinities; in the data this list takes their place

    def holds_constant(value: Any) -> bool:
        return value is constants or (isinstance(value, list) and any(map(holds_constant, value)))

    def checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for key, value in pairs:
            if key in fields:
                raise InputError("duplicate key", key, name)
            if constants and holds_constant(value):
                raise InputError("must hold finite numbers only", constants[0], f"{name}: {key}")
            fields[key] = value
        return fields

    def constant(text: str) -> Any:
        constants.append(text)
        return constants

    try:
        parsed = json.loads(text, object_pairs_hook=checked, parse_constant=constant)
        if constants:
            raise InputError("must hold finite numbers only", constants[0], name)
        return parsed
    except json.JSONDecodeError as error:
        raise InputError(f"must be JSON: {error.msg}", location=f"{name}:{error.lineno}") from None
    except (RecursionError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError("must be JSON without deep nesting or endless numbers", location=name) from None
