"""What a tenant may use: its limits, and who asks before it takes something."""

from __future__ import annotations

from .resources import (
    Resource,
    check_room,
    check_room_for_content,
    check_room_for_upload,
    check_room_for_version,
    count,
)

__all__ = [
    "Resource",
    "check_room",
    "check_room_for_content",
    "check_room_for_upload",
    "check_room_for_version",
    "count",
]
