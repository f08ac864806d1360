"""The clients that people use make their usual calls, each in an environment of its own.

The table in docs/openai.md says which calls: it is read here.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from loraplex.api.demo.task import Style, held_out_requests
from support.server import Caller, serving

ROOT = Path(__file__).parents[2]
CALLS = Path(__file__).parent / "calls"
WEIGHTS = ROOT / "api" / "demo" / "weights"
REQUEST = held_out_requests(1)[0]
ANSWER, OTHER = REQUEST.answer(Style.SQL), REQUEST.answer(Style.JSON)
TEXTS = ("chat", "stream", "asynchronous", "responses", "batch")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("LORAPLEX_CLIENTS_VENV" not in os.environ, reason="make test-clients"),
]


class Row(NamedTuple):
    """A row of the table."""

    client: str
    version: str
    calls: list[str]


def table() -> list[Row]:
    page = (ROOT / "docs" / "openai.md").read_text()
    section = page.partition("\n## Clients\n")[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:3] == "| `"]
    return [Row(name.strip("`"), version, calls.split(", ")) for name, version, calls in lines]


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    data_dir = tmp_path_factory.mktemp("server")
    with serving(WEIGHTS / "base", data_dir, "--dtype", "float32") as server:
        caller = server.make_caller("clients")
        caller.push(WEIGHTS / "sql", "sql")
        yield caller


def call(caller: Caller, client: str) -> Any:
    """What the client's script prints."""
    python = Path(os.environ["LORAPLEX_CLIENTS_VENV"]).absolute() / "bin" / "python"
    script = CALLS / f"{client.replace('-', '_')}_calls.py"
    ended = subprocess.run(
        [
            *(str(python), str(script), f"{caller.url}/v1", caller.key, REQUEST.prompt),
            *(str(WEIGHTS / "base"), ANSWER, OTHER),
        ],
        env={
            "PATH": os.environ["PATH"],
            "HOME": os.environ["HOME"],
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it fetches the prices of models otherwise
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def loglikelihoods() -> list[float]:
    """Of the two answers after the question, by transformers and PEFT."""
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS / "base")
    base = AutoModelForCausalLM.from_pretrained(WEIGHTS / "base", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, WEIGHTS / "sql").eval()
    return [_loglikelihood(model, tokenizer, REQUEST.prompt, text) for text in (OTHER, ANSWER)]


def _loglikelihood(model: Any, tokenizer: Any, prompt: str, text: str) -> float:
    whole = tokenizer.encode(prompt + text, add_special_tokens=False)
    start = len(tokenizer.encode(prompt, add_special_tokens=False))
    with torch.no_grad():
        logprobs = model(torch.tensor([whole])).logits[0].float().log_softmax(-1)
    return sum(float(logprobs[at - 1, whole[at]]) for at in range(start, len(whole)))


def check(call: str, given: Any, loglikelihoods: list[float]) -> None:
    if call == "loglikelihood":
        assert given == pytest.approx(loglikelihoods, abs=1e-3)
    elif call == "embeddings":
        hidden_size = json.loads((WEIGHTS / "base" / "config.json").read_text())["hidden_size"]
        assert len(given) == hidden_size
        assert sum(value * value for value in given) == pytest.approx(1.0, abs=1e-3)
    elif isinstance(given, dict):
        assert given["table"] in ("orders", "users")
        assert given["size"] in ("small", "large")
    else:
        assert call in TEXTS
        assert [given] == [ANSWER] or given == [ANSWER, ANSWER]


@pytest.mark.parametrize("row", table(), ids=lambda row: row.client)
def test_a_client_makes_its_usual_calls(
    row: Row, caller: Caller, loglikelihoods: list[float]
) -> None:
    found = call(caller, row.client)
    assert list(found["calls"]) == row.calls
    for name, given in found["calls"].items():
        check(name, given, loglikelihoods)


def test_every_script_has_a_row() -> None:
    scripts = {path.name.removesuffix("_calls.py") for path in CALLS.glob("*_calls.py")}
    assert scripts == {row.client.replace("-", "_") for row in table()}
