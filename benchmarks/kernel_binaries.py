"""Triton kernels compiled and inspected without a GPU: `python -m benchmarks.kernel_binaries`.

Every kernel of the engine is compiled for sm_80, sm_90 and sm_100 with the launch configurations, dtypes and
strides that the engine uses at the shapes of three models. Exit code 1 if a kernel spills registers.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import JITFunction
from triton.runtime.jit import create_function_from_signature

from benchmarks.common import command_line, in_fresh_process, markdown
from benchmarks.kernel_launches import (
    LoraBatch,
    attention_launches,
    gpu_models,
    lora_launches,
    pointwise_launches,
    prompts_launch,
)
from capplan.engine.kernels._triton_layers import share_launch
from capplan.engine.kernels._triton_lora import Launch

META: Final = torch.device("meta")
WARP: Final = 32
LEAST_OCCUPANCY: Final = 0.25


@dataclass(frozen=True)
class Architecture:
    """Limits of one streaming multiprocessor (CUDA C++ Programming Guide, table of compute capabilities)."""

    number: int
    shared_bytes: int
    registers: int = 65536
    warps: int = 64
    blocks: int = 32
    reserved_bytes: int = 1024
    """Shared memory that the driver takes per block."""


ARCHITECTURES: Final = MappingProxyType(
    {
        80: Architecture(80, 164 * 1024),
        90: Architecture(90, 228 * 1024),
        100: Architecture(100, 228 * 1024),
    }
)
BATCHES: Final = (1, 16, 64, 256)
RANKS: Final = (8, 16, 64, 128)
PROMPT_TOKENS: Final = 64


class Occupancy(NamedTuple):
    """Share of the warps of a multiprocessor that a kernel can keep resident, and what limits them."""

    share: float
    limit: str


class Binary(NamedTuple):
    """Resources of a compiled kernel."""

    arch: int
    registers: int
    """Per thread."""
    spilled_bytes: int
    """Stack and local memory per thread."""
    shared_bytes: int
    """Per block."""
    warps: int
    wide_loads: float
    """Share of the bytes of all load instructions that are loaded 16 at a time."""

    @property
    def occupancy(self) -> Occupancy:
        """Theoretical occupancy."""
        return occupancy(ARCHITECTURES[self.arch], self.registers, self.shared_bytes, self.warps)


def occupancy(limits: Architecture, registers: int, shared_bytes: int, warps: int) -> Occupancy:
    """Return the occupancy of blocks of `warps` warps, by the rules of NVIDIA's occupancy calculator.

    Registers are allocated per warp in units of 256, warps in units of 4, shared memory in 128 bytes.
    """
    per_warp = -(-registers * WARP // 256) * 256
    warps_by_registers = limits.registers // per_warp // 4 * 4
    per_block = -(-(shared_bytes + limits.reserved_bytes) // 128) * 128
    blocks = {
        "warps": limits.warps // warps,
        "blocks": limits.blocks,
        "registers": warps_by_registers // warps,
        "shared memory": limits.shared_bytes // per_block,
    }
    limit = min(blocks, key=blocks.__getitem__)
    return Occupancy(blocks[limit] * warps / limits.warps, limit)


def specialized(launch: Launch, arch: int) -> tuple[ASTSource, dict[str, Any]]:
    """Return source and options of a kernel as Triton specializes them to the arguments of a launch."""
    kernel = launch.kernel
    backend = make_backend(GPUTarget("cuda", arch, WARP))
    settings = {**launch.config, "debug": False, "sanitize_overflow": False}
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = binder(*launch.arguments, **settings)
    options, *parts = kernel._pack_args(backend, settings, bound, specialization, options)
    return ASTSource(kernel, *parts), options.__dict__


def inspect(launch: Launch, arch: int) -> Binary:
    """Compile a launch and return the resources of the binary."""
    source, options = specialized(launch, arch)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, WARP), options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return Binary(
        arch=arch,
        registers=used["REG"],
        spilled_bytes=used["STACK"] + used["LOCAL"],
        shared_bytes=compiled.metadata.shared,
        warps=compiled.metadata.num_warps,
        wide_loads=wide_loads(compiled.asm["ptx"]),
    )


def wide_loads(ptx: str) -> float:
    """Return the share of the bytes of global load instructions that are in loads of 16 bytes."""
    sizes = [
        int(lanes or 1) * int(bits) // 8
        for lanes, bits in re.findall(r"\bld\.global(?:\.[\w:]+?)*?(?:\.v(\d))?\.b(\d+)\b", ptx)
    ]
    sizes += [int(size, 0) for size in re.findall(r"\bcp\.async\.\w+\.shared\.global[^;]*?\], (\w+),", ptx)]
    return sum(size for size in sizes if size == 16) / sum(sizes)


def launches(models: Sequence[str] | None = None) -> Iterator[tuple[str, Launch]]:
    """Yield (model, launch) of every kernel over batches, ranks and sites."""
    for name, config in gpu_models().items():
        if models is not None and name not in models:
            continue
        batches = [
            *(
                LoraBatch(kind, 1, rank, batch)
                for kind in ("mbgmv", "bgmv")
                for rank in RANKS
                for batch in BATCHES
            ),
            *(LoraBatch("sgmv", 1, rank, PROMPT_TOKENS) for rank in RANKS),
        ]
        for batch in batches:
            yield from ((name, launch) for _, _, launch in lora_launches(config, batch, META))
        for splits in (1, 8):
            for launch in attention_launches(config, 64, 8192, META, splits):
                yield name, launch
        yield name, prompts_launch(config, 1, PROMPT_TOKENS, META)
        yield from ((name, launch) for launch in pointwise_launches(config, PROMPT_TOKENS, META))
        x = torch.empty(PROMPT_TOKENS, config.hidden_size, dtype=torch.bfloat16, device=META)
        arrived, counter = (torch.empty(1, dtype=dtype, device=META) for dtype in (torch.int32, torch.int64))
        yield name, share_launch(x, x, arrived, counter, 1)


def distinct(found: Iterable[tuple[str, Launch]]) -> list[tuple[Launch, list[str]]]:
    """Return a launch per binary, with the models that use it."""
    binaries: dict[str, tuple[Launch, list[str]]] = {}
    for model, launch in found:
        source, _ = specialized(launch, arch=90)
        _, users = binaries.setdefault(source.hash() + str(launch.config), (launch, []))
        if model not in users:
            users.append(model)
    return list(binaries.values())


def one_of_each(found: Iterable[tuple[Launch, list[str]]]) -> list[tuple[Launch, list[str]]]:
    """Return the last binary of each kernel, of both ways of attention, and of what follows an expand."""
    kinds = {(e[0].kernel.fn.__name__, e[0].config.get("SPLIT"), e[0].config.get("HALF")): e for e in found}
    return list(kinds.values())


def variant(launch: Launch) -> str:
    """Return the constants in which the binaries of a kernel differ, in words."""
    config = launch.config
    words = {
        "BLOCK_RANK": f"{config.get('BLOCK_RANK')} ranks",
        "GROUP": f"{config.get('GROUP')} queries",
        "SPLITS": f"in {config.get('SPLITS')}",
        "BLOCKS": f"{config.get('MODULES')} modules",
        "SPLIT": "in parts" if config.get("SPLIT") else "whole",
        "PADDED": "padded" if config.get("PADDED") else "",
        "HALF": "rotated" if config.get("HALF") else "gated",
    }
    return ", ".join(text for name, text in words.items() if name in config and text)


def rows_of(found: Iterable[tuple[Launch, list[str]]], archs: Sequence[int]) -> list[dict[str, Any]]:
    """Compile binaries; return a row per kernel, variant and architecture, the least resident if several."""
    worst: dict[tuple[str, str, int], dict[str, Any]] = {}
    for launch, models in found:
        for arch in archs:
            binary = inspect(launch, arch)
            row = {
                "kernel": launch.kernel.fn.__name__,
                "variant": variant(launch),
                "models": models,
                **binary._asdict(),
                "occupancy": binary.occupancy.share,
                "limit": binary.occupancy.limit,
            }
            key = row["kernel"], row["variant"], arch
            if key not in worst or row["occupancy"] < worst[key]["occupancy"]:
                worst[key] = row
    return list(worst.values())


def binaries_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the Markdown table of binaries."""
    archs = sorted({row["arch"] for row in rows})
    groups: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = defaultdict(dict)
    for row in rows:
        groups[row["kernel"], row["variant"]][row["arch"]] = row
    header = ["kernel", "variant", *(f"sm_{arch}" for arch in archs), "spilled bytes", "loads of 16 bytes"]
    variants: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for (kernel, name), found in groups.items():
        cells = [
            f"{row['registers']} / {row['shared_bytes'] / 1024:.1f} / {row['occupancy']:.0%}"
            for _, row in sorted(found.items())
        ]
        spilled = max(row["spilled_bytes"] for row in found.values())
        wide = min(row["wide_loads"] for row in found.values())
        variants[f"`{kernel}`", *cells, str(spilled), f"{wide:.0%}"].append(name or "all")
    lines = [[kernel, "; ".join(sorted(names)), *cells] for (kernel, *cells), names in variants.items()]
    return markdown(header, sorted(lines))


def traffic_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the Markdown table of bytes, with a column per model."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    groups: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for row in rows:
        groups[row["kernel"], row["case"]][row["model"]] = row
    lines = []
    for (kernel, case), found in groups.items():
        cells = [
            f"{(row['loaded'] + row['stored']) / 2**20:.2f} MiB, {row['ratio']:.2f}"
            for row in (found[model] for model in models)
        ]
        lines.append([f"`{kernel}`", case, *cells])
    return markdown(["kernel", "case", *models], lines)


def fused_table() -> str:
    """Return programs of shrinks, and of a kernel that fuses shrink and expand, by batch."""
    config = gpu_models()["Llama-3.1-8B"]
    cells: dict[str, list[str]] = defaultdict(list)
    for batch in BATCHES:
        for half, site, launch in lora_launches(config, LoraBatch("mbgmv", 1, 16, batch), META):
            if half == "shrink":
                tokens, modules, parts = launch.grid
                cells[site].append(f"{tokens * modules * parts} / {tokens * modules}")
    return markdown(["site", *(f"batch {batch}" for batch in BATCHES)], [[k, *v] for k, v in cells.items()])


def report(rows: Sequence[Mapping[str, Any]], traffic: Sequence[Mapping[str, Any]]) -> str:
    """Return the tables of results."""
    low = sorted({(row["kernel"], row["limit"]) for row in rows if row["occupancy"] < LEAST_OCCUPANCY})
    named = "; ".join(f"{kernel} ({limit})" for kernel, limit in low) or "none"
    parts = (
        f"Triton {triton.__version__}; registers / shared KiB / occupancy",
        binaries_table(rows),
        f"Occupancy below {LEAST_OCCUPANCY:.0%}: {named}",
        "Bytes loaded and stored, and their ratio to the least possible",
        traffic_table(traffic),
        "Programs of shrink / of a fused kernel, Llama-3.1-8B, rank 16",
        fused_table(),
    )
    return "\n\n".join(parts) + "\n"


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(gpu_models()), help="default: all")
    parser.add_argument(
        "--archs", nargs="+", type=int, choices=list(ARCHITECTURES), default=list(ARCHITECTURES)
    )
    parser.add_argument("--quick", action="store_true", help="one variant of each kernel")
    parser.add_argument(
        "--json", action="store_true", help="print the rows of binaries as JSON, nothing else"
    )
    given = parser.parse_args()
    found = distinct(launches(given.models))
    if not all(isinstance(launch.kernel, JITFunction) for launch, _ in found):
        print("error: unset TRITON_INTERPRET, under which nothing is compiled", file=sys.stderr)
        return 2
    rows = rows_of(one_of_each(found) if given.quick else found, given.archs)
    if given.json:
        print(json.dumps(rows))
    else:
        child = in_fresh_process("kernel_traffic", "--json", env={"TRITON_INTERPRET": "1"})
        print(report(rows, json.loads(child)), end="")
    return int(any(row["spilled_bytes"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
