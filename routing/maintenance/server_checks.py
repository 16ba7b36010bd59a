"""Apply servers' reports: cooldowns, stale leases, slots that others use."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain

from routing.dispatch.dispatcher import Dispatcher
from routing.maintenance import quarantined_slots, server_report
from routing.maintenance.pass_state import ReportState
from routing.maintenance.reaper import end_unknown_run
from routing.maintenance.server_report import ExpectedRun, ServerReport
from routing.queue.fleets import isolate_errors
from slotkeeper.clock import clock, now_ms
from slotkeeper.jobs import quarantine
from slotkeeper.jobs.quarantine import QuarantinedSlot
from slotkeeper.jobs.states import State
from slotkeeper.jobs.values import Job
from slotkeeper.registry.values import Server
from slotkeeper.urls import Location, parse_location

# For so long after its end a job may still be in a server's report.
_JUST_ENDED_MS = 2_000
# For so long a server may take to answer a question about a run.
_ANSWERED_WITHIN_MS = 30_000
_ATTEMPT = re.compile(r"[-.]\d+$")  # the attempt in some servers' names for our jobs

Run = tuple[str, int]
"""Job and attempt."""


class ServerChecks:
    """Compares servers' reports with leases and the database, and applies what they show."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.state = ReportState()

    def apply_health(self, reports: Mapping[str, ServerReport]) -> None:
        """Begin the cooldown of servers that are down, and end that of servers that are well again.

        Also note which servers are silent.
        """
        slots, found = self._dispatcher.slots, self._by_fleet(reports)
        troubled = slots.list_troubled(list(found))
        known = [(server, report) for fleet in troubled for server, report in found[fleet]]
        slots.cool_down_all(
            {(server.fleet, server.name): report.why_down for server, report in known if report.up is False}
        )
        slots.note_silence(
            {
                (server.fleet, server.name): report.is_silent
                for server, report in known
                if report.is_silent or server.name in troubled[server.fleet].silent
            }
        )
        self._end_cooldowns(
            [server for server, report in known if report.up and server.name in troubled[server.fleet].failing]
        )

    def servers_to_check_now(self) -> set[str]:
        """Return servers to ask now.

        These are down, busy or silent, have quarantined slots, or have leases that are not renewed.
        """
        dispatcher, catalog = self._dispatcher, self._dispatcher.catalog.get()
        found = quarantined_slots.servers_to_ask(dispatcher)
        for troubled in dispatcher.slots.list_troubled(catalog.fleets()).values():
            found |= troubled.cooling | troubled.failing | troubled.silent
        found |= {server for server, _ in self._unrenewed_leases(catalog.fleets())}
        return found & catalog.servers.keys()

    def apply_reports(self, reports: Mapping[str, ServerReport], *, may_reap: bool = True) -> int:
        """Compare the leases with the servers' reports, and return how many leases were freed.

        A stale lease is freed at once only if its worker is silent too: a living worker finds out itself, and may be
        receiving the answer.  may_reap: False while living workers could not renew.
        """
        dispatcher, freed, found = self._dispatcher, 0, self._by_fleet(reports)
        running, quarantined = self._running_by_server(), quarantine.list_by_server(dispatcher.store.database)
        by_location = _by_location(running)
        silent = self._unrenewed_leases(list(found)) if may_reap else set()
        idle: list[Server] = []
        for fleet, troubled in dispatcher.slots.list_troubled(list(found)).items():
            for server, report in found[fleet]:
                with isolate_errors("apply_report", server=server.name):
                    jobs = _sent_there(running[server.name], server, report)
                    rows = quarantined[server.name]
                    freed += quarantined_slots.apply_report(dispatcher, self.state, server, report, rows, jobs)
                    stale = self._stale_runs(server.name, jobs, report)
                    freed += sum(end_unknown_run(dispatcher, job) for job in stale if (server.name, job.id) in silent)
                    ours = [*jobs, *_runs_of_aliases(by_location, server, report)]
                    if foreign := self._count_foreign_runs(server, report, ours, rows):
                        dispatcher.slots.mark_used_by_others(fleet, server.name, foreign)
                    elif (report.shows_runs or report.is_idle) and server.name in troubled.cooling:
                        idle.append(server)
        self._end_cooldowns(idle)  # No one else uses these: slots that were busy can be tried again.
        return freed

    def find_stale_runs(self, reports: Mapping[str, ServerReport]) -> list[Job]:
        """Return running jobs that their server does not have.  This proves nothing: the answer may be on its way."""
        running = self._running_by_server()
        return [
            job
            for server, report in self._registered(reports)
            for job in self._stale_runs(server.name, _sent_there(running[server.name], server, report), report)
        ]

    def end_stale_runs(self, before: Sequence[Job], reports: Mapping[str, ServerReport]) -> int:
        """End runs that were stale `before` and still are; return how many."""
        suspected = {_run(job) for job in before}
        stale = self.find_stale_runs(reports)
        return sum(end_unknown_run(self._dispatcher, job) for job in stale if _run(job) in suspected)

    def note_running(self, row: QuarantinedSlot) -> None:
        """Note that a server has confirmed that the run of a quarantined slot continues."""
        now, confirmed = clock.steady_ms(), self.state.confirmed_running
        for run, confirmed_ms in list(confirmed.items()):  # A copy: several threads ask servers.
            if now - confirmed_ms > _ANSWERED_WITHIN_MS:
                confirmed.pop(run, None)
        confirmed[row.job_id, row.attempt] = now

    # -- parts -----------------------------------------------------------------------------------------------

    def _end_cooldowns(self, servers: Sequence[Server]) -> None:
        dispatcher = self._dispatcher
        dispatcher.slots.end_cooldowns([(server.fleet, server.name) for server in servers])
        for fleet in {server.fleet for server in servers}:
            with isolate_errors("end_cooldowns", fleet=fleet):
                dispatcher.publish_offers(dispatcher.queues.offer_all(fleet))

    def _unrenewed_leases(self, fleets: Sequence[str]) -> set[tuple[str, str]]:
        """Return (server, job) of leases that have missed renewals."""
        silent_ms = 2 * self._dispatcher.settings.renew_every_ms
        return {
            (lease.server, lease.job_id)
            for leases in self._dispatcher.leases.list_all(fleets).values()
            for lease, silence_ms in leases
            if lease.owner and silence_ms > silent_ms
        }

    def _stale_runs(self, server: str, jobs: Sequence[Job], report: ServerReport) -> list[Job]:
        """Return runs that their server does not have, and that it cannot just have ended."""
        missing = set(server_report.compare_runs(_expected_runs(jobs, report), report).stale)
        now, since = clock.steady_ms(), self.state.unlisted.get(server, {})
        unlisted = {
            _run(job): since.get(_run(job), now) for job in jobs if job.id in missing and job.remote_id is not None
        }
        self.state.unlisted[server] = unlisted
        return [
            job for job in jobs if job.id in missing and now - unlisted.get(_run(job), 0) >= self._answer_takes_ms(job)
        ]

    def _answer_takes_ms(self, job: Job) -> int:
        """Return how long a worker takes to ask for a run by its id and to get the answer; 0 for a run without one.

        The server may have ended such a run just now, and still has its result.
        """
        if job.remote_id is None:
            return 0
        poll_interval_s = self._dispatcher.catalog.resolve(job.model).config.poll_interval
        return round(2000 * poll_interval_s) + _ANSWERED_WITHIN_MS

    def _count_foreign_runs(
        self, server: Server, report: ServerReport, jobs: Sequence[Job], rows: Sequence[QuarantinedSlot]
    ) -> int:
        """Return how many of the server's slots others use, at most all.

        jobs: that run there.  A job that had just ended when the server was asked, or has ended since,
        is not the work of others.
        """
        expected = [*_expected_runs(jobs, report), *quarantined_slots.expected_runs(rows, report)]
        compared = server_report.compare_runs(expected, report)
        settled_before = server_report.report_time_ms(report, now_ms()) - _JUST_ENDED_MS
        store, foreign = self._dispatcher.store, compared.unaccounted - len(compared.unknown_runs)
        for job_id in compared.unknown_runs:
            if foreign >= server.slots:
                return server.slots
            job = store.get(job_id) or store.get(_ATTEMPT.sub("", job_id))
            if job is None or not (_has_slot(job) or (job.finished_ms or 0) >= settled_before):
                foreign += 1
        return foreign

    def _registered(self, reports: Mapping[str, ServerReport]) -> list[tuple[Server, ServerReport]]:
        servers = self._dispatcher.catalog.get().servers
        return [(servers[name], report) for name, report in reports.items() if name in servers]

    def _by_fleet(self, reports: Mapping[str, ServerReport]) -> dict[str, list[tuple[Server, ServerReport]]]:
        found: dict[str, list[tuple[Server, ServerReport]]] = defaultdict(list)
        for server, report in self._registered(reports):
            found[server.fleet].append((server, report))
        return found

    def _running_by_server(self) -> defaultdict[str, list[Job]]:
        found = defaultdict[str, list[Job]](list)
        for job in self._dispatcher.store.list_running():
            found[job.server or ""].append(job)
        return found


def _run(job: Job) -> Run:
    return job.id, job.attempt


def _sent_there(jobs: Sequence[Job], server: Server, report: ServerReport) -> list[Job]:
    """Return runs of this server that were sent to the address that made the report: it knows of no other."""
    asked = {model: parse_location(url) for model, url in (report.endpoints or server.endpoints).items()}
    return [job for job in jobs if job.sent_to is None or parse_location(job.sent_to) == asked.get(job.model)]


def _by_location(running: Mapping[str, list[Job]]) -> defaultdict[Location, list[Job]]:
    """Return running jobs by the address to which they were sent."""
    found = defaultdict[Location, list[Job]](list)
    for job in chain.from_iterable(running.values()):
        if job.sent_to is not None:
            found[parse_location(job.sent_to)].append(job)
    return found


def _runs_of_aliases(by_location: Mapping[Location, list[Job]], server: Server, report: ServerReport) -> list[Job]:
    """Return runs of servers that are registered at the same address under another name."""
    asked = {parse_location(url) for url in (report.endpoints or server.endpoints).values()}
    return [job for location in asked for job in by_location.get(location, ()) if job.server != server.name]


def _expected_runs(jobs: Sequence[Job], report: ServerReport) -> list[ExpectedRun]:
    """Return runs with their age when the server was asked: it does not know jobs that it got later."""
    now = server_report.report_time_ms(report, now_ms())
    return [
        ExpectedRun(
            job.id,
            server_report.run_names(job.id, job.attempt, job.remote_id),
            # A run whose request is not sent yet, as an earlier one may be there, cannot be missing.
            0 if job.awaits_earlier_request else now - (job.requested_ms or now),
        )
        for job in jobs
    ]


def _has_slot(job: Job) -> bool:
    """Return whether a job runs, or waits to be resumed where its server may still run it."""
    return job.state is State.RUNNING or (job.state is State.QUEUED and job.server is not None)
