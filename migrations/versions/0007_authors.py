"""Who did something in the histories of adapters, whoever it was: keys, users and operators."""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

AUTHORS: Mapping[str, str] = {
    "adapter_versions": "created_by",
    "uploads": "created_by",
    "adapter_wishes": "created_by",
    "adapter_alias_changes": "changed_by",
}
KEY = "key:"


def upgrade() -> None:
    """Go forward: what has an author is a key's."""
    for name, column in AUTHORS.items():
        with op.batch_alter_table(name) as table:
            table.drop_constraint(f"fk_{name}_tenant_id_api_keys", type_="foreignkey")
            table.alter_column(column, existing_type=sa.String(12), type_=sa.String(300))
        author = sa.column(column, sa.String())
        rows = sa.table(name, author)
        op.execute(
            rows.update()
            .where(author.is_not(None))
            .values({column: sa.literal(KEY, sa.String()) + author})
        )


def downgrade() -> None:
    """Go back. Authors that are no keys are lost."""
    keys = sa.table("api_keys", sa.column("id"))
    for name, column in AUTHORS.items():
        author = sa.column(column, sa.String())
        rows = sa.table(name, author)
        key_id = sa.func.substr(author, len(KEY) + 1)
        is_key = author.startswith(KEY) & key_id.in_(sa.select(keys.c.id))
        op.execute(rows.update().values({column: sa.case((is_key, key_id), else_=None)}))
        with op.batch_alter_table(name) as table:
            table.alter_column(column, existing_type=sa.String(300), type_=sa.String(12))
            table.create_foreign_key(
                f"fk_{name}_tenant_id_api_keys",
                "api_keys",
                ["tenant_id", column],
                ["tenant_id", "id"],
            )
