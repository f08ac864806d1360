"""Response schemas of the servers that share a database."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from ..contract.answer_model import AnswerModel


@dataclass(frozen=True, slots=True)
class ServerView(AnswerModel):
    """One server that uses or used this database."""

    id: str
    """Unchanged by a restart."""
    name: str
    """Name of its host."""
    version: str
    base_id: str
    """The base model that it serves."""
    started_at: datetime
    seen_at: datetime
    is_live: bool
    """Seen within the last minute."""
