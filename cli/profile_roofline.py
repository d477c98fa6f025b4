"""`capplan profile roofline`: a profile from datasheets, for hardware without measurements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from capplan.cli.options import AsJson, EngineRules, EngineVersion, Quiet, command, command_line, member
from capplan.cli.output import require_writable_files, write_json
from capplan.errors import InputError
from capplan.reports import Table, print_json, print_table

if TYPE_CHECKING:
    from capplan.spec import ModelArch, Profile


@dataclass(frozen=True, kw_only=True)
class RooflineArgs:
    """Options of `capplan profile roofline`."""

    gpu: str = typer.Option(..., metavar="NAME", help="Such as h200 or a100-80g.")
    output: str = typer.Option(..., "--output", "-o", metavar="FILE", help="Profile JSON to write.")
    model: str | None = typer.Option(None, metavar="NAME", help="Such as llama-3.1-8b.")
    model_config: str | None = typer.Option(None, metavar="FILE", help="Instead of --model: its config.json.")
    base_model: str | None = typer.Option(
        None, metavar="ID", help="With --model-config: its Hugging Face id."
    )
    dtype: str | None = typer.Option(
        None, metavar="NAME", help="bfloat16, float16, fp8, fp8_block or int4; default: that of config.json."
    )
    tp: int = typer.Option(1, metavar="N", min=1, help="GPUs per copy of the model.")
    engine_version: EngineVersion = None
    rules: EngineRules = None
    kernel: str = typer.Option("vllm", metavar="NAME", help="bgmv, mbgmv or vllm: which rank LoRA pays for.")
    bandwidth: float | None = typer.Option(
        None, "--bandwidth-efficiency", metavar="SHARE", help="Of the memory's peak."
    )
    compute: float | None = typer.Option(
        None, "--compute-efficiency", metavar="SHARE", help="Of the tensor cores' peak."
    )
    host_link: float | None = typer.Option(
        None, "--host-link-efficiency", metavar="SHARE", help="Of PCIe's peak."
    )
    step_overhead_ms: float | None = typer.Option(
        None, metavar="MS", help="Of the host in a step, not beside the GPU."
    )
    as_json: AsJson = False
    quiet: Quiet = False


@command
def roofline(args: RooflineArgs) -> None:
    """Compute a profile from a GPU's datasheet and a model's architecture.

    The profile is marked as analytic, and so is every plan based on it.
    """
    from capplan.datasets import gpu_sheet
    from capplan.models import Assumptions, EngineChoice, efficiencies_of, roofline_profile
    from capplan.models.compose import quantized_on_loading, with_weights
    from capplan.spec import Kernel

    sheet = gpu_sheet(args.gpu)
    files = _arch(args.model, args.model_config, args.base_model)
    arch = with_weights(files, args.dtype)
    kernel = member(Kernel, args.kernel, "--kernel")
    engine = EngineChoice(
        version=args.engine_version,
        rules=args.rules,
        kernel=kernel,
        quantization=quantized_on_loading(files, args.dtype),
    )
    require_writable_files(args.output)
    physics = {
        "bandwidth": args.bandwidth,
        "compute": args.compute,
        "host_link": args.host_link,
        "step_ms": args.step_overhead_ms,
    }
    given: dict[str, Any] = {name: value for name, value in physics.items() if value is not None}
    profile = roofline_profile(
        sheet,
        arch,
        engine,
        args.tp,
        Assumptions(physics=efficiencies_of(sheet, **given)),
        command_line("capplan profile roofline", args),
    )
    document = profile.model_dump(mode="json")
    write_json(args.output, document)
    if args.as_json:
        print_json(document)
    elif not args.quiet:
        _show(profile, args.output)


def _arch(model: str | None, config: str | None, base_model: str | None) -> ModelArch:
    from capplan.datasets import model_arch, read_arch

    if (model is None) == (config is None):
        raise InputError("is required, or else --model-config", model, "--model")
    if config is None:
        if base_model is not None:
            raise InputError("goes with --model-config", base_model, "--base-model")
        return model_arch(str(model))
    if base_model is None:
        raise InputError("is required with --model-config", location="--base-model")
    return read_arch(config, base_model)


def _show(profile: Profile, output: str) -> None:
    rows = [
        (f"{part}.{name}", f"{coefficient.value:.6g}")
        for part in ("step_latency", "memory", "loading", "host")
        for name, coefficient in getattr(profile, part).coefficients.items()
        if coefficient.value
    ]
    print_table(Table(("coefficient", "value"), rows))
    typer.echo(profile.provenance.notes)
    typer.echo(f"profile {profile.name} is an analytic roofline, not measured; written to {output}")
