"""Common mistakes of new users, each with the expected message.

Arguments and variables may contain `{port}`, `{base}` and `{key}`: the server's port, the folder of
its base, and a tenant's key; `{unused}` is a new data folder. `prepare` creates the others.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from benchmarks.newcomer import Outcome, Terminal

from loraplex.api.cli.exit_codes import ExitCode
from loraplex.api.demo.manifest import WEIGHTS

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True, slots=True)
class Mistake:
    """One wrong command and a part of the message that answers it."""

    words: tuple[str, ...]
    expected: str
    exit_code: int
    stdin: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)


def prepare(folder: Path) -> None:
    """The wrong adapters and bases that the mistakes name."""
    adapter, base = WEIGHTS / "sql", WEIGHTS / "base"
    for name in ("no weights", "pickle", "bad json", "half", "other base", "no effect"):
        (folder / name).mkdir()
    for name in ("no weights", "pickle", "half", "no effect"):
        shutil.copy(adapter / CONFIG, folder / name)
    (folder / "pickle" / "adapter_model.bin").write_bytes(b"\x80\x02}")
    (folder / "bad json" / CONFIG).write_text("{")
    shutil.copy(adapter / TENSORS, folder / "bad json")
    whole = (adapter / TENSORS).read_bytes()
    (folder / "half" / TENSORS).write_bytes(whole[: len(whole) // 2])
    _write_without_effect(adapter / TENSORS, folder / "no effect" / TENSORS)
    _write_for_another_base(adapter, folder / "other base")
    (folder / "empty").mkdir()
    (folder / "pickled base").mkdir()
    for file in base.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder / "pickled base")
    (folder / "pickled base" / "pytorch_model.bin").write_bytes(b"\x80\x02}")


def _write_without_effect(source: Path, target: Path) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(source)
    save_file({name: value * 0 for name, value in tensors.items()}, target)


def _write_for_another_base(adapter: Path, folder: Path) -> None:
    from safetensors.numpy import load_file, save_file

    shutil.copy(adapter / CONFIG, folder)
    tensors = load_file(adapter / TENSORS)
    renamed = {name.replace("layers.0", "layers.77"): value for name, value in tensors.items()}
    save_file(renamed, folder / TENSORS)


def check(mistake: Mistake, terminal: Terminal, places: Mapping[str, str]) -> str | None:
    """What is wrong with the answer to a mistake; None: it is the one expected message."""
    places = {**places, "unused": f"data {uuid4().hex}"}
    words = [word.format(**places) for word in mistake.words]
    variables = {name: text.format(**places) for name, text in mistake.variables.items()}
    outcome = terminal.run(*words, stdin=mistake.stdin, **variables)
    return _objection(outcome, mistake, places)


def _objection(outcome: Outcome, mistake: Mistake, places: Mapping[str, str]) -> str | None:
    message = outcome.message
    if outcome.exit_code != mistake.exit_code:
        return f"exit code {outcome.exit_code} instead of {mistake.exit_code}: {message}"
    if "Traceback" in outcome.err + outcome.out:
        return f"a traceback: {message}"
    if message.count("Error") != 1 or '"level": "error"' in message:
        return f"not one error: {message}"
    if mistake.expected.format(**places) not in message:
        return f"{mistake.expected.format(**places)!r} is not in: {message}"
    return None


def _serve(*options: str, base: str = "{base}") -> tuple[str, ...]:
    return ("serve", "--model", base, "--data-dir", "{unused}", "--port", "0", *options)


_AS_TENANT = {"LORAPLEX_API_KEY": "{key}"}

MISTAKES: Mapping[str, Mistake] = {
    "serve without a model": Mistake(("serve",), "Missing model", ExitCode.USAGE),
    "misspelt command": Mistake(("serv",), "Did you mean 'serve'", ExitCode.USAGE),
    "misspelt option": Mistake(
        _serve("--quantise", "int8"), "No such option: --quantise", ExitCode.USAGE
    ),
    "no such folder": Mistake(
        _serve(base="./nope"), "Error: ./nope is neither a local directory", ExitCode.USAGE
    ),
    "an empty folder as the base": Mistake(
        _serve(base="empty"), "empty has no config.json", ExitCode.USAGE
    ),
    "an adapter as the base": Mistake(
        _serve(base="sql adapter"),
        "serve its base, then push the adapter",
        ExitCode.USAGE,
    ),
    "a pickled base": Mistake(
        _serve(base="pickled base"), "convert it to safetensors", ExitCode.USAGE
    ),
    "unknown quantization": Mistake(
        _serve("--quantize", "int3"), "not one of 'none', 'int8', 'int4'", ExitCode.USAGE
    ),
    "unknown proposer": Mistake(
        _serve("--speculation", "foo"), "foo is not one of ngram, suffix, draft", ExitCode.USAGE
    ),
    "port out of range": Mistake(
        _serve("--port", "99999"), "less than or equal to 65535", ExitCode.USAGE
    ),
    "port in use": Mistake(
        _serve("--port", "{port}"), "choose another --port", ExitCode.UNAVAILABLE
    ),
    "data folder in use": Mistake(
        _serve("--data-dir", "my data"), "use another --data-dir", ExitCode.UNAVAILABLE
    ),
    "database of another kind": Mistake(
        _serve("--database", "postgres://x"), "postgresql+psycopg://USER@HOST/NAME", ExitCode.USAGE
    ),
    "database that is down": Mistake(
        _serve("--database", "postgresql+psycopg://x@127.0.0.1:9/x"),
        "Connection refused",
        ExitCode.UNAVAILABLE,
    ),
    "store of another kind": Mistake(
        _serve("--store", "ftp://x"), "not an adapter store: 'ftp://x'", ExitCode.USAGE
    ),
    "store without a bucket": Mistake(
        _serve("--store", "s3://"), "s3://bucket/prefix", ExitCode.USAGE
    ),
    "context longer than the base's": Mistake(
        _serve("--max-model-len", "999999"), "max_model_len 999999 exceeds", ExitCode.USAGE
    ),
    "KV format of another device": Mistake(_serve("--kv-dtype", "fp8"), "use int8", ExitCode.USAGE),
    "more memory than there is": Mistake(
        _serve("--kv-cache-gib", "100000"), "Not enough memory", ExitCode.USAGE
    ),
    "no key": Mistake(
        ("adapters", "list"),
        "No API key for",
        ExitCode.AUTHENTICATION,
        variables={"LORAPLEX_API_KEY": "", "HOME": "/nonexistent"},
    ),
    "wrong key": Mistake(
        ("adapters", "list"),
        "The API key is malformed or unknown.",
        ExitCode.AUTHENTICATION,
        variables={"LORAPLEX_API_KEY": "lpx_live_wrong"},
    ),
    "no server": Mistake(
        ("adapters", "list"),
        "Check that the server is running and that LORAPLEX_URL is correct.",
        ExitCode.UNAVAILABLE,
        variables={"LORAPLEX_URL": "http://127.0.0.1:9", "LORAPLEX_API_KEY": "{key}"},
    ),
    "login with nonsense": Mistake(
        ("login",),
        "The API key is malformed or unknown.",
        ExitCode.AUTHENTICATION,
        stdin="nonsense",
    ),
    "a tenant's key for an operator's command": Mistake(
        ("tenants", "create", "another"),
        "This is for operators",
        ExitCode.AUTHENTICATION,
        variables=_AS_TENANT,
    ),
    "tenant with a bad name": Mistake(
        ("tenants", "create", "Acme Inc"), "A slug has 1 to 63 characters of a-z", ExitCode.USAGE
    ),
    "tenant that exists": Mistake(
        ("tenants", "create", "acme"), "'acme' already exists", ExitCode.CONFLICT
    ),
    "key without a tenant": Mistake(("keys", "create"), "Add --tenant SLUG", ExitCode.USAGE),
    "operator that exists": Mistake(
        ("operators", "create", "root"), "'root' already exists", ExitCode.CONFLICT
    ),
    "push of no folder": Mistake(
        ("adapters", "push", "./nope", "bot"),
        "is not a folder",
        ExitCode.INVALID_ADAPTER,
        variables=_AS_TENANT,
    ),
    "push without weights": Mistake(
        ("adapters", "push", "no weights", "bot"),
        f"no weights has no {TENSORS}",
        ExitCode.INVALID_ADAPTER,
        variables=_AS_TENANT,
    ),
    "push of a pickle": Mistake(
        ("adapters", "push", "pickle", "bot"),
        "is a pickle",
        ExitCode.INVALID_ADAPTER,
        variables=_AS_TENANT,
    ),
    "push of a whole model": Mistake(
        ("adapters", "push", "{base}", "bot"),
        "a whole model",
        ExitCode.INVALID_ADAPTER,
        variables=_AS_TENANT,
    ),
    "push of a broken configuration": Mistake(
        ("adapters", "push", "bad json", "bot"),
        "is not JSON",
        ExitCode.INVALID_ADAPTER,
        variables=_AS_TENANT,
    ),
    "push of half a file": Mistake(
        ("adapters", "push", "half", "bot"),
        "it was truncated or something was appended",
        ExitCode.INVALID_ADAPTER,
        variables=_AS_TENANT,
    ),
    "push for another base": Mistake(
        ("adapters", "push", "other base", "bot"),
        "Push it to a server of the base it was trained on",
        ExitCode.INVALID_ADAPTER,
        variables=_AS_TENANT,
    ),
    "push of an adapter without effect": Mistake(
        ("adapters", "push", "no effect", "bot"),
        "Train it first",
        ExitCode.INVALID_ADAPTER,
        variables=_AS_TENANT,
    ),
    "push under a bad name": Mistake(
        ("adapters", "push", "sql adapter", "My Bot"),
        "'My Bot' is not an adapter name",
        ExitCode.USAGE,
        variables=_AS_TENANT,
    ),
    "an alias that is a number": Mistake(
        ("adapters", "push", "sql adapter", "bot", "--alias", "1"),
        "An alias follows the rules of adapter names, and cannot be a number",
        ExitCode.USAGE,
        variables=_AS_TENANT,
    ),
    "alias of a missing version": Mistake(
        ("adapters", "alias", "set", "support-bot", "prod", "99"),
        "has no version 99",
        ExitCode.NOT_FOUND,
        variables=_AS_TENANT,
    ),
    "rollback of an alias that is not there": Mistake(
        ("adapters", "rollback", "support-bot", "nope"),
        "has no alias 'nope'",
        ExitCode.NOT_FOUND,
        variables=_AS_TENANT,
    ),
    "deletion of what an alias names": Mistake(
        ("adapters", "rm", "support-bot", "--yes"),
        "Remove the alias first",
        ExitCode.CONFLICT,
        variables=_AS_TENANT,
    ),
    "deletion without confirmation": Mistake(
        ("adapters", "rm", "support-bot", "--version", "1"),
        "Not confirmed: add --yes",
        ExitCode.USAGE,
        variables=_AS_TENANT,
    ),
    "an adapter that is not there": Mistake(
        ("adapters", "show", "suport-bot"),
        "There is no adapter 'suport-bot'",
        ExitCode.NOT_FOUND,
        variables=_AS_TENANT,
    ),
    "chat with what is not there": Mistake(
        ("chat", "suport-bot", "Hello"),
        "The model 'suport-bot' does not exist",
        ExitCode.NOT_FOUND,
        variables=_AS_TENANT,
    ),
}
