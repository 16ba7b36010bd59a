"""Presets of inference servers, and probes that find out which kind of server an address has."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from app.api.catalog_changes import validate_endpoint
from app.api.openapi import blueprint, problem_responses
from app.context import dispatcher
from app.schemas.server_schemas import (
    ExchangeView,
    HealthReport,
    OutdatedPreset,
    PresetDetail,
    PresetList,
    PresetPath,
    PresetView,
    ProbeBody,
    ProbeOutcome,
    ProbeView,
)
from routing.admission.submission import check_name
from slotkeeper.errors import InvalidRequest, NotFound
from slotkeeper.registry.identity import Scope
from tasks import server_adapters
from tasks.server_adapters import is_preset_outdated
from tasks.servers import Description, presets
from tasks.servers.probe import ProbedExchange, Recognition, Trial, endpoint_for, recognize
from tasks.servers.session import run_with_http_client

api = blueprint("presets", "Kinds of servers", "/admin", scope=Scope.OPERATE)


@api.get("/presets", responses={200: PresetList})
def list_presets() -> dict[str, Any]:
    """List the kinds of inference servers that come with Slotkeeper: each is a `preset` of a model's configuration."""
    models = dispatcher().catalog.get().models.values()
    outdated = [model for model in models if is_preset_outdated(model.config, model.described_by)]
    return PresetList.build(
        presets=[PresetView.build(presets.info(name), name=name) for name in presets.names()],
        outdated=[OutdatedPreset.build(model) for model in sorted(outdated, key=lambda model: model.name)],
    )


@api.get("/presets/<preset>", responses={200: PresetDetail, **problem_responses(404)})
def get_preset(path: PresetPath) -> dict[str, Any]:
    """Show a kind of server, with its complete description."""
    if path.preset not in presets.names():
        raise NotFound("There is no such preset; GET /admin/presets lists them.", preset=path.preset)
    info = presets.info(path.preset)
    return PresetDetail.build(info, name=path.preset, description=presets.get(path.preset))


@api.post("/servers/probe", responses={200: ProbeView, **problem_responses(400, 413, 415, 422)})
def probe_server(body: ProbeBody) -> dict[str, Any]:
    """Find out which kind of server an address has, and run a job on it if one is given.  Registers nothing.

    The job really runs on the server, in addition to the jobs of the dispatcher.  The result lists each request to the
    server, its response, and the rule that judged it.  If the server does not support the requests of the most likely
    preset, the next preset is tried.
    """
    validate_endpoint(body.url, "url")
    if body.model is not None:
        check_name(body.model)
    if body.preset is not None and body.preset not in presets.names():
        raise InvalidRequest("preset", f"there is no such preset; there is: {', '.join(presets.names())}")
    recognition = run_with_http_client(partial(recognize, body.url))
    if not recognition.is_there:
        return _probe_view(recognition, body.preset, None)
    exchanges: list[ProbedExchange] = []
    for preset in [body.preset] if body.preset is not None else recognition.presets:
        view = _try_preset(recognition, preset, body, exchanges)
        if view["outcome"] is None or view["outcome"]["code"] != "misconfigured":
            break  # Otherwise the server does not support the preset's requests, and has run nothing.
    return view


def _try_preset(
    recognition: Recognition, preset: str, body: ProbeBody, exchanges: list[ProbedExchange]
) -> dict[str, Any]:
    """Try a preset, and return the view of the probe.

    exchanges: those of the presets tried before; the exchanges of this preset are appended.
    """
    endpoint = endpoint_for(body.url, preset, recognition.model)
    secret = partial(server_adapters.secret_for, body.model) if body.model is not None else None
    trial = Trial(endpoint, Description.model_validate(presets.get(preset)), secret)
    health = run_with_http_client(trial.health)
    outcome_view = None
    if body.payload is not None:
        outcome = run_with_http_client(partial(trial.run, payload=body.payload, patience_s=body.patience))
        result = None if outcome.result is None else trial.redacted(outcome.result)
        outcome_view = ProbeOutcome.build(outcome, result=result)
    exchanges += trial.exchanges
    health_view = HealthReport.build(health)
    return _probe_view(recognition, preset, endpoint, exchanges, health=health_view, outcome=outcome_view)


def _probe_view(
    recognition: Recognition,
    preset: str | None,
    endpoint: str | None,
    exchanges: Sequence[ProbedExchange] = (),
    health: dict[str, Any] | None = None,
    outcome: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the view of a probe.  `exchanges`: those after the recognition."""
    return ProbeView.build(
        recognition,
        preset=preset,
        endpoint=endpoint,
        health=health,
        outcome=outcome,
        exchanges=[ExchangeView.build(exchange) for exchange in (*recognition.exchanges, *exchanges)],
    )
