"""The servers' own reports, held against the leases and the record."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain

from routing.dispatch.dispatcher import Dispatcher
from routing.maintenance import quarantined_slots, server_report
from routing.maintenance.pass_state import seen_by
from routing.maintenance.reaper import end_unknown_run
from routing.maintenance.server_report import ExpectedRun, ServerReport
from routing.queue.fleets import isolate_errors
from slotkeeper.clock import now_ms
from slotkeeper.jobs.states import State
from slotkeeper.jobs.values import Job
from slotkeeper.registry.values import Server
from slotkeeper.urls import Location, parse_location

# How long after its end a job may still stand in a server's report.
_JUST_ENDED_MS = 2_000
# How long a server may take to answer a question about a run.
_ANSWERED_WITHIN_MS = 30_000
_ATTEMPT = re.compile(r"[-.]\d+$")  # that some servers know a job of ours by


def apply_health(dispatcher: Dispatcher, reports: Mapping[str, ServerReport]) -> None:
    """Begin the cooldown of servers that are down, and end that of servers that are well again."""
    found = _by_fleet(dispatcher, reports)
    troubled = dispatcher.slots.list_troubled(list(found))
    known = [(server, report.up) for fleet in troubled for server, report in found[fleet]]
    dispatcher.slots.cool_down_all([(server.fleet, server.name) for server, up in known if not up])
    _end_cooldowns(dispatcher, [server for server, up in known if up and server.name in troubled[server.fleet].failing])


def _end_cooldowns(dispatcher: Dispatcher, servers: Sequence[Server]) -> None:
    dispatcher.slots.end_cooldowns([(server.fleet, server.name) for server in servers])
    for fleet in {server.fleet for server in servers}:
        with isolate_errors("end_cooldowns", fleet=fleet):
            dispatcher.publish_offers(dispatcher.queues.offer_all(fleet))


def servers_to_check_now(dispatcher: Dispatcher) -> set[str]:
    """Servers that should be asked now: those that were down or busy, and those of leases gone silent."""
    catalog, found = dispatcher.catalog.get(), quarantined_slots.servers(dispatcher)
    silent_ms = 2 * dispatcher.settings.renew_every_ms
    for trouble in dispatcher.slots.list_troubled(catalog.fleets()).values():
        found |= trouble.cooling | trouble.failing
    for leases in dispatcher.leases.list_all(catalog.fleets()).values():
        found |= {lease.server for lease, silent in leases if lease.owner and silent > silent_ms}
    return found & catalog.servers.keys()


def apply_reports(dispatcher: Dispatcher, reports: Mapping[str, ServerReport], *, may_reap: bool = True) -> int:
    """Hold the leases against the servers' reports; answers how many were freed.

    A stale lease is freed at once only if its worker has been silent too: a living worker finds out by itself, and
    its answer may be on the way just now.  `silence_proves`: False while living workers could not renew.
    """
    freed, found = 0, _by_fleet(dispatcher, reports)
    running, withheld = _by_server(dispatcher), quarantined_slots.by_server(dispatcher)
    at_place = _by_place(running)
    silent = _silent(dispatcher, list(found)) if may_reap else set()
    idle: list[Server] = []
    for fleet, trouble in dispatcher.slots.list_troubled(list(found)).items():
        for server, report in found[fleet]:
            with isolate_errors("heed_report", server=server.name):
                jobs, lingering = _sent_there(running[server.name], server, report), withheld[server.name]
                freed += quarantined_slots.apply_report(dispatcher, server, report, lingering, jobs)
                stale = _stale_leases(dispatcher, server.name, jobs, report)
                freed += sum(end_unknown_run(dispatcher, job) for job in stale if (server.name, job.id) in silent)
                known = [*jobs, *_runs_of_aliases(at_place, server, report)]
                compared = server_report.compare_runs(
                    [*_views(known, report), *quarantined_slots.expected_runs(lingering, report)], report
                )
                if foreign := _foreign_runs(dispatcher, server, compared, report):
                    dispatcher.slots.mark_used_by_others(fleet, server.name, foreign)
                elif (report.shows_runs or report.is_idle) and server.name in trouble.cooling:
                    idle.append(server)
    _end_cooldowns(dispatcher, idle)  # Nobody else uses these: slots in cooldown because they were busy can be tried.
    return freed


def _silent(dispatcher: Dispatcher, fleets: Sequence[str]) -> set[tuple[str, str]]:
    """(server, job) of leases that have missed renewals."""
    silent_ms = 2 * dispatcher.settings.renew_every_ms
    return {
        (lease.server, lease.job_id)
        for leases in dispatcher.leases.list_all(fleets).values()
        for lease, silent in leases
        if lease.owner and silent > silent_ms
    }


def find_stale_runs(dispatcher: Dispatcher, reports: Mapping[str, ServerReport]) -> list[Job]:
    """Running jobs that their server does not know.  No proof: the answer may be on its way to the worker."""
    found: list[Job] = []
    running = _by_server(dispatcher)
    for server, report in _known(dispatcher, reports):
        jobs = _sent_there(running[server.name], server, report)
        found += _stale_leases(dispatcher, server.name, jobs, report)
    return found


def _sent_there(jobs: Sequence[Job], server: Server, report: ServerReport) -> list[Job]:
    """Runs of this server that were sent to the address that made the report: it knows of no other."""
    asked = {model: parse_location(url) for model, url in (report.endpoints or server.endpoints).items()}
    return [job for job in jobs if job.sent_to is None or parse_location(job.sent_to) == asked.get(job.model)]


def _by_place(running: Mapping[str, list[Job]]) -> defaultdict[Location, list[Job]]:
    """Running jobs by the address to which they were sent."""
    found = defaultdict[Location, list[Job]](list)
    for job in chain.from_iterable(running.values()):
        if job.sent_to is not None:
            found[parse_location(job.sent_to)].append(job)
    return found


def _runs_of_aliases(at_place: Mapping[Location, list[Job]], server: Server, report: ServerReport) -> list[Job]:
    """Runs of servers that are registered at the same address under another name."""
    asked = {parse_location(url) for url in (report.endpoints or server.endpoints).values()}
    return [job for place in asked for job in at_place.get(place, ()) if job.server != server.name]


def end_stale_runs(dispatcher: Dispatcher, before: Sequence[Job], reports: Mapping[str, ServerReport]) -> int:
    """Free the leases of runs that were suspects `before` and still are; answers how many."""
    known = {_run(job) for job in before}
    return sum(end_unknown_run(dispatcher, job) for job in find_stale_runs(dispatcher, reports) if _run(job) in known)


def _stale_leases(dispatcher: Dispatcher, server: str, jobs: Sequence[Job], report: ServerReport) -> list[Job]:
    """Runs that their server does not know."""
    missing = set(server_report.compare_runs(_views(jobs, report), report).stale)
    now, since = now_ms(), seen_by(dispatcher).unlisted.get(server, {})
    unlisted = {_run(job): since.get(_run(job), now) for job in jobs if job.id in missing and job.remote_id is not None}
    seen_by(dispatcher).unlisted[server] = unlisted
    return [
        job
        for job in jobs
        if job.id in missing and now - unlisted.get(_run(job), 0) >= _asked_within_ms(dispatcher, job)
    ]


def _run(job: Job) -> tuple[str, int]:
    return job.id, job.attempt


def _asked_within_ms(dispatcher: Dispatcher, job: Job) -> int:
    """Of a run that has an id at its server, which may just have ended it: how long whoever watches the run, or the
    next worker that does, takes to ask by that id and to be told the result, or that it is unknown."""
    if job.remote_id is None:
        return 0
    return round(2000 * dispatcher.catalog.resolve(job.model).config.poll_interval) + _ANSWERED_WITHIN_MS


def _known(dispatcher: Dispatcher, reports: Mapping[str, ServerReport]) -> list[tuple[Server, ServerReport]]:
    servers = dispatcher.catalog.get().servers
    return [(servers[name], report) for name, report in reports.items() if name in servers]


def _by_fleet(
    dispatcher: Dispatcher, reports: Mapping[str, ServerReport]
) -> dict[str, list[tuple[Server, ServerReport]]]:
    found: dict[str, list[tuple[Server, ServerReport]]] = defaultdict(list)
    for server, report in _known(dispatcher, reports):
        found[server.fleet].append((server, report))
    return found


def _by_server(dispatcher: Dispatcher) -> defaultdict[str, list[Job]]:
    """All running jobs, by the server that runs them."""
    found = defaultdict[str, list[Job]](list)
    for job in dispatcher.store.list_running():
        found[job.server or ""].append(job)
    return found


def _views(jobs: Sequence[Job], report: ServerReport) -> list[ExpectedRun]:
    """The leases as old as they were when the server was asked: what it was given since it cannot know."""
    now = server_report.report_time_ms(report, now_ms())
    return [
        ExpectedRun(
            job.id,
            server_report.run_names(job.id, job.attempt, job.remote_id),
            now - (job.started_ms or now),
        )
        for job in jobs
    ]


def _foreign_runs(dispatcher: Dispatcher, server: Server, found: server_report.Comparison, report: ServerReport) -> int:
    """How many of the server's slots others use, of which it has no more than its slots, whatever it reports.  A job
    of ours that had only just ended when it was asked, or has ended since, is none of them."""
    settled_before = server_report.report_time_ms(report, now_ms()) - _JUST_ENDED_MS
    foreign = found.unaccounted - len(found.unknown_runs)
    for job_id in found.unknown_runs:
        if foreign >= server.slots:
            return server.slots
        job = dispatcher.store.get(job_id) or dispatcher.store.get(_ATTEMPT.sub("", job_id))
        if job is None or not (_has_slot(job) or (job.finished_ms or 0) >= settled_before):
            foreign += 1
    return foreign


def _has_slot(job: Job) -> bool:
    """One that runs, or is offered again where its server is at it."""
    return job.state is State.RUNNING or (job.state is State.QUEUED and job.server is not None)
