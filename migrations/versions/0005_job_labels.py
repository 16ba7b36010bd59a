"""A row for each label of a job: lists of jobs with a label read these rows.

Triggers keep the rows: so the jobs of the release before, whose processes go on, have them as well.

Revision: 0005, after: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None
drops = ("job_labels",)  # by its downgrade; the labels themselves stay in jobs.labels

# `jobs.labels` is "\na=1\nb=2\n".  SQLite splits a text only as JSON; of the characters that JSON escapes, a label may
# have these two.
_SQLITE_PARTS = (
    "json_each('[\"' || replace(replace(replace(trim({labels}, char(10)), '\\', '\\\\'), '\"', '\\\"'), "
    "char(10), '\",\"') || '\"]')"
)
_SQLITE_TRIGGERS = (
    "CREATE TRIGGER labels_are_added AFTER INSERT ON jobs WHEN NEW.labels <> '' BEGIN "
    "INSERT INTO job_labels (label, seq, tenant) "
    f"SELECT value, NEW.seq, NEW.tenant FROM {_SQLITE_PARTS.format(labels='NEW.labels')}; END",
    "CREATE TRIGGER labels_are_removed AFTER DELETE ON jobs WHEN OLD.labels <> '' BEGIN "
    "DELETE FROM job_labels WHERE seq = OLD.seq "
    f"AND label IN (SELECT value FROM {_SQLITE_PARTS.format(labels='OLD.labels')}); END",
)
_SQLITE_FILL = (
    "INSERT INTO job_labels (label, seq, tenant) "
    f"SELECT value, seq, tenant FROM jobs, {_SQLITE_PARTS.format(labels='labels')} WHERE labels <> ''"
)

_POSTGRESQL_PARTS = "string_to_array(btrim({labels}, chr(10)), chr(10))"
_POSTGRESQL_TRIGGERS = (
    f"""
CREATE FUNCTION slotkeeper_keep_labels() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO job_labels (label, seq, tenant)
        SELECT label, NEW.seq, NEW.tenant FROM unnest({_POSTGRESQL_PARTS.format(labels="NEW.labels")}) AS label;
    ELSE
        DELETE FROM job_labels WHERE seq = OLD.seq AND label = ANY({_POSTGRESQL_PARTS.format(labels="OLD.labels")});
    END IF;
    RETURN NULL;
END $$
""",
    "CREATE TRIGGER slotkeeper_added_labels AFTER INSERT ON jobs FOR EACH ROW WHEN (NEW.labels <> '') "
    "EXECUTE FUNCTION slotkeeper_keep_labels()",
    "CREATE TRIGGER slotkeeper_removed_labels AFTER DELETE ON jobs FOR EACH ROW WHEN (OLD.labels <> '') "
    "EXECUTE FUNCTION slotkeeper_keep_labels()",
)
_POSTGRESQL_FILL = (
    "INSERT INTO job_labels (label, seq, tenant) SELECT label, seq, tenant "
    f"FROM jobs, unnest({_POSTGRESQL_PARTS.format(labels='labels')}) AS label WHERE labels <> ''"
)
# Jobs that were accepted during the fill.  No submit lasts so long that this many others are accepted meanwhile.
_POSTGRESQL_LATEST = f"{_POSTGRESQL_FILL} AND seq > (SELECT max(seq) - 100000 FROM jobs) ON CONFLICT DO NOTHING"


def upgrade() -> None:
    op.create_table(
        "job_labels",
        sa.Column("label", sa.Text, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("label", "seq", name=op.f("pk_job_labels")),
        sqlite_with_rowid=False,
    )
    if op.get_bind().dialect.name == "sqlite":
        op.execute(_SQLITE_FILL)
        for statement in _SQLITE_TRIGGERS:
            op.execute(statement)
    else:
        # The fill blocks no writer, however long it takes.  CREATE TRIGGER waits for writers, and blocks them until the
        # commit.
        timeout = op.get_bind().exec_driver_sql("SHOW statement_timeout").scalar()
        op.execute("SET LOCAL statement_timeout = 0")
        op.execute(_POSTGRESQL_FILL)
        for statement in _POSTGRESQL_TRIGGERS:
            op.execute(statement)
        op.execute(_POSTGRESQL_LATEST)
    op.create_index("ix_job_labels_tenant_label_seq", "job_labels", ["tenant", "label", "seq"])
    if op.get_bind().dialect.name == "postgresql":
        op.execute(f"SET LOCAL statement_timeout = '{timeout}'")  # for the steps after this one


def downgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        op.execute("DROP TRIGGER labels_are_added")
        op.execute("DROP TRIGGER labels_are_removed")
    else:
        op.execute("DROP TRIGGER slotkeeper_added_labels ON jobs")
        op.execute("DROP TRIGGER slotkeeper_removed_labels ON jobs")
        op.execute("DROP FUNCTION slotkeeper_keep_labels()")
    op.drop_table("job_labels")
