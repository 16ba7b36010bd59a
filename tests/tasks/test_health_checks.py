"""Which servers maintenance asks for their health: a request may cost money, where a server sleeps without them."""

from routing.dispatch.dispatcher import ActiveRun
from routing.dispatch.outcome import Outcome, OutcomeKind
from tasks import health_checks
from tests.support.api import Api
from tests.support.ends import decided, end_in_order


def _asked(api: Api) -> list[str]:
    servers = api.dispatcher.catalog.refresh().servers.values()
    return [server.name for server in health_checks._servers_to_ask(servers)]


def _end(api: Api, run: ActiveRun, outcome: Outcome) -> None:
    end_in_order(api.dispatcher, run, decided(api.dispatcher, run, outcome))


def test_a_server_that_is_used_by_requests_alone_is_asked_only_while_a_job_runs_there(api: Api) -> None:
    api.model(preset="kserve-v1", description={"health": {"only_when_used": True}})
    api.register()
    assert _asked(api) == []
    run = api.started()
    assert _asked(api) == ["gpu1"]
    _end(api, run, Outcome(OutcomeKind.DONE))
    assert _asked(api) == []


def test_a_stopped_server_is_asked_only_while_a_job_runs_there(api: Api) -> None:
    api.register()
    assert _asked(api) == ["gpu1"]
    run = api.started()
    assert api.client.patch("/admin/servers/gpu1", json={"state": "paused"}).status_code == 200
    assert _asked(api) == ["gpu1"]
    _end(api, run, Outcome(OutcomeKind.DONE))
    assert _asked(api) == []


def test_a_server_that_may_still_run_what_has_ended_here_is_asked(api: Api) -> None:
    api.model(preset="kserve-v1", description={"health": {"only_when_used": True}})
    api.register()
    _end(api, api.started(), Outcome(OutcomeKind.CANCELED, server_still_running=True))
    assert _asked(api) == ["gpu1"]
