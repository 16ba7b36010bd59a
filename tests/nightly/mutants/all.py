"""All mutants, area by area."""

from tests.nightly.mutants import (
    mutants_api,
    mutants_celery,
    mutants_credits,
    mutants_database,
    mutants_dispatch,
    mutants_http,
    mutants_jobs,
    mutants_maintenance,
    mutants_nodes,
    mutants_outbox,
    mutants_page,
    mutants_process,
    mutants_queue,
    mutants_registry,
    mutants_relay,
    mutants_servers,
    mutants_webhooks,
    mutants_worker,
)
from tests.nightly.mutants.operators import Mutant

MUTANTS: list[Mutant] = [
    *mutants_jobs.MUTANTS,
    *mutants_database.MUTANTS,
    *mutants_credits.MUTANTS,
    *mutants_registry.MUTANTS,
    *mutants_outbox.MUTANTS,
    *mutants_queue.MUTANTS,
    *mutants_dispatch.MUTANTS,
    *mutants_maintenance.MUTANTS,
    *mutants_worker.MUTANTS,
    *mutants_nodes.MUTANTS,
    *mutants_celery.MUTANTS,
    *mutants_servers.MUTANTS,
    *mutants_webhooks.MUTANTS,
    *mutants_relay.MUTANTS,
    *mutants_http.MUTANTS,
    *mutants_api.MUTANTS,
    *mutants_page.MUTANTS,
    *mutants_process.MUTANTS,
]
