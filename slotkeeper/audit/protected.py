"""Acts stay as they are: the database itself lets go only of what has come of age by retention's own mark.

Loaded beside the tables, so that whoever creates them creates these triggers; migrations make them on disk.
"""

from sqlalchemy import DDL
from sqlalchemy.event import listen

from slotkeeper.jobs.tables import events

_OF_AGE = "OLD.at_ms < coalesce((SELECT value FROM counters WHERE name = 'events.of_age_ms'), 0)"
_KEEP_ACTS = {
    "sqlite": (
        "CREATE TRIGGER acts_are_not_changed BEFORE UPDATE ON events WHEN OLD.actor IS NOT NULL "
        "BEGIN SELECT RAISE(ABORT, 'acts are not changed'); END",
        f"CREATE TRIGGER acts_are_not_removed BEFORE DELETE ON events WHEN OLD.actor IS NOT NULL AND NOT ({_OF_AGE}) "
        "BEGIN SELECT RAISE(ABORT, 'acts are not removed before their time'); END",
    ),
    "postgresql": (
        f"""
CREATE FUNCTION slotkeeper_keep_acts() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        IF {_OF_AGE} THEN RETURN OLD; END IF;
    END IF;
    RAISE EXCEPTION 'acts are not changed, nor removed before their time' USING ERRCODE = 'restrict_violation';
END $$
""",
        "CREATE TRIGGER slotkeeper_acts BEFORE UPDATE OR DELETE ON events FOR EACH ROW WHEN (OLD.actor IS NOT NULL) "
        "EXECUTE FUNCTION slotkeeper_keep_acts()",
        "CREATE TRIGGER slotkeeper_all_acts BEFORE TRUNCATE ON events FOR EACH STATEMENT "
        "EXECUTE FUNCTION slotkeeper_keep_acts()",
    ),
}
for _dialect, _statements in _KEEP_ACTS.items():
    for _statement in _statements:
        listen(events, "after_create", DDL(_statement).execute_if(dialect=_dialect))
