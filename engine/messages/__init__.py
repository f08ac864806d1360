"""Messages between the engine and its client: plain, typed, schema-checked data.

Inside one process these objects are passed as they are; between processes `transport` encodes them
as msgpack. Every submitted request ends in exactly one RequestFinished.
"""

from .answers import (
    AdapterExplanation,
    AdapterKvUse,
    KvUse,
    MemoryMap,
    RequestList,
    RequestState,
)
from .commands import (
    Abort,
    AdapterFetched,
    AdapterFetchFailed,
    AdapterStored,
    DeleteAdapter,
    ExplainAdapter,
    ListRequests,
    MapMemory,
    Prefetch,
    SetPinned,
    Submit,
)
from .engine_info import EngineInfo
from .error_info import ErrorInfo
from .events import (
    AdapterEvicted,
    AdapterRead,
    AdapterWanted,
    EngineFailed,
    EngineReady,
    EvictionReceipt,
    FinishReason,
    PromptOutput,
    RequestFinished,
    RequestStarted,
    StepEvents,
    TokenLogprob,
    TokenLogprobs,
    TokensGenerated,
)
from .hello import Hello
from .requests import GenerationRequest, Pooling, SpeculationParams
from .statistics import (
    EngineStats,
    ProposerTotals,
    SpeculationStats,
    UtilizationStats,
)

ToEngine = (
    Submit
    | Abort
    | AdapterFetched
    | AdapterFetchFailed
    | DeleteAdapter
    | SetPinned
    | Prefetch
    | AdapterStored
    | ExplainAdapter
    | ListRequests
    | MapMemory
)
FromEngine = (
    EngineReady
    | StepEvents
    | AdapterWanted
    | AdapterRead
    | AdapterEvicted
    | AdapterExplanation
    | RequestList
    | MemoryMap
    | EngineStats
    | EngineFailed
)

__all__ = [
    "Abort",
    "AdapterEvicted",
    "AdapterExplanation",
    "AdapterFetchFailed",
    "AdapterFetched",
    "AdapterKvUse",
    "AdapterRead",
    "AdapterStored",
    "AdapterWanted",
    "DeleteAdapter",
    "EngineFailed",
    "EngineInfo",
    "EngineReady",
    "EngineStats",
    "ErrorInfo",
    "EvictionReceipt",
    "ExplainAdapter",
    "FinishReason",
    "FromEngine",
    "GenerationRequest",
    "Hello",
    "KvUse",
    "ListRequests",
    "MapMemory",
    "MemoryMap",
    "Pooling",
    "Prefetch",
    "PromptOutput",
    "ProposerTotals",
    "RequestFinished",
    "RequestList",
    "RequestStarted",
    "RequestState",
    "SetPinned",
    "SpeculationParams",
    "SpeculationStats",
    "StepEvents",
    "Submit",
    "ToEngine",
    "TokenLogprob",
    "TokenLogprobs",
    "TokensGenerated",
    "UtilizationStats",
]
