"""What a trainer takes beside the engine, in lines for the operator."""

from __future__ import annotations

from collections.abc import Iterator

from ...engine.messages import EngineInfo
from ...engine.tuning.trainer_needs import RecipeLimits, TrainerNeeds, trainer_needs
from ..schemas.tuning import LoraBody
from .recipes import BATCH_SIZE, MAX_TOKENS
from .trainer_place import TrainerPlace

MIB = 1 << 20


def memory_lines(info: EngineInfo, place: TrainerPlace) -> list[str]:
    """For a job with the default recipe whose examples are all as long as they may be."""
    limits = RecipeLimits(LoraBody().rank, BATCH_SIZE, min(MAX_TOKENS, info.max_model_len))
    return list(_lines(_needs(info, limits), limits, place))


def _needs(info: EngineInfo, limits: RecipeLimits) -> TrainerNeeds:
    decoder = (each for each in info.layout.slices if each.out_features != info.vocab_size)
    return trainer_needs(
        decoder,
        limits,
        weight_bytes=info.weight_bytes,
        vocab_size=info.vocab_size,
        num_query_heads=info.num_query_heads,
    )


def _lines(needs: TrainerNeeds, limits: RecipeLimits, place: TrainerPlace) -> Iterator[str]:
    yield (
        f"a trainer on {place.device} {_mib(needs.loaded_bytes)} with its own base, and at most "
        f"{_mib(needs.step_bytes)} for a step of {limits.batch_size} sequences of "
        f"{limits.max_tokens} tokens, estimated"
    )
    free = place.free_bytes()
    if not place.is_here:
        yield "trainers run on nodes of Ray, each with the memory that is free there"
    elif free is None:
        yield "no memory is kept for trainers: set --tuning-bytes, or another --tuning-device"
    elif needs.loaded_bytes > free:
        yield f"a trainer may take {_mib(free)}: no job fits"
    elif needs.total_bytes > free:
        yield (
            f"a trainer may take {_mib(free)}: jobs with long examples need a smaller `batch_size` "
            "or `lora.max_tokens`"
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f} MiB"
