"""Kinds of inference servers that are known by name, and what answers at an address."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from app.addresses import validate_endpoint
from app.api.catalog_changes import admin_blueprint
from app.api.openapi import problem_responses
from app.context import dispatcher
from app.kinds import (
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
from tasks import server_adapters
from tasks.server_adapters import is_preset_outdated
from tasks.servers import Description, presets
from tasks.servers.probe import ProbedExchange, Recognition, Trial, endpoint_for, recognize
from tasks.servers.session import run_with_http_client

api = admin_blueprint("presets", "Kinds of servers", "/admin")


@api.get("/presets", responses={200: PresetList})
def list_presets() -> dict[str, Any]:
    """List the kinds of inference servers that come with Slotkeeper: each is a `preset` of a model's configuration."""
    models = dispatcher().catalog.get().models.values()
    behind = [it for it in models if is_preset_outdated(it.config, it.described_by)]
    return PresetList.build(
        presets=[PresetView.build(presets.info(name), name=name) for name in presets.names()],
        behind=[OutdatedPreset.build(it) for it in sorted(behind, key=lambda it: it.name)],
    )


@api.get("/presets/<preset>", responses={200: PresetDetail, **problem_responses(404)})
def get_preset(path: PresetPath) -> dict[str, Any]:
    """Show a kind of server, with its whole description."""
    if path.preset not in presets.names():
        raise NotFound("There is no such preset; GET /admin/presets lists them.", preset=path.preset)
    about = presets.info(path.preset)
    return PresetDetail.build(about, name=path.preset, description=presets.get(path.preset))


@api.post("/servers/probe", responses={200: ProbeView, **problem_responses(400, 413, 415, 422)})
def probe_server(body: ProbeBody) -> dict[str, Any]:
    """Find out what kind of server answers at an address, and run a job on it if one is given.  Registers nothing.

    The job really runs on the server, beside the jobs of the dispatcher.  The response has each request, its answer and
    the rule that judged it.  If the server does not know what the most likely preset asks for, the next one is tried.
    """
    validate_endpoint(body.url, "url")
    if body.model is not None:
        check_name(body.model)
    if body.preset is not None and body.preset not in presets.names():
        raise InvalidRequest("preset", f"there is no such preset; there is: {', '.join(presets.names())}")
    found = run_with_http_client(partial(recognize, body.url))
    if not found.is_there:
        return _probe_view(found, body.preset, None)
    tried: list[ProbedExchange] = []
    for preset in [body.preset] if body.preset is not None else found.presets:
        told = _try_preset(found, preset, body, tried)
        if told["outcome"] is None or told["outcome"]["code"] != "misconfigured":
            break  # Else the server does not know what the preset asks for, and has run nothing.
    return told


def _try_preset(found: Recognition, preset: str, body: ProbeBody, tried: list[ProbedExchange]) -> dict[str, Any]:
    """Try a preset.  `tried`: what was heard from those tried before; this one's exchanges are added."""
    endpoint = endpoint_for(body.url, preset, found.model)
    secret = partial(server_adapters.secret_for, body.model) if body.model is not None else None
    trial = Trial(endpoint, Description.model_validate(presets.get(preset)), secret)
    health = run_with_http_client(trial.health)
    told = None
    if body.payload is not None:
        outcome = run_with_http_client(partial(trial.run, payload=body.payload, patience_s=body.patience))
        result = None if outcome.result is None else trial.redacted(outcome.result)
        told = ProbeOutcome.build(outcome, result=result)
    tried += trial.exchanges
    return _probe_view(found, preset, endpoint, tried, health=HealthReport.build(health), outcome=told)


def _probe_view(
    found: Recognition,
    preset: str | None,
    endpoint: str | None,
    tried: Sequence[ProbedExchange] = (),
    health: dict[str, Any] | None = None,
    outcome: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """`tried`: what was heard from it after it had been recognized."""
    heard = [ExchangeView.build(one) for one in (*found.exchanges, *tried)]
    return ProbeView.build(found, preset=preset, endpoint=endpoint, health=health, outcome=outcome, exchanges=heard)
