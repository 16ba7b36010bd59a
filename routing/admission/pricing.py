"""What a job costs, and what is held for it when it is accepted."""

from collections.abc import Iterator
from dataclasses import replace

from routing.admission import constraints
from slotkeeper.jobs.terms import decode_terms
from slotkeeper.jobs.values import NewJob
from slotkeeper.registry.prices import Price
from slotkeeper.registry.snapshot import CatalogSnapshot

MAX_RESERVED = 10**12
"""Micro-credits of one job: a million credits."""
_USUAL_OUTPUT = 1000


def with_cost(job: NewJob, catalog: CatalogSnapshot) -> NewJob:
    """Return a job of a tenant that pays with its highest price and reservation; without, if its model costs nothing.

    Held is what `reserve_s` seconds cost at most, in proportion to an `expected_output` above 1,000.
    """
    rows = list(_rows_of(catalog, job.model))
    price = max((row.per_slot_s for row in rows), default=0)
    if price == 0:
        return job
    size = decode_terms(job.terms).expected_output if job.terms is not None else None
    held = max(row.per_slot_s * row.reserve_s for row in rows) * max(size or 0, _USUAL_OUTPUT) // _USUAL_OUTPUT
    return replace(job, price=price, reserved=min(held, MAX_RESERVED))


def price_at(catalog: CatalogSnapshot, model: str, server: str) -> int | None:
    """Return the price of a second of the server's slots (micro-credits); None: the server is not known."""
    found = catalog.servers.get(server)
    if found is None:
        return None
    fitting = (
        row.per_slot_s for row in _rows_of(catalog, model) if constraints.meets_condition(row.condition, found, model)
    )
    return next(fitting, 0)


def _rows_of(catalog: CatalogSnapshot, model: str) -> Iterator[Price]:
    """Yield the rows that may apply to a model, up to the first that always does."""
    for row in catalog.prices:
        if row.is_for(model):
            yield row
            if not row.condition:
                return
