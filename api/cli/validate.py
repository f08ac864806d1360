"""`loraplex adapters validate`: runs the server's examination locally, without a push.

It runs the same code as a push, in the same kind of confined process, on the same files. The effect
on the logits and the room on the device need a running engine and are left to the push.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ...adapters.errors import AdapterRejected, IntakeUnavailable
from ...adapters.examination import IntakeReport
from ...adapters.rejections import REJECTIONS
from ...engine.errors import EngineError, TokenizerUnusable
from ..client.local_adapter import read_adapter
from ..local.adapter_folder import AdapterFolder
from ..local.examination import AdapterBase, examine_folder
from .client import open_client
from .exit_codes import CommandFailed, ExitCode
from .numbers import check_finite
from .output import AsJson, note, print_json

MIB = 1 << 20


class Dtype(StrEnum):
    """What the base is served in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


_ASKED_OF_WEIGHTS = frozenset(
    {"base_weights_included", "full_matrix_not_allowed", "full_matrix_too_large"}
)
"""Refusals that a copy of the base's own matrix does not meet where the base's weights are."""


def validate(
    folder: Annotated[Path, typer.Argument(help="Folder written by PEFT's save_pretrained.")],
    base: Annotated[
        Path | None,
        typer.Option(
            help="The base model's folder or config.json; weights and server are not needed.",
            show_default="ask the server of LORAPLEX_URL",
        ),
    ] = None,
    dtype: Annotated[
        Dtype, typer.Option(help="Serving dtype of the base.", show_default="the base's own")
    ] = Dtype.AUTO,
    max_full_matrix_mib: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            callback=check_finite,
            help="Maximum size of full matrices.",
            show_default="the server's limit; with --base, refused",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check an adapter locally, as a push would."""
    adapter = read_adapter(folder)
    fitted = _ask_server() if base is None else _from_config(base)
    if dtype is not Dtype.AUTO:
        fitted = fitted._replace(dtype=dtype)
    if max_full_matrix_mib is not None:
        fitted = fitted._replace(max_full_matrix_bytes=round(max_full_matrix_mib * MIB))
    try:
        report = examine_here(adapter.folder, fitted)
    except AdapterRejected as exc:
        if as_json:
            print_json(_rejection(exc))
            raise typer.Exit(ExitCode.INVALID_ADAPTER) from exc
        if not fitted.is_identified and exc.reason in _ASKED_OF_WEIGHTS:
            note("A copy of the base's own matrix is only known as one where its weights are.")
        raise _refused(folder, exc) from exc
    except IntakeUnavailable as exc:
        raise CommandFailed(
            "The check could not be completed on this machine; run the command again.",
            ExitCode.UNAVAILABLE,
        ) from exc
    if as_json:
        print_json({"accepted": True, "report": _report(report, fitted)})
    else:
        _print_accepted(folder, report, fitted)


def examine_here(adapter: AdapterFolder, base: AdapterBase) -> IntakeReport:
    """What intake finds. Raises AdapterRejected or IntakeUnavailable."""
    with tempfile.TemporaryDirectory(prefix="loraplex-validate-") as name:
        return examine_folder(adapter, base, Path(name) / "block")


def _ask_server() -> AdapterBase:
    with open_client() as client:
        served, layout = client.get("/base"), client.get("/base/layout")
    limit: int = served["max_full_matrix_bytes"]
    num_tokens: int = served["num_tokens"]
    return AdapterBase(json.dumps(layout), served["dtype"], limit, num_tokens, is_identified=True)


def _from_config(base: Path) -> AdapterBase:
    """The layout of a base whose weights need not be here. Raises CommandFailed."""
    try:
        from ...engine.model.skeleton import read_skeleton
    except ModuleNotFoundError as exc:
        raise CommandFailed(
            f"--base builds the model's layers and needs {exc.name}: pip install "
            "'loraplex[engine]'. Without --base the server is asked for its layers.",
        ) from exc
    try:
        skeleton = read_skeleton(base)
    except EngineError as exc:
        raise CommandFailed(str(exc), ExitCode.USAGE) from exc
    num_tokens = _num_tokens(base if base.is_dir() else base.parent)
    return AdapterBase(skeleton.layout_json, skeleton.dtype, 0, num_tokens, is_identified=False)


def _num_tokens(folder: Path) -> int | None:
    from ...engine.text.tokenizer import Tokenizer

    try:
        return Tokenizer(folder).vocab_size
    except TokenizerUnusable:
        return None


def _report(report: IntakeReport, base: AdapterBase) -> dict[str, Any]:
    fields = asdict(report)
    if not base.is_identified:  # the digest covers the checkpoint, which was not read
        fields |= {"digest": None, "base_id": None, "file_sha256": None}
    return fields


def _rejection(error: AdapterRejected) -> dict[str, Any]:
    return {
        "accepted": False,
        "code": error.reason,
        "message": str(error),
        "param": error.pointer,
        "way_out": REJECTIONS[error.reason].way_out,
    }


def _refused(folder: Path, error: AdapterRejected) -> CommandFailed:
    where = f" at {error.pointer}" if error.pointer else ""
    way_out = REJECTIONS[error.reason].way_out
    return CommandFailed(
        f"{folder} would be rejected: {error} ({error.reason}{where}). {way_out}",
        ExitCode.INVALID_ADAPTER,
    )


def _print_accepted(folder: Path, report: IntakeReport, base: AdapterBase) -> None:
    typer.echo(f"{folder} would be accepted")
    note(
        f"rank {report.min_rank}-{report.max_rank} on {report.num_modules} modules "
        f"({', '.join(report.targets)}), {report.size_bytes} bytes"
    )
    if base.is_identified:
        note(report.digest)
    for warning in report.warnings:
        note(f"Warning: {warning.message}")
