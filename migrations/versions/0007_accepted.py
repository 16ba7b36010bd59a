"""How many jobs were accepted, counted apart from the jobs (PostgreSQL; on SQLite their numbers tell).

Revision: 0007, after: 0006

A trigger counts, so that what the release before accepts beside this one is counted, too.  It is made before the jobs
that are there are counted, and holds up whoever writes jobs for as long as that takes: seconds for millions.
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

# Each statement adds a part of its own: no row that another submit would have to wait for.
_FUNCTION = """
CREATE FUNCTION slotkeeper_count_accepted() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO accepted (jobs) SELECT count(*) FROM added HAVING count(*) > 0;
    RETURN NULL;
END $$
"""
_TRIGGER = """
CREATE TRIGGER slotkeeper_accepted AFTER INSERT ON jobs
REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION slotkeeper_count_accepted()
"""
_SO_FAR = """
INSERT INTO accepted (jobs)
SELECT (SELECT count(*) FROM jobs) + (SELECT coalesce(sum(value), 0) FROM counters WHERE starts_with(name, 'purged.'))
"""


def upgrade() -> None:
    op.create_table("accepted", sa.Column("jobs", sa.BigInteger, nullable=False))
    if op.get_bind().dialect.name == "postgresql":
        for statement in (_FUNCTION, _TRIGGER, _SO_FAR):
            op.execute(statement)


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP TRIGGER slotkeeper_accepted ON jobs")
        op.execute("DROP FUNCTION slotkeeper_count_accepted()")
    op.drop_table("accepted")
