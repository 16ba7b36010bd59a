"""${message}

A migration is written for the release still running: while it runs, and for as long as the deployment
takes, processes of the release before read and write these tables.  So: new columns are nullable or have a
server default, nothing is renamed, and what is dropped has been unused for one whole release.  Large tables
are filled in batches by a maintenance task, not here; on PostgreSQL an index on one is built CONCURRENTLY
(op.get_context().autocommit_block()).

A downgrade leads back to what the release before needs: `slotkeeper migrate --to`, which prints `drops` before it asks.
Drop a column by op.drop_column: on SQLite a batch copies the table, and loses its indexes of expressions.

Revision: ${up_revision}, after: ${down_revision | comma,n}
"""

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}
drops = ()  # by its downgrade, with their content: "table", "table.column"


def upgrade() -> None:
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    ${downgrades if downgrades else "pass"}
