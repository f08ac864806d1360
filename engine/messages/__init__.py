"""Messages between the engine and its client, and between machines: typed, schema-checked data.

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
    ForgetOutputs,
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
from .handover import GroupPages, PagesPlace, PrefixPiece, PrefixTransport
from .hello import Hello
from .latency_targets import NO_TARGETS, LatencyTargets
from .replica import (
    AdaptersProven,
    BlockFound,
    EngineCrashed,
    LeaseAsked,
    LeaseRenewed,
    ReplicaChanged,
    ReplicaRole,
    ReplicaState,
)
from .requests import GenerationRequest, Pooling, SpeculationParams
from .resources import NO_RESOURCES, Resources
from .statistics import (
    EngineStats,
    ProposerTotals,
    RankStats,
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
    | ForgetOutputs
    | ExplainAdapter
    | ListRequests
    | MapMemory
    | PrefixPiece
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
    | PrefixPiece
)
ToAgent = (
    Submit
    | Abort
    | DeleteAdapter
    | SetPinned
    | Prefetch
    | AdapterStored
    | ForgetOutputs
    | ExplainAdapter
    | ListRequests
    | MapMemory
    | BlockFound
    | AdapterFetchFailed
    | LeaseRenewed
    | PrefixPiece
)
FromAgent = (
    EngineReady
    | StepEvents
    | AdapterWanted
    | AdapterEvicted
    | AdapterExplanation
    | RequestList
    | MemoryMap
    | EngineStats
    | ReplicaChanged
    | EngineCrashed
    | AdaptersProven
    | LeaseAsked
    | PrefixPiece
)

__all__ = [
    "NO_RESOURCES",
    "NO_TARGETS",
    "Abort",
    "AdapterEvicted",
    "AdapterExplanation",
    "AdapterFetchFailed",
    "AdapterFetched",
    "AdapterKvUse",
    "AdapterRead",
    "AdapterStored",
    "AdapterWanted",
    "AdaptersProven",
    "BlockFound",
    "DeleteAdapter",
    "EngineCrashed",
    "EngineFailed",
    "EngineInfo",
    "EngineReady",
    "EngineStats",
    "ErrorInfo",
    "EvictionReceipt",
    "ExplainAdapter",
    "FinishReason",
    "ForgetOutputs",
    "FromAgent",
    "FromEngine",
    "GenerationRequest",
    "GroupPages",
    "Hello",
    "KvUse",
    "LatencyTargets",
    "LeaseAsked",
    "LeaseRenewed",
    "ListRequests",
    "MapMemory",
    "MemoryMap",
    "PagesPlace",
    "Pooling",
    "Prefetch",
    "PrefixPiece",
    "PrefixTransport",
    "PromptOutput",
    "ProposerTotals",
    "RankStats",
    "ReplicaChanged",
    "ReplicaRole",
    "ReplicaState",
    "RequestFinished",
    "RequestList",
    "RequestStarted",
    "RequestState",
    "Resources",
    "SetPinned",
    "SpeculationParams",
    "SpeculationStats",
    "StepEvents",
    "Submit",
    "ToAgent",
    "ToEngine",
    "TokenLogprob",
    "TokenLogprobs",
    "TokensGenerated",
    "UtilizationStats",
]
