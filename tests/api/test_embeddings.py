"""`/v1/embeddings` through the unmodified openai client, compared with transformers and PEFT."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from openai import BadRequestError
from peft import PeftModel
from sqlalchemy import select
from transformers import AutoModelForCausalLM

from loraplex.engine.text.tokenizer import Tokenizer
from loraplex.platform.models import UsageRecord
from support.envelopes import check_envelope
from support.server import Caller, ServerUnderTest
from support.waiting import wait_for

TOLERANCE = 1e-4
TEXTS = ["Hello", "A much longer sentence, so that one chunk after the other is read." * 3, "ok"]


def states_of(base: Path, adapter: Path | None, text: str) -> torch.Tensor:
    """`[num_tokens, hidden_size]`, as transformers and PEFT compute them."""
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    if adapter:
        model = PeftModel.from_pretrained(model, adapter)
    with torch.inference_mode():
        answer = model.eval()(
            input_ids=torch.tensor([Tokenizer(base).encode(text)]), output_hidden_states=True
        )
    states: torch.Tensor = answer.hidden_states[-1][0]
    return states


def distance(found: list[float], expected: torch.Tensor) -> float:
    return float((torch.tensor(found) - expected).abs().max())


def test_vectors_are_those_of_transformers_and_peft(
    resident: Caller, tiny_base: Path, adapters: list[Path]
) -> None:
    for model, adapter in (("bot", adapters[0]), ("tiny", None)):
        answer = resident.openai.embeddings.create(model=model, input=TEXTS)
        assert [entry.index for entry in answer.data] == [0, 1, 2]
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, TEXTS))
        means = resident.openai.embeddings.create(
            model=model, input=TEXTS, extra_body={"pooling": "mean", "normalize": False}
        )
        for text, last, mean in zip(TEXTS, answer.data, means.data, strict=True):
            states = states_of(tiny_base, adapter, text)
            expected = states[-1] / states[-1].norm()
            assert distance(last.embedding, expected) < TOLERANCE
            assert distance(mean.embedding, states.mean(0)) < TOLERANCE


def test_both_encodings_and_all_kinds_of_input_say_the_same(
    resident: Caller, tiny_base: Path
) -> None:
    token_ids = Tokenizer(tiny_base).encode(TEXTS[0])
    plain = {"model": "bot", "input": TEXTS[0], "encoding_format": "float"}
    vector = resident.http.post("/v1/embeddings", json=plain).json()["data"][0]["embedding"]
    for sent in (token_ids, [TEXTS[0]], [token_ids]):
        answer = resident.http.post("/v1/embeddings", json={**plain, "input": sent}).json()
        assert answer["data"][0]["embedding"] == vector
    packed = {**plain, "encoding_format": "base64"}
    text = resident.http.post("/v1/embeddings", json=packed).json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == vector
    default = resident.openai.embeddings.create(model="bot", input=TEXTS[0])
    assert default.data[0].embedding == vector


def test_dimensions_are_the_first_numbers_normalized(resident: Caller) -> None:
    client = resident.openai.embeddings
    whole = client.create(model="bot", input="x", extra_body={"normalize": False})
    part = client.create(model="bot", input="x", dimensions=8)
    first = np.array(whole.data[0].embedding[:8])
    assert np.allclose(part.data[0].embedding, first / np.linalg.norm(first), atol=1e-6)
    with pytest.raises(BadRequestError) as refusal:
        client.create(model="bot", input="x", dimensions=65)
    assert refusal.value.param == "dimensions"


def test_the_last_tokens_are_kept(resident: Caller) -> None:
    client, text = resident.openai.embeddings, "y" * 600
    with pytest.raises(BadRequestError) as refusal:
        client.create(model="bot", input=text)
    assert refusal.value.code == "context_length_exceeded"
    for kept in (7, -1):
        cut = client.create(model="bot", input=text, extra_body={"truncate_prompt_tokens": kept})
        length = 512 if kept < 0 else kept
        assert cut.usage.prompt_tokens == length
        alone = client.create(model="bot", input="y" * length)
        assert cut.data[0].embedding == pytest.approx(alone.data[0].embedding, abs=1e-5)


def test_more_inputs_than_run_at_once_are_answered_and_metered(
    server: ServerUnderTest, resident: Caller
) -> None:
    inputs = [f"text {number}" for number in range(150)]
    answer = resident.openai.embeddings.with_raw_response.create(model="bot", input=inputs)
    parsed = answer.parse()
    assert len({tuple(entry.embedding) for entry in parsed.data}) == len(inputs)
    assert answer.headers["x-loraplex-adapter"] == "resident/bot@1"
    row = server.usage_of(answer.headers["x-request-id"], resident)
    assert row is not None
    assert (row.prompt_tokens, row.completion_tokens) == (parsed.usage.prompt_tokens, 0)
    assert (row.adapter_name, row.finish_reason) == ("bot", "length")


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"input": ""}, "invalid_parameter", "input"),
        ({"input": []}, "invalid_parameter", "input"),
        ({"input": ["a"] * 2049}, "invalid_parameter", "input"),
        ({"input": [100000]}, "invalid_parameter", "input"),
        ({"dimensions": 0}, "invalid_parameter", "dimensions"),
        ({"encoding_format": "int8"}, "invalid_parameter", "encoding_format"),
        ({"pooling": "cls"}, "invalid_parameter", "pooling"),
        ({"messages": []}, "unsupported_parameter", "messages"),
        ({"embed_dtype": "float16"}, "unsupported_parameter", "embed_dtype"),
        ({"model": "nobody/bot"}, "model_not_found", None),
        ({"deadline_ms": 1, "input": ["z" * 500] * 200}, "deadline_exceeded", None),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(
    resident: Caller, change: dict[str, Any], code: str, param: str | None
) -> None:
    body = {"model": "bot", "input": "x", **change}
    check_envelope(resident.http.post("/v1/embeddings", json=body), code, param)


def test_who_goes_away_ends_the_work_and_pays_for_what_was_begun(
    server: ServerUnderTest, resident: Caller
) -> None:
    inputs = [f"{number} " + "w" * 480 for number in range(2000)]

    def is_running() -> bool:
        figures = httpx.get(f"{server.url}/metrics").text.splitlines()
        return "loraplex_requests_running 0.0" not in figures

    async def leave() -> None:
        async with resident.openai_async as client:
            call = client.embeddings.create(
                model="bot", input=inputs, extra_body={"pooling": "mean"}
            )
            asking = asyncio.create_task(call)
            while not await asyncio.to_thread(is_running):
                assert not asking.done()
                await asyncio.sleep(0.05)
            asking.cancel()

    def paid() -> int | None:
        database = server.database
        with database.transaction(resident.tenant_id, read_only=True) as session:
            found = session.scalars(
                select(UsageRecord.prompt_tokens).where(UsageRecord.finish_reason == "aborted")
            ).first()
        database.close()
        return found

    asyncio.run(leave())
    assert 0 < (wait_for(paid) or 0) < sum(map(len, inputs))
    wait_for(lambda: not is_running())
