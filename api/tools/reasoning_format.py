"""The formats in which models write their reasoning before the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import NamedTuple

from .harmony import ANALYSIS, CHANNEL, END, HARMONY_MARKERS, MESSAGE


class ReasoningParser(StrEnum):
    """The values of `--reasoning-parser`; the names are vLLM's."""

    NONE = "none"
    """Reasoning is not separated from the answer."""
    COHERE_COMMAND3 = "cohere_command3"
    DEEPSEEK_R1 = "deepseek_r1"
    DEEPSEEK_V3 = "deepseek_v3"
    ERNIE45 = "ernie45"
    GEMMA4 = "gemma4"
    GLM45 = "glm45"
    GRANITE = "granite"
    HOLO2 = "holo2"
    HUNYUAN_A13B = "hunyuan_a13b"
    KIMI_K2 = "kimi_k2"
    MINIMAX_M2 = "minimax_m2"
    MINIMAX_M2_APPEND_THINK = "minimax_m2_append_think"
    MISTRAL = "mistral"
    OLMO3 = "olmo3"
    OPENAI_GPTOSS = "openai_gptoss"
    QWEN3 = "qwen3"
    SEED_OSS = "seed_oss"
    STEP3 = "step3"


class Beginning(Enum):
    """What an answer begins with, according to the end of its prompt."""

    REASONING = auto()
    """The prompt opened the reasoning."""
    ANSWER = auto()
    """The prompt closed the reasoning or already contains a part of the answer."""
    EITHER = auto()
    """Reasoning, if the model opens it."""


class Frame(NamedTuple):
    """Markers around an answer."""

    opening: str
    closing: str


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The format of reasoning in an output: `opening reasoning closing answer`."""

    opening: str
    closing: str
    is_implied: bool = False
    """An output is reasoning up to `closing` even if neither prompt nor model wrote `opening`."""
    label: str = ""
    """What the model writes after `opening` and is no part of the reasoning."""
    frame: Frame | None = None
    """What the model writes around the answer; None: nothing."""
    is_kept: bool = False
    """Callers get the reasoning as the beginning of the answer, between its markers."""
    has_channels: bool = False
    """Outputs are messages in harmony, of which any may be reasoning."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers that may be special tokens, which answers otherwise omit."""
        if self.has_channels:
            return HARMONY_MARKERS
        return (self.opening, self.closing, *(self.frame or ()))

    def beginning_after(self, prompt_end: str, *, continued: str = "") -> Beginning:
        """`prompt_end`: the last characters of the prompt, special tokens included. `continued`:
        the text of the assistant's message that the output continues."""
        if continued.strip():
            is_open = continued.rfind(self.opening) > continued.rfind(self.closing)
            return Beginning.REASONING if is_open else Beginning.ANSWER
        end = prompt_end.rstrip()
        if end.endswith(self.closing):
            return Beginning.ANSWER
        is_open = self.is_implied or end.endswith(self.opening)
        return Beginning.REASONING if is_open else Beginning.EITHER


THINK = ReasoningFormat("<think>", "</think>")
IMPLIED_THINK = ReasoningFormat("<think>", "</think>", is_implied=True)
MISTRAL_THINK = ReasoningFormat("[THINK]", "[/THINK]")
GRANITE_THINK = ReasoningFormat("Here is my thought process:", "Here is my response:")
SEED_THINK = ReasoningFormat("<seed:think>", "</seed:think>")
COHERE_THINK = ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>")
GEMMA4_THINK = ReasoningFormat("<|channel>", "<channel|>", label="thought\n")
ERNIE45_THINK = ReasoningFormat(
    "<think>", "</think>", is_implied=True, frame=Frame("<response>", "</response>")
)
HUNYUAN_THINK = ReasoningFormat("<think>", "</think>", frame=Frame("<answer>", "</answer>"))
KEPT_THINK = ReasoningFormat("<think>", "</think>", is_kept=True)
HARMONY = ReasoningFormat(f"{CHANNEL}{ANALYSIS}{MESSAGE}", END, has_channels=True)

REASONING_FORMATS: Mapping[ReasoningParser, ReasoningFormat] = {
    ReasoningParser.COHERE_COMMAND3: COHERE_THINK,
    ReasoningParser.DEEPSEEK_R1: IMPLIED_THINK,
    ReasoningParser.DEEPSEEK_V3: THINK,
    ReasoningParser.ERNIE45: ERNIE45_THINK,
    ReasoningParser.GEMMA4: GEMMA4_THINK,
    ReasoningParser.GLM45: THINK,
    ReasoningParser.GRANITE: GRANITE_THINK,
    ReasoningParser.HOLO2: THINK,
    ReasoningParser.HUNYUAN_A13B: HUNYUAN_THINK,
    ReasoningParser.KIMI_K2: THINK,
    ReasoningParser.MINIMAX_M2: THINK,
    ReasoningParser.MINIMAX_M2_APPEND_THINK: KEPT_THINK,
    ReasoningParser.MISTRAL: MISTRAL_THINK,
    ReasoningParser.OLMO3: THINK,
    ReasoningParser.OPENAI_GPTOSS: HARMONY,
    ReasoningParser.QWEN3: THINK,
    ReasoningParser.SEED_OSS: SEED_THINK,
    ReasoningParser.STEP3: THINK,
}
"""All but `none`."""
DETECTABLE_FORMATS = (
    THINK,
    MISTRAL_THINK,
    GRANITE_THINK,
    SEED_THINK,
    COHERE_THINK,
    GEMMA4_THINK,
    HARMONY,
)
"""Each is recognized by a chat template that contains both of its markers."""
