"""The services that answer generations and account for them."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from ...engine.fleet.fleet import Fleet
from ...engine.messages import EngineInfo
from ...engine.text.tokenizer import Tokenizer
from ...platform.samples.sample_seal import SampleSeal
from ..inference.admission import Admission
from ..inference.budget_alerts import BudgetAlerts
from ..inference.inference import Inference
from ..inference.ledger_writer import LedgerWriter
from ..inference.live_answers import LiveAnswers
from ..inference.metering import Metering
from ..inference.pricing import Pricing
from ..inference.version_tokenizers import VersionTokenizers
from ..samples.sample_log import SampleLog
from ..shadows.background import Background
from ..shadows.canary_judge import CanaryJudge
from ..shadows.shadows import Shadows
from ..telemetry.canary_watch import CanaryWatch
from ..telemetry.fleet_memories import FleetMemories
from ..telemetry.memories import Memories, ServerMemories
from ..telemetry.metrics import Metrics
from ..telemetry.overview import Overview
from ..telemetry.trainer_memories import TrainerMemories
from ..telemetry.vllm_metrics import EngineSizes
from .planes import Planes


@dataclass(frozen=True, slots=True)
class InferenceServices:
    metrics: Metrics
    metering: Metering
    admission: Admission
    pricing: Pricing
    budget_alerts: BudgetAlerts
    memories: Memories
    trainers: TrainerMemories
    overview: Overview
    inference: Inference
    canary_watch: CanaryWatch
    shadows: Shadows
    canary_judge: CanaryJudge


def _open_memories(planes: Planes, trainers: TrainerMemories) -> Memories:
    if isinstance(planes.engine, Fleet):
        return FleetMemories(planes.engine, is_ours=planes.counts_devices)
    return ServerMemories(
        engine=planes.engine,
        disk_stats=lambda: planes.fetcher.stats().disk,
        cache_directory=planes.settings.data_dir / "cache",
        control_plane=planes.control_plane,
        server_id=planes.server_id,
        trainers=trainers,
    )


def open_inference(planes: Planes, stack: AsyncExitStack) -> InferenceServices:
    """Create the services without starting them; `stack` closes them."""
    metrics = Metrics(lambda: planes.engine.stats, planes.fetcher.stats)
    pricing = Pricing(planes.control_plane, planes.served_model_name)
    budget_alerts = BudgetAlerts(planes.control_plane, metrics)
    stack.push_async_callback(budget_alerts.close)
    ledger = LedgerWriter(
        planes.control_plane,
        pricing=pricing,
        rates=planes.settings.cost_rates,
        announce=budget_alerts.announce_soon,
    )
    metering = _open_metering(planes, ledger, metrics, stack)
    admission = Admission(planes.control_plane, ledger, planes.server_id, is_open=metering.is_open)
    trainers = TrainerMemories()
    memories = _open_memories(planes, trainers)
    overview = Overview(planes.control_plane, memories, planes.server_id)
    stack.push_async_callback(overview.close)
    stack.push_async_callback(admission.close)
    samples = SampleLog(
        planes.control_plane,
        metrics,
        SampleSeal(planes.settings.load_secrets()),
        max_days=planes.settings.sample_days,
    )
    stack.push_async_callback(samples.close)
    live_answers = LiveAnswers(metrics)
    inference = Inference(
        engine=planes.engine,
        tokenizer=planes.tokenizer,
        version_tokenizers=VersionTokenizers(partial(Tokenizer, planes.bases.served)),
        control_plane=planes.control_plane,
        metering=metering,
        seen_adapters=planes.seen_adapters,
        admission=admission,
        metrics=metrics,
        live_answers=live_answers,
        tenant_figures=overview.of_tenant,
        served_model_name=planes.served_model_name,
        adapter_wait_seconds=planes.settings.adapter_wait_seconds,
        tool_format=planes.settings.tool_format,
        reasoning_parser=planes.settings.reasoning_parser,
        samples=samples,
    )
    stack.push_async_callback(inference.aclose)
    canary_watch = CanaryWatch(planes.control_plane, metrics)
    stack.push_async_callback(canary_watch.close)
    background = Background(inference, metering)
    shadows = Shadows(
        live_answers.shadowed,
        background=background,
        control_plane=planes.control_plane,
        metrics=metrics,
    )
    stack.push_async_callback(shadows.close)
    canary_judge = CanaryJudge(
        live_answers.judged,
        inference=inference,
        background=background,
        canary_watch=canary_watch,
        metrics=metrics,
    )
    stack.push_async_callback(canary_judge.close)
    if planes.settings.vllm_metrics:
        metrics.show_vllm_names(
            model_name=planes.served_model_name,
            stats=lambda: planes.engine.stats,
            sizes=lambda: _sizes(planes.engine.info),
            adapters=inference.asked_adapters,
        )
    return InferenceServices(
        metrics,
        metering,
        admission,
        pricing,
        budget_alerts,
        memories,
        trainers,
        overview,
        inference,
        canary_watch,
        shadows,
        canary_judge,
    )


def _open_metering(
    planes: Planes, ledger: LedgerWriter, metrics: Metrics, stack: AsyncExitStack
) -> Metering:
    metering = Metering(journal=planes.journal, ledger=ledger, metrics=metrics)
    stack.push_async_callback(metering.close)
    metrics.show_ledger(
        is_database_away=lambda: planes.control_plane.watch.is_away,
        num_unsettled=lambda: metering.num_unsettled,
    )
    return metering


def _sizes(info: EngineInfo) -> EngineSizes:
    return EngineSizes(info.kv_block_size, info.num_kv_blocks, info.max_num_seqs)
