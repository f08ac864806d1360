"""Runs the scheduled sequences of a step and produces the result of each request.

A step is launched, its next tokens are drawn, and its output is read: one after the other, or with
the next step launched before the last of the three (see `pipeline`).

An error in a step is attributed first to the draft tokens that it verified, then to the one request
that causes it, which ends; no other request is affected. Torch-free: results of the step are passed
through unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ..draft import NO_DRAFT
from ..errors import EngineError, GrammarFailed, NumericalError, RankLost, StaleExtent
from ..grammars.matcher import Matcher
from ..messages import FinishReason, PromptOutput, TokensGenerated
from ..request import Request
from ..scheduling.batch import ScheduledSequence
from ..scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)


class Output(Protocol):
    """The step's output for its logits rows, those of each sequence adjacent and in its order."""

    @property
    def finite(self) -> Sequence[bool]:
        """For each row whether all of its logits are numbers."""
        ...

    @property
    def hidden_states(self) -> Any:
        """The input of the output head by row; None unless requested."""
        ...

    @property
    def features(self) -> Any:
        """By row, of all that are computed: see `LayerFeatures`; None unless requested."""
        ...


OutputT = TypeVar("OutputT", bound=Output)
OutputT_co = TypeVar("OutputT_co", bound=Output, covariant=True)


class Runner(Protocol[OutputT_co]):
    """See `ModelRunner`."""

    def is_current(self, sequence: ScheduledSequence) -> bool: ...

    def run(
        self, sequences: tuple[ScheduledSequence, ...], sampled: Sampled | None
    ) -> OutputT_co: ...

    def keep(self, request: Request, path: Sequence[int]) -> None: ...

    def clear(self, request: Request, start: int, end: int) -> None: ...


class Observer(Protocol):
    """See `Speculation`."""

    def observe(self, request: Request, accepted: Sequence[int], hidden_state: Any) -> None: ...

    def observe_features(self, request: Request, start: int, features: Any) -> None: ...


class Requests(Protocol):
    """See `RequestLifecycle`."""

    def read(self, read: PromptOutput) -> None: ...

    def generate(self, request: Request, generated: TokensGenerated) -> None:
        """The request has these tokens only afterwards."""

    def finish(
        self, request: Request, reason: FinishReason, *, stop_token_id: int | None = None
    ) -> None: ...

    def fail(self, request: Request, error: EngineError) -> None: ...


class Drawn(NamedTuple):
    """The result of verifying one request's draft."""

    path: Sequence[int]
    """Indices of the draft's accepted tokens, each the child of the one before."""
    generated: TokensGenerated
    """The accepted tokens and one more."""


class Draws(Protocol):
    """Next tokens that are being drawn."""

    def read(self) -> Sequence[Drawn | EngineError]:
        """For each request its next tokens, or the error that ends it; waits for them."""
        ...


class Sampled(NamedTuple):
    """The next tokens of some requests, before they are read."""

    draws: Any
    """`Draws`, of which the runner knows more."""
    places: Mapping[Request, int]
    """The place of each request among them."""


class StepRows(NamedTuple):
    """The rows of one sequence in a step's output."""

    kept: range
    """Its rows among those that have logits."""
    computed: range
    """Its rows among all."""


Read = Callable[[ScheduledSequence, OutputT, StepRows], PromptOutput | None]
"""Gives what is asked of the prompt's positions `sequence.read`, if it is complete. Raises
EngineError if what it finds ends the request."""
Draw = Callable[[Sequence[Request], OutputT, Sequence[int]], Draws]
"""Takes requests, a step's output and its rows of these requests: for each the row of its last
known token, then those of its draft. Begins to draw their next tokens. Changes nothing."""


class _Drawing(NamedTuple):
    """A sequence whose next tokens are sampled."""

    sequence: ScheduledSequence
    rows: range
    """The logits rows of the sequence in the step: its last token's, then those of its draft."""
    computed: range
    """Its rows among all of the step."""


@dataclass(slots=True)
class LaunchedStep(Generic[OutputT]):
    """A step that was launched and whose output was not read."""

    sequences: tuple[ScheduledSequence, ...]
    output: OutputT | None
    """None: a part of the step is left to compute when it is read."""
    sampled: Sampled | None = None
    """None: no tokens are being drawn yet."""
    compute: Callable[[], OutputT] | None = None
    """Computes what is left."""


class Execution(Generic[OutputT]):
    """Gives requests the tokens that their steps compute, and ends completed requests."""

    def __init__(
        self,
        *,
        runner: Runner[OutputT],
        scheduler: Scheduler,
        speculation: Observer,
        read: Read[OutputT],
        draw: Draw[OutputT],
        requests: Requests,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._speculation = speculation
        self._read_prompt = read
        self._draw_tokens = draw
        self._requests = requests

    def current(self, sequences: Sequence[ScheduledSequence]) -> tuple[ScheduledSequence, ...]:
        """The sequences that may run; requests whose adapter does not match their lease end."""
        return tuple(filter(self._is_current, sequences))

    def _is_current(self, sequence: ScheduledSequence) -> bool:
        if sequence.request.has_ended:
            return False
        if self._runner.is_current(sequence):
            return True
        self._requests.fail(sequence.request, StaleExtent())
        return False

    def run(self, sequences: tuple[ScheduledSequence, ...]) -> bool:
        """Run the sequences and process their output; False if that took more than one step.

        Raises RankLost: then no request is at fault, and none can go on.
        """
        try:
            step = self.launch(sequences)
        except RankLost:
            raise
        except Exception:  # one request's error must not fail the others of its step
            if _is_one_without_draft(sequences):
                self._fail(sequences[0].request)
                return False
            logger.exception("a step of %d sequences failed; running them alone", len(sequences))
            for sequence in sequences:
                self.run((self._without_draft(sequence),))
            return False
        return self.finish(step)

    def launch(
        self, sequences: tuple[ScheduledSequence, ...], before: LaunchedStep[OutputT] | None = None
    ) -> LaunchedStep[OutputT]:
        """Launch a step; `before`: the one in flight, if it was not read. Raises what the runner
        raises."""
        output = self._runner.run(sequences, before.sampled if before else None)
        self._scheduler.note_launch(sequences)
        return LaunchedStep(sequences, output)

    def draw(self, step: LaunchedStep[OutputT]) -> bool:
        """Begin to draw the next tokens of a step without drafts in which no prompt is read.

        All tokens before them must be known. False: it failed, and `finish` attributes the error.
        """
        drawing = [
            _Drawing(sequence, *rows)
            for sequence, rows in _with_rows(step.sequences)
            if sequence.draws and not sequence.request.has_ended
        ]
        if not drawing:
            return True
        try:
            assert step.output is not None, "only whole steps are drawn ahead"
            step.sampled = self._begin_to_draw(drawing, step.output)
        except Exception:  # one request's error must not fail the others of its step
            logger.exception("sampling for %d requests failed", len(drawing))
            return False
        return True

    def finish(self, step: LaunchedStep[OutputT]) -> bool:
        """Read a step's output and process it; False if parts of it were run again."""
        output = step.output if step.compute is None else step.compute()
        assert output is not None
        finite = output.finite
        drawing: list[_Drawing] = []
        failed: list[ScheduledSequence] = []
        for sequence, rows in _with_rows(step.sequences):
            if not self._is_current(sequence):
                continue
            kept = rows.kept
            first_drawn = kept.stop - 1 - sequence.num_draft_tokens
            is_finite = all(finite[kept.start : first_drawn + 1])
            if sequence.num_draft_tokens and not all(finite[first_drawn : kept.stop]):
                sequence = self._without_draft(sequence)
                if not is_finite:
                    failed.append(sequence)
                    continue
            if not is_finite:
                self._requests.fail(sequence.request, NumericalError())
            elif sequence.request.unread and not self._read(sequence, output, rows):
                continue
            elif sequence.draws:
                drawn = range(first_drawn, first_drawn + 1 + sequence.num_draft_tokens)
                drawing.append(_Drawing(sequence, drawn, rows.computed))
            else:
                self._scheduler.take([(sequence, [], 0)])
                if output.features is not None:
                    self._observe_features(sequence, rows.computed, (), output.features)
                if sequence.samples:
                    self._requests.finish(sequence.request, FinishReason.LENGTH)
        if step.sampled is not None:
            self._take(drawing, step.sampled, output)
        elif drawing:
            self._draw(drawing, output)
        self._scheduler.note_read()
        for sequence in failed:
            # The values written for a draft token enter the sums of earlier rows with a weight of
            # zero.
            self.run((sequence,))
        return not failed

    def _read(self, sequence: ScheduledSequence, output: OutputT, rows: StepRows) -> bool:
        """Deliver the results for the prompt; False if that ended the request."""
        request, read = sequence.request, sequence.read
        try:
            found = self._read_prompt(sequence, output, rows) if read else None
        except EngineError as exc:
            self._requests.fail(request, exc)
            return False
        except Exception:  # the error is this request's alone
            self._fail(request)
            return False
        if found is not None:
            self._requests.read(found)
        request.unread = range(max(read.stop, request.unread.start), request.unread.stop)
        return True

    def _without_draft(self, sequence: ScheduledSequence) -> ScheduledSequence:
        """The sequence without its draft tokens, whose traces are removed."""
        request, end = sequence.request, sequence.end
        if sequence.num_draft_tokens:
            self._runner.clear(request, end - sequence.num_draft_tokens, end)
        request.draft = NO_DRAFT
        return sequence.with_draft()

    def _draw(self, drawing: Sequence[_Drawing], output: OutputT) -> None:
        """Sample each request's next tokens; a request that causes an error is identified and
        ended."""
        try:
            sampled = self._begin_to_draw(drawing, output)
        except Exception:  # one request's error must not fail the others of its step
            if _is_one_without_draft([sequence for sequence, *_ in drawing]):
                self._fail(drawing[0].sequence.request)
                return
            logger.exception("sampling for %d requests failed; drawing alone", len(drawing))
            for sequence, own_rows, computed in drawing:
                alone = _Drawing(self._without_draft(sequence), own_rows[:1], computed)
                self._draw([alone], output)
            return
        self._take(drawing, sampled, output)

    def _begin_to_draw(self, drawing: Sequence[_Drawing], output: OutputT) -> Sampled:
        requests = [sequence.request for sequence, *_ in drawing]
        rows = [row for _, own_rows, _ in drawing for row in own_rows]
        draws = self._draw_tokens(requests, output, rows)
        return Sampled(draws, {request: place for place, request in enumerate(requests)})

    def _take(self, drawing: Sequence[_Drawing], sampled: Sampled, output: OutputT) -> None:
        """Give these requests, all or some of those sampled for, their next tokens."""
        results: Sequence[Drawn | EngineError] = sampled.draws.read()
        given: list[tuple[_Drawing, Drawn]] = []
        for entry in drawing:
            result = results[sampled.places[entry.sequence.request]]
            if isinstance(result, EngineError):
                self._requests.fail(entry.sequence.request, result)
            else:
                given.append((entry, self._announce(entry.sequence.request, *result)))
        self._scheduler.take(
            [(entry.sequence, drawn.generated.token_ids, len(drawn.path)) for entry, drawn in given]
        )
        for entry, drawn in given:
            self._go_on(entry, drawn, output)

    def _announce(self, request: Request, path: Sequence[int], generated: TokensGenerated) -> Drawn:
        """Announce the request's new tokens, up to the one that ends it; returns these."""
        if path:
            num_tokens = self._num_until_end(request, generated.token_ids)
            path, generated = path[:num_tokens], generated.first(num_tokens)
            if not self._keeps(request, path):
                path, generated = (), generated.first(1)
        self._requests.generate(request, generated)
        return Drawn(path, generated)

    def _go_on(self, entry: _Drawing, drawn: Drawn, output: OutputT) -> None:
        """End the request if its new tokens do, or prepare for the next ones."""
        request, path, token_ids = entry.sequence.request, drawn.path, drawn.generated.token_ids
        if output.features is not None:
            accepted = path[: len(token_ids) - 1]
            self._observe_features(entry.sequence, entry.computed, accepted, output.features)
        hidden_states = output.hidden_states
        if request.draft is not NO_DRAFT or hidden_states is not None:
            row = entry.rows[1 + path[len(token_ids) - 2] if len(token_ids) > 1 else 0]
            self._speculation.observe(
                request, path, None if hidden_states is None else hidden_states[row]
            )
            request.draft = NO_DRAFT
        last = token_ids[-1]
        if last in request.end_token_ids:
            self._requests.finish(request, FinishReason.STOP, stop_token_id=last)
        elif request.num_generated_tokens >= request.submitted.sampling.max_tokens:
            self._requests.finish(request, FinishReason.LENGTH)
        elif request.matcher is not None:
            self._follow(request, request.matcher, token_ids)

    def _observe_features(
        self, sequence: ScheduledSequence, computed: range, path: Sequence[int], features: Any
    ) -> None:
        """Show the proposers what the step has computed of the request's tokens.

        `computed`: the sequence's rows. `path`: of its draft the tokens that were accepted.
        `features`: of all rows of the step.
        """
        num_known = sequence.num_tokens - sequence.num_draft_tokens
        known, drafted = computed[:num_known], computed[num_known:]
        own = features[known.start : known.stop]
        if path:
            own = features[[*known, *(drafted[index] for index in path)]]
        self._speculation.observe_features(sequence.request, sequence.start, own)

    def _keeps(self, request: Request, path: Sequence[int]) -> bool:
        """Whether the entries of these draft tokens could be moved to their positions."""
        try:
            self._runner.keep(request, path)
        except RankLost:
            raise
        except Exception:  # without its draft tokens the request's output is the same
            logger.exception("request %s continues without its draft tokens", request.request_id)
            return False
        return True

    def _num_until_end(self, request: Request, token_ids: Sequence[int]) -> int:
        """The number of these new tokens up to the first that ends the output."""
        for index, token in enumerate(token_ids):
            if token in request.end_token_ids:
                return index + 1
        return len(token_ids)

    def _follow(self, request: Request, matcher: Matcher, token_ids: Sequence[int]) -> None:
        """Advance the request's grammar by its new tokens."""
        try:
            matcher.accept(token_ids)
        except Exception as exc:  # the grammar library's error ends this request alone
            if not isinstance(exc, GrammarFailed):
                logger.exception("the grammar of request %s failed", request.request_id)
            self._requests.fail(request, GrammarFailed())

    def _fail(self, request: Request) -> None:
        logger.exception("request %s cannot be computed", request.request_id)
        self._requests.fail(request, EngineError())


def _is_one_without_draft(sequences: Sequence[ScheduledSequence]) -> bool:
    return len(sequences) == 1 and not sequences[0].num_draft_tokens


def _with_rows(
    sequences: Sequence[ScheduledSequence],
) -> Iterator[tuple[ScheduledSequence, StepRows]]:
    """Each with its rows, adjacent and in their order."""
    kept = computed = range(0)
    for sequence in sequences:
        kept = range(kept.stop, kept.stop + sequence.num_logits_rows)
        computed = range(computed.stop, computed.stop + sequence.num_tokens)
        yield sequence, StepRows(kept, computed)
