"""The end of a job without a result."""

from __future__ import annotations


class JobFailed(Exception):
    """The job cannot succeed, however often it is repeated."""

    def __init__(self, code: str, message: str, *, param: str | None = None) -> None:
        """`code`: one of `TUNING_CODES`, or of a refused adapter. `param`: the job's field that is
        wrong."""
        super().__init__(message)
        self.code = code
        self.param = param
