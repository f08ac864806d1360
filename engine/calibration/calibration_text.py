"""The calibration text as token ids: samples to calibrate with, and held-out ones to measure."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ..errors import InvalidParameter
from ..text.tokenizer import Tokenizer

_HELD_OUT_SHARE = 16
_MAX_HELD_OUT = 8
_CHARACTERS_PER_TOKEN = 32
"""As many characters are read at most: a longer text would only be tokenized in vain."""


class CalibrationText(NamedTuple):
    """Token ids, as many in each sample."""

    samples: list[list[int]]
    held_out: list[list[int]]
    """Which no code depends on."""


def read_calibration_text(
    path: Path, tokenizer: Tokenizer, *, num_samples: int, sequence_length: int
) -> CalibrationText:
    """Samples from all over the text, each beginning as a prompt of the model begins.

    Raises InvalidParameter if the file is not readable text, or too short.
    """
    num_held_out = min(max(num_samples // _HELD_OUT_SHARE, 1), _MAX_HELD_OUT)
    count = num_samples + num_held_out
    beginning = tokenizer.encode("")
    length = sequence_length - len(beginning)
    if length < 1:
        raise InvalidParameter("seq_len", f"{sequence_length} tokens hold no text")
    tokens = tokenizer.encode(
        _read(path, count * length * _CHARACTERS_PER_TOKEN), add_special_tokens=False
    )
    if len(tokens) < count * length:
        raise InvalidParameter(
            "text",
            f"{path} has {len(tokens)} tokens; {num_samples} samples and {num_held_out} held-out "
            f"ones of {sequence_length} need {count * length}: give more text, or smaller "
            "--samples or --seq-len",
        )
    stride = len(tokens) // count
    parts = [
        beginning + tokens[start : start + length] for start in range(0, count * stride, stride)
    ]
    every = count // num_held_out
    held_out = [part for index, part in enumerate(parts) if index % every == every - 1]
    samples = [part for index, part in enumerate(parts) if index % every != every - 1]
    return CalibrationText(samples[:num_samples], held_out[:num_held_out])


def _read(path: Path, max_characters: int) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(max_characters)
    except UnicodeDecodeError as exc:
        raise InvalidParameter("text", f"{path} is not UTF-8 text") from exc
    except OSError as exc:
        raise InvalidParameter("text", f"{path} cannot be read: {exc.strerror}") from exc
