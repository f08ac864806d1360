from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.identity import AdapterKey
from loraplex.adapters.layout import BaseLayout, Projection, Slice
from loraplex.adapters.load_times import SecondsHistogram
from loraplex.adapters.manager import Failure, Tier
from loraplex.adapters.record import Departure
from loraplex.adapters.status import (
    AdapterLoad,
    AdapterStatus,
    AdapterTierStats,
    AdapterTransition,
    ExtentUse,
    HostUse,
)
from loraplex.engine.errors import MalformedMessage
from loraplex.engine.grammars.spec import GrammarKind, GrammarSpec
from loraplex.engine.messages import (
    Abort,
    AdapterEvicted,
    AdapterExplanation,
    AdapterFetched,
    AdapterFetchFailed,
    AdapterKvUse,
    AdapterRead,
    AdapterStored,
    AdapterWanted,
    DeleteAdapter,
    EngineFailed,
    EngineInfo,
    EngineReady,
    EngineStats,
    ErrorInfo,
    EvictionReceipt,
    ExplainAdapter,
    FinishReason,
    ForgetOutputs,
    FromEngine,
    GenerationRequest,
    KvUse,
    MemoryMap,
    Prefetch,
    ProposerTotals,
    RankStats,
    RequestFinished,
    RequestStarted,
    SetPinned,
    SpeculationParams,
    SpeculationStats,
    StepEvents,
    Submit,
    ToEngine,
    TokenLogprob,
    TokenLogprobs,
    TokensGenerated,
    UtilizationStats,
)
from loraplex.engine.process.transport import decode_from_engine, decode_to_engine, encode
from loraplex.engine.sampling_params import SamplingParams

KEY = AdapterKey("acme", "sha256:" + "ab" * 32)
ERROR = ErrorInfo("store_unavailable", "no answer")
FAILURE = Failure("object_corrupt", "no block")
LAYOUT = BaseLayout("base", (Projection((Slice("q_proj", 8, 4),)),), {"lm_head": "tied"})
INFO = EngineInfo(
    base_id="base",
    runtime_id="runtime",
    layout=LAYOUT,
    model_type="llama",
    num_parameters=1 << 40,
    vocab_size=260,
    max_model_len=512,
    device="cpu",
    dtype="float32",
    quantization="int8",
    num_kv_blocks=64,
    kv_block_size=16,
    arena_bytes=1 << 20,
    host_cache_bytes=1 << 21,
    memory_plan=["weights 1 MiB"],
    proposers=["ngram"],
    max_draft_tokens=8,
)
SAMPLING = SamplingParams(
    temperature=0.5, seed=-(1 << 63), logit_bias={7: -100.0}, num_logprobs=2, stop_token_ids=(3, 4)
)
EVENTS = StepEvents(
    started=[
        RequestStarted("r", 0.5, 0.25, Tier.DISK, 16, 250.0),
        RequestStarted("b", 0, 0, None, 0),
    ],
    tokens=[
        TokensGenerated("r", [1, 2], logits=b"\x00\xff", num_draft_tokens=3),
        TokensGenerated(
            "b", [5], logprobs=[TokenLogprobs(TokenLogprob(5, -1.5), [TokenLogprob(6, -0.5)])]
        ),
    ],
    finished=[
        RequestFinished("r", FinishReason.STOP, 3, 2, stop_token_id=2, num_draft_tokens=3),
        RequestFinished("b", FinishReason.ERROR, 1, 1, ERROR),
    ],
)
DRAFTING = SpeculationStats(KEY, "ngram", 4, 18, 9, 0.75, 5)
STATS = EngineStats(
    *(1, 2, 3, 4, 5, 6, 7, 8, 9, 10),
    [AdapterStatus(KEY, Tier.DEVICE, 4096, num_leases=2)],
    ranks=[RankStats(1, 1 << 40, 1 << 39, 4, 5, 6, 7, 8, 1, "host", 0.5)],
    kv_usage=0.5,
    utilization=UtilizationStats(1.5, 1e12, 1e15, 0.25, 0.125, 1e10, 1e11),
    tenant_service=[("acme", 1 << 40)],
    adapter_tiers=AdapterTierStats(
        bytes_by_tier={Tier.DEVICE: 1 << 30},
        awaited_bytes=1 << 33,
        loaded_bytes=1 << 40,
        evictions={Departure.SHARE: 3},
        load_seconds={"read": SecondsHistogram([0.1, 1.0], [5, 1, 0], 0.75)},
    ),
    speculation=[DRAFTING, SpeculationStats(None, "draft", 1, 2, 0, 0.0, 0)],
    speculation_totals=[ProposerTotals("ngram", 5, 20, 9, 0.5)],
)
GRAMMAR = GrammarSpec(GrammarKind.REGEX, "ä+")
TO_ENGINE: list[ToEngine] = [
    Submit(GenerationRequest("r", "acme", [1, 2], SAMPLING, KEY, "probe", return_logits=True)),
    Submit(GenerationRequest("r", "acme", [], SamplingParams())),
    Submit(GenerationRequest("r", "acme", [1], SamplingParams(grammar=GRAMMAR))),
    Submit(
        GenerationRequest(
            "r", "acme", [1], SAMPLING, speculation=SpeculationParams("ngram", num_tokens=4)
        )
    ),
    Abort("r"),
    AdapterFetched(KEY, ("/tmp/ä",), Tier.STORE),
    AdapterFetchFailed(KEY, ERROR),
    DeleteAdapter(KEY),
    DeleteAdapter(KEY, 2.5),
    SetPinned([KEY]),
    Prefetch(KEY, 60.0),
    AdapterStored(KEY),
    ForgetOutputs(KEY),
    ExplainAdapter(KEY),
]
FROM_ENGINE: list[FromEngine] = [
    EngineReady(INFO),
    EVENTS,
    StepEvents(),
    AdapterWanted(KEY),
    AdapterRead(KEY),
    AdapterEvicted(KEY),
    AdapterEvicted(KEY, EvictionReceipt(4096, 4096, 2, 1, 0.5)),
    AdapterExplanation(
        AdapterLoad(
            *(KEY, "failed", Tier.STORE, 1.5, FAILURE, 0.5, 3, None, 1 << 20, 1 << 19, 0, True),
            [AdapterTransition("read", 2.5), AdapterTransition("failed", 1.5, "object_corrupt")],
        ),
        [DRAFTING],
    ),
    MemoryMap(
        1,
        [ExtentUse(KEY, 0, 4096, "idle", True, 0, 1.5, None)],
        [HostUse(KEY, 4096, True, False)],
        KvUse(8, 1024, 4, 2, 2),
        [AdapterKvUse("acme", KEY, 1, 2, 3)],
        *(1 << 20, 1 << 19, 4096),
    ),
    STATS,
    EngineFailed(ERROR),
]


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda m: type(m).__name__)
def test_messages_to_the_engine_arrive_as_they_were(message: ToEngine) -> None:
    assert decode_to_engine(encode(message)) == message


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda m: type(m).__name__)
def test_messages_from_the_engine_arrive_as_they_were(message: FromEngine) -> None:
    assert decode_from_engine(encode(message)) == message


def test_keys_and_tiers_arrive_with_their_types() -> None:
    message = decode_to_engine(encode(AdapterFetched(KEY, ("/b",), Tier.DISK)))
    assert isinstance(message, AdapterFetched)
    assert (type(message.key), type(message.tier)) == (AdapterKey, Tier)


def test_a_layout_travels_without_what_it_has_computed() -> None:
    assert LAYOUT.slice_index == {"q_proj": 0}
    _, payload = encode(EngineReady(INFO))
    assert set(msgspec.msgpack.decode(payload)["info"]["layout"]) == {
        "base_id",
        "projections",
        "refused",
        "ties_embeddings",
        "is_text_part",
        "fixed_vocabulary",
        "digests",
    }


def test_each_direction_has_its_own_messages() -> None:
    with pytest.raises(MalformedMessage, match="unknown message type"):
        decode_to_engine(encode(StepEvents()))
    with pytest.raises(MalformedMessage, match="unknown message type"):
        decode_from_engine(encode(Abort("r")))


def packed(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "2 frames"),
        ([b"Abort"], "2 frames"),
        ([b"Abort", packed({"request_id": "r"}), b""], "2 frames"),
        ([b"Mystery", b"\x80"], "unknown message type"),
        ([b"\xff" * 1000, b"\x80"], "unknown message type"),
        ([b"Abort", b""], "Abort"),
        ([b"Abort", b"\xc1"], "Abort"),
        ([b"Abort", packed({})], "request_id"),
        ([b"Abort", packed({"request_id": 1})], "str"),
        ([b"Abort", packed(["r"])], "Abort"),
        ([b"DeleteAdapter", packed({"key": ["acme"]})], "DeleteAdapter"),
        ([b"AdapterFetched", packed({"key": KEY, "path": "/b", "tier": "moon"})], "moon"),
    ],
)
def test_a_malformed_message_is_a_coded_error(frames: list[bytes], reason: str) -> None:
    with pytest.raises(MalformedMessage, match=reason) as error:
        decode_to_engine(frames)
    assert error.value.code == "malformed_message"


def test_parameters_are_checked_on_arrival() -> None:
    name, payload = encode(Submit(GenerationRequest("r", "acme", [1], SamplingParams())))
    request = msgspec.msgpack.decode(payload)
    request["request"]["sampling"]["max_tokens"] = -1
    with pytest.raises(MalformedMessage, match="max_tokens"):
        decode_to_engine([name, packed(request)])
    request["request"]["sampling"]["max_tokens"] = 1
    request["request"]["sampling"]["grammar"] = {"kind": "regex", "text": "a" * (1 << 17)}
    with pytest.raises(MalformedMessage, match="bytes"):
        decode_to_engine([name, packed(request)])
    request["request"]["sampling"]["grammar"] = None
    request["request"]["speculation"] = {"num_tokens": -1}
    with pytest.raises(MalformedMessage, match=r"speculation\.num_tokens"):
        decode_to_engine([name, packed(request)])


@given(payload=st.binary(max_size=200), name=st.sampled_from([b"StepEvents", b"EngineStats", b"?"]))
def test_no_bytes_raise_anything_else(payload: bytes, name: bytes) -> None:
    with suppress(MalformedMessage):
        decode_from_engine([name, payload])
