"""`capplan profile compose`: a profile from measured operators of a GPU, for any dense model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from capplan.cli.documents import sentences
from capplan.cli.options import AsJson, EngineRules, EngineVersion, Quiet, command, command_line
from capplan.cli.output import require_writable_files, write_json
from capplan.errors import InputError
from capplan.reports import print_json

if TYPE_CHECKING:
    from capplan.models.compose import Decoder
    from capplan.spec import Profile


@dataclass(frozen=True, kw_only=True)
class ComposeArgs:
    """Options of `capplan profile compose`."""

    gpu: str = typer.Option(
        ..., metavar="NAME", help="GPU with measured operators, such as h100-80g or h100_sxm."
    )
    output: str = typer.Option(..., "--output", "-o", metavar="FILE", help="Profile JSON to write.")
    model: str | None = typer.Option(None, metavar="NAME", help="Known model, such as llama-3.1-8b.")
    model_config: str | None = typer.Option(None, metavar="FILE", help="Instead of --model: its config.json.")
    base_model: str | None = typer.Option(
        None, metavar="ID", help="With --model-config: its Hugging Face id; else as the file or folder says."
    )
    dtype: str | None = typer.Option(
        None, metavar="NAME", help="bfloat16, float16, fp8, fp8_block or int4; default: that of config.json."
    )
    kv_cache_dtype: str = typer.Option(
        "auto", metavar="NAME", help="Of keys and values: fp8, or auto for that of config.json."
    )
    layers: str | None = typer.Option(
        None, metavar="FOLDER", help="Instead of operators: layers measured by LLMServingSim's profiler."
    )
    tp: int = typer.Option(1, metavar="N", min=1, help="GPUs per copy of the model.")
    engine_version: EngineVersion = None
    rules: EngineRules = None
    as_json: AsJson = False
    quiet: Quiet = False


@command
def compose(args: ComposeArgs) -> None:
    """Compose a profile from measured operators of a GPU.

    Needs the operator tables of the extra `measured`. The profile states the error of such profiles on
    measured engines, and so does every plan based on it.
    """
    from capplan.models.compose import layer_times, operator_times, profile_of_times
    from capplan.serving import rules_of_engine

    decoder = _decoder(args)
    rules, version = rules_of_engine(args.engine_version, args.rules)
    require_writable_files(args.output)
    if args.layers is not None and args.tp != 1:
        raise InputError("must be 1 with --layers, which are those of one GPU", args.tp, "--tp")
    times = (
        operator_times(args.gpu, decoder, args.tp)
        if args.layers is None
        else layer_times(args.layers, args.gpu, decoder)
    )
    profile = profile_of_times(times, rules, version, command=command_line("capplan profile compose", args))
    document = profile.model_dump(mode="json")
    write_json(args.output, document)
    if args.as_json:
        print_json(document)
    elif not args.quiet:
        _show(profile, args.output)


def _decoder(args: ComposeArgs) -> Decoder:
    """Return the known model, or that of a config.json."""
    from capplan.models.compose import decoder_of, known_decoder
    from capplan.spec import read_json_object

    if (args.model is None) == (args.model_config is None):
        raise InputError("is required, or else --model-config", args.model, "--model")
    if args.model_config is None:
        if args.base_model is not None:
            raise InputError("goes with --model-config", args.base_model, "--base-model")
        return known_decoder(str(args.model), args.dtype, args.kv_cache_dtype)
    fields = read_json_object(args.model_config)
    named = args.base_model or fields.get("_name_or_path") or Path(args.model_config).absolute().parent.name
    return decoder_of(fields, str(named), args.dtype, args.model_config, args.kv_cache_dtype)


def _show(profile: Profile, output: str) -> None:
    fit = profile.step_latency.fit
    left = (
        "" if fit.cross_validated_error is None else f", {fit.cross_validated_error:.1f} % on rows left out"
    )
    typer.echo(f"{profile.name}: {profile.gpu.name}, tp {profile.tp}")
    if fit.samples:  # otherwise the notes say what was compared
        typer.echo(f"error on measured engines: {fit.error:.1f} %{left} ({fit.error_formula})")
    for sentence in sentences(profile):
        typer.echo(f"- {sentence}")
    typer.echo(f"written to {output}")
