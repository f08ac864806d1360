"""The folders of jobs on this server: data, checkpoints and result, for the server's user alone."""

from __future__ import annotations

import shutil
from pathlib import Path


class WorkFolder:
    """The folder of one job."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.training_file = path / "training.jsonl"
        self.validation_file = path / "validation.jsonl"
        self.checkpoints = path / "checkpoints"
        self.incoming = path / "incoming"
        """A checkpoint that comes from the store."""
        self.outgoing = path / "outgoing"
        """A checkpoint that goes there."""
        self.result = path / "result"
        self.config_file = self.result / "adapter_config.json"
        self.weights_file = self.result / "adapter_model.safetensors"

    @property
    def has_result(self) -> bool:
        return self.config_file.exists() and self.weights_file.exists()

    def make(self) -> None:
        for folder in (self.path, self.checkpoints, self.result):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)


class WorkFolders:
    """By job id, which is the server's own and so safe in a path."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory

    def of(self, job_id: str) -> WorkFolder:
        return WorkFolder(self._directory / job_id)

    def list_jobs(self) -> set[str]:
        """The ids of the jobs with a folder."""
        return {folder.name for folder in self._directory.iterdir()}

    def remove(self, job_id: str) -> None:
        shutil.rmtree(self._directory / job_id, ignore_errors=True)
