"""Frames on a byte stream: any split of bytes, any garbage, and the largest real messages."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.layout import BaseLayout, Projection, Slice
from loraplex.adapters.status import AdapterStatus, ExtentUse, HostUse
from loraplex.adapters.tier import Tier
from loraplex.api.http.bodies import INFERENCE_BODY_BYTES
from loraplex.engine.errors import MalformedMessage
from loraplex.engine.messages import (
    AdapterKvUse,
    EngineInfo,
    EngineReady,
    EngineStats,
    FromEngine,
    GenerationRequest,
    KvUse,
    MemoryMap,
    PromptOutput,
    StepEvents,
    Submit,
    ToEngine,
    TokenLogprob,
    TokenLogprobs,
)
from loraplex.engine.process.frames import (
    MAX_MESSAGE_BYTES,
    MAX_NAME_BYTES,
    MAX_PAYLOAD_BYTES,
    FrameReader,
    Frames,
    pack,
)
from loraplex.engine.process.transport import encode
from loraplex.engine.sampling_params import MAX_LOGPROBS, SamplingParams

LARGEST_ID = 300_000
"""Of a token: larger than those of any vocabulary, five bytes long."""
TENANT = "t" * 32
MESSAGES = st.lists(st.tuples(st.binary(max_size=MAX_NAME_BYTES), st.binary(max_size=300)))


def adapter_keys(number: int) -> list[AdapterKey]:
    return [AdapterKey(TENANT, f"sha256:{index:064x}") for index in range(number)]


def ready_with_many_experts() -> EngineReady:
    """61 layers of 384 experts, each of three linear layers, as in Kimi K2's checkpoint."""
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj"
        for layer in range(61)
        for expert in range(384)
        for part in ("gate", "up", "down")
    ]
    digests = {end: ["d" * 64] * 512 for end in ("model.embed_tokens", "lm_head")}
    projections = tuple(Projection((Slice(name, 7168, 2048),)) for name in names)
    layout = BaseLayout("b" * 64, projections, digests=digests)
    info = EngineInfo(
        base_id="b" * 64,
        runtime_id="r" * 64,
        layout=layout,
        model_type="kimi_k2",
        num_parameters=10**12,
        vocab_size=LARGEST_ID,
        max_model_len=10**7,
        device="cuda",
        dtype="bfloat16",
        quantization="none",
        num_kv_blocks=10**6,
        kv_block_size=16,
        arena_bytes=2**40,
        host_cache_bytes=2**40,
    )
    return EngineReady(info)


def stats_of_many_adapters() -> EngineStats:
    keys = adapter_keys(10_000)
    statuses = [AdapterStatus(key, Tier.DEVICE, 2**40, 2**20) for key in keys]
    return EngineStats(
        num_steps=2**40,
        num_running=2**40,
        num_waiting=2**40,
        num_free_kv_blocks=2**40,
        num_preemptions=2**40,
        num_prompt_tokens=2**40,
        num_cached_tokens=2**40,
        num_generated_tokens=2**40,
        num_adapter_loads=2**40,
        num_adapter_evictions=2**40,
        adapters=statuses,
        gone_adapters=keys,
        tenant_service=[(TENANT, 2**40)] * 10_000,
    )


def map_of_many_adapters() -> MemoryMap:
    keys = adapter_keys(10_000)
    extents = [ExtentUse(key, 2**40, 2**40, "loading", True, 2**20, 1.5, 2**20) for key in keys]
    host = [HostUse(key, 2**40, True, True) for key in keys]
    lines = [AdapterKvUse(TENANT, key, 2**20, 2**20, 2**20) for key in keys]
    use = KvUse(2**20, 2**20, 2**20, 2**20, 2**20)
    return MemoryMap(1, extents, host, use, lines, 2**40, 2**40, 2**40)


def submit_of_the_longest_prompt() -> Submit:
    """A text has at most as many tokens as bytes."""
    prompt = [LARGEST_ID] * INFERENCE_BODY_BYTES
    return Submit(GenerationRequest("r" * 64, TENANT, prompt, SamplingParams()))


def step_of_prompt_logprobs() -> StepEvents:
    """A step of 32 Ki prompt tokens, all with as many log-probabilities as may be asked for."""
    token = TokenLogprob(LARGEST_ID, -1.5)
    logprobs = TokenLogprobs(token, [token] * MAX_LOGPROBS, LARGEST_ID)
    return StepEvents(prompts=[PromptOutput("r" * 64, [logprobs] * (32 << 10))])


@pytest.mark.parametrize(
    "make",
    [
        ready_with_many_experts,
        stats_of_many_adapters,
        map_of_many_adapters,
        submit_of_the_longest_prompt,
        step_of_prompt_logprobs,
    ],
)
def test_the_largest_real_messages_fit_twice(make: Callable[[], ToEngine | FromEngine]) -> None:
    _, payload = encode(make())
    assert 2 * len(payload) <= MAX_PAYLOAD_BYTES


def taken(reader: FrameReader) -> list[Frames]:
    messages = []
    while (frames := reader.next()) is not None:
        messages.append(frames)
    return messages


def in_parts(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    ends = [*sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    return [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


@given(messages=MESSAGES, cuts=st.lists(st.integers(min_value=0)))
def test_messages_are_the_same_however_their_bytes_are_split(
    messages: list[tuple[bytes, bytes]], cuts: list[int]
) -> None:
    reader = FrameReader()
    received: list[Frames] = []
    for part in in_parts(b"".join(map(pack, messages)), cuts):
        reader.add(part)
        received += taken(reader)
    assert received == messages
    assert not reader


def reference(data: bytes) -> tuple[list[Frames], bool]:
    """The messages of a whole stream, and whether it breaks a bound after them."""
    messages: list[Frames] = []
    while len(data) >= 8:
        name, payload = struct.unpack("<II", data[:8])
        if name > MAX_NAME_BYTES or payload > MAX_PAYLOAD_BYTES:
            return messages, True
        if len(data) < 8 + name + payload:
            break
        messages.append((data[8 : 8 + name], data[8 + name : 8 + name + payload]))
        data = data[8 + name + payload :]
    return messages, False


GARBAGE = st.lists(
    st.one_of(
        st.binary(max_size=200),
        st.builds(lambda name, size: struct.pack("<II", name, size), *[st.integers(0, 70)] * 2),
        st.builds(lambda name, payload: pack((name, payload)), st.binary(max_size=9), st.binary()),
    )
).map(b"".join)


@given(data=GARBAGE, cuts=st.lists(st.integers(min_value=0)))
def test_garbage_is_read_as_by_the_reference_until_it_breaks_a_bound(
    data: bytes, cuts: list[int]
) -> None:
    reader = FrameReader()
    received: list[Frames] = []
    is_malformed = False
    for part in in_parts(data, cuts):
        reader.add(part)
        try:
            while (frames := reader.next()) is not None:
                received.append(frames)
        except MalformedMessage:
            is_malformed = True
            break
    assert (received, is_malformed) == reference(data)


@pytest.mark.parametrize(
    ("name_bytes", "payload_bytes"),
    [(MAX_NAME_BYTES + 1, 0), (0, MAX_PAYLOAD_BYTES + 1), (2**32 - 1, 2**32 - 1)],
)
def test_a_length_beyond_its_bound_is_refused_before_any_of_its_bytes_arrive(
    name_bytes: int, payload_bytes: int
) -> None:
    reader = FrameReader()
    reader.add(struct.pack("<II", name_bytes, payload_bytes))
    for _ in range(2):  # there is no way on from there
        with pytest.raises(MalformedMessage, match="at most"):
            reader.next()


def test_an_endless_message_holds_no_more_than_the_bound() -> None:
    """A peer that announces the longest message sends zeros for ever: empty messages, after it."""
    reader = FrameReader()
    reader.add(struct.pack("<II", MAX_NAME_BYTES, MAX_PAYLOAD_BYTES))
    part = bytes(1 << 20)
    for _ in range(MAX_PAYLOAD_BYTES // len(part) + 2):
        reader.add(part)
        assert len(reader._received) < MAX_MESSAGE_BYTES + len(part)
        taken(reader)
        assert len(reader._received) < MAX_MESSAGE_BYTES


@pytest.mark.parametrize(
    "frames", [(b"n" * (MAX_NAME_BYTES + 1), b""), (b"n", bytes(MAX_PAYLOAD_BYTES + 1))]
)
def test_nothing_is_packed_that_no_reader_accepts(frames: Frames) -> None:
    with pytest.raises(MalformedMessage, match="at most"):
        pack(frames)


def test_the_longest_message_arrives() -> None:
    longest = (b"n" * MAX_NAME_BYTES, bytes(MAX_PAYLOAD_BYTES))
    packed = pack(longest)
    assert len(packed) == MAX_MESSAGE_BYTES
    reader = FrameReader()
    reader.add(packed)
    assert reader.next() == longest
