"""The examples of a file, tokenized anew whenever they are needed.

The file is read once to check every line and to note where it begins. So memory holds 12 bytes for
each example, however long the examples are.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..text.tokenizer import Tokenizer
from .errors import InvalidTrainingData
from .lines import read_example, read_preference
from .methods import Method
from .tokens import TrainedTokens, tokenize

MAX_LINE_BYTES = 16 << 20


class Examples:
    """The lines of one file, which stays as it is. Blank lines are skipped."""

    def __init__(self, path: Path, tokenizer: Tokenizer, *, method: str, max_tokens: int) -> None:
        """Raises InvalidTrainingData with the first line that is wrong."""
        self._tokenizer = tokenizer
        self._method = method
        self._max_tokens = max_tokens
        self._path = path
        self._starts = array("Q")
        self._lengths = array("I")
        self.longest = 0
        """Tokens of the longest sequence."""
        for number, start, line in self._lines():
            try:
                variants = self._read(line)
            except InvalidTrainingData as exc:
                raise InvalidTrainingData(str(exc), number) from exc
            self._starts.append(start)
            lengths = [len(each.token_ids) for each in variants]
            self._lengths.append(sum(lengths))
            self.longest = max(self.longest, *lengths)
        if not self._starts:
            raise InvalidTrainingData("the file has no examples")

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens by example; of `dpo`, those of both ends."""
        return self._lengths

    def __getitem__(self, index: int) -> tuple[TrainedTokens, ...]:
        """One sequence; of `dpo` the preferred and the other one."""
        with self._path.open("rb") as file:
            file.seek(self._starts[index])
            return self._read(file.readline())

    def _lines(self) -> Iterator[tuple[int, int, bytes]]:
        """The number, the place and the content of each line that is not blank."""
        number, start = 0, 0
        with self._path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise InvalidTrainingData(f"is longer than {MAX_LINE_BYTES} bytes", number)
                if not line.isspace():
                    yield number, start, line
                start += len(line)

    def _read(self, line: bytes) -> tuple[TrainedTokens, ...]:
        if self._method == Method.DPO:
            pair = read_preference(line)
            examples = (pair.preferred, pair.non_preferred)
        else:
            examples = (read_example(line),)  # type: ignore[assignment]
        variants = tuple(
            tokenize(example, self._tokenizer).cut(self._max_tokens) for example in examples
        )
        if not all(each.num_trained for each in variants):
            raise InvalidTrainingData(f"no token of the last {self._max_tokens} is trained")
        return variants
