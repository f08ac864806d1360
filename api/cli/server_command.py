"""The command class of `loraplex serve` and `loraplex agent`: an option is a flag, a variable or a
key of the `--config` file, and MODEL may be given without `--model`."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

from ..vllm_names import VALUES, explain_foreign_options
from .exit_codes import CommandFailed, ExitCode
from .setting_sources import origin_of

POSITIONAL_MODEL = "model_argument"
_LINK = "tcp://"
"""Begins the value of a variable that Kubernetes sets for a Service."""


class ServerCommand(TyperCommand):
    """Reads options from the command line, variables and a file."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **more: Any) -> Any:
        """Raises CommandFailed for options of vLLM that have no counterpart."""
        if explained := explain_foreign_options(args):
            raise CommandFailed(explained, ExitCode.USAGE)
        try:
            return super().make_context(info_name, args, *rest, **more)
        except typer.BadParameter as exc:
            _explain(exc)
            raise

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take MODEL for the value of `--model`. Raises CommandFailed unless there is one."""
        rest = super().parse_args(ctx, args)
        if ctx.resilient_parsing:  # for completions and help
            return rest
        positional, model = ctx.params[POSITIONAL_MODEL], ctx.params["model"]
        source = ctx.get_parameter_source("model")
        if positional is not None:
            if model not in (None, positional) and source.name == "COMMANDLINE":
                raise CommandFailed(
                    f"Two models are given: {positional} and --model {model}.", ExitCode.USAGE
                )
            ctx.params["model"] = positional
            ctx.set_parameter_source("model", ctx.get_parameter_source(POSITIONAL_MODEL))
        elif model is None:
            raise CommandFailed(
                "Missing model. Give MODEL or --model: a folder, a .gguf file or a Hugging Face "
                "model ID (owner/name).",
                ExitCode.USAGE,
            )
        return rest


def _explain(error: typer.BadParameter) -> None:
    """Name the option as the user wrote it, and say what to do instead of a value that only vLLM
    knows."""
    ctx, option = error.ctx, error.param
    if ctx is None or option is None or option.param_type_name != "option":
        return
    origin = origin_of(ctx, option)
    error.param_hint = origin.name
    error.message = error.message.removeprefix("Value error, ")
    if origin.source == "environment" and str(option.resolve_envvar_value(ctx)).startswith(_LINK):
        error.message += (
            ". Kubernetes sets this variable for a Service named loraplex: set "
            "enableServiceLinks: false in the pod"
        )
    for value, remedy in VALUES.get(str(option.name), {}).items():
        if error.message.startswith(f"{value!r} is not"):
            error.message += f" {remedy}"
