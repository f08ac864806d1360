"""What a caller orders: everything that determines one generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from ...engine.kv_policy import KvPolicy
from ...engine.messages import NO_TARGETS, LatencyTargets, Pooling, SpeculationParams
from ...engine.sampling_params import SamplingParams
from ...engine.text.text_form import TextForm
from ...platform.base import utc_now
from ...platform.keys.principal import Principal
from ..samples.open_sample import OpenSample
from ..telemetry.request_measures import RequestMeasures
from ..tools.reasoning import Reasoning
from .held_charge import HeldCharge
from .served_models import ServedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Everything that determines one generation."""

    request_id: str
    arrived_at: float
    admitted_at: datetime = field(default_factory=utc_now)
    """The prices of this time are charged."""
    principal: Principal
    model: ServedModel
    prompts: Sequence[list[int]]
    num_choices: int
    priority: int = 0
    """Among the tenant's own requests: lower ones first."""
    deadline_ms: int | None = None
    """Counted from `arrived_at`, to the last token."""
    targets: LatencyTargets = NO_TARGETS
    """Its own; see `objective`."""
    speculation: SpeculationParams | None = None
    """None: the engine decides."""
    kv_policy: KvPolicy | None = None
    """None: the engine's default."""
    is_endless: bool = False
    """Prompt and output together may exceed the context length."""
    sampling: SamplingParams
    """Of the first choice; the others differ in their seed."""
    text: TextForm
    reasoning: Reasoning | None = None
    """What the text may begin with."""
    bad_words: tuple[str, ...] = ()
    """Texts whose tokens do not follow each other in the output."""
    num_prompt_logprobs: int | None = None
    """Asked of each prompt once, whatever the number of choices."""
    pooling: Pooling | None = None
    """One vector for each prompt is asked for, and no output."""
    grammar_param: str = "structured_outputs"
    """What the caller knows the grammar of the answer by."""
    prompt_param: str = "prompt"
    """What the caller knows the prompts by."""
    held_charge: HeldCharge | None = None
    """Of a line of a batch: it runs in the background, and is charged with its result."""
    is_private: bool = False
    """Its caller said `store: false`: no judge reads its text."""
    sample: OpenSample | None = None
    """None: no sample of it is kept. Otherwise it has one sequence."""
    measures: RequestMeasures = field(default_factory=RequestMeasures)
    """Where its figures are noted for the request's log line and span."""

    @property
    def num_sequences(self) -> int:
        """One for each choice of each prompt."""
        return len(self.prompts) * self.num_choices

    @property
    def deadline_at(self) -> float | None:
        """On the monotonic clock, as `arrived_at`."""
        return None if self.deadline_ms is None else self.arrived_at + self.deadline_ms / 1000

    def sequence_id(self, index: int) -> str:
        """By which the engine knows one of the sequences."""
        return f"{self.request_id}-{index}"

    def is_first_choice(self, index: int) -> bool:
        """The sequence is its prompt's first, which pays for the prompt."""
        return index % self.num_choices == 0
