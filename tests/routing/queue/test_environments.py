"""Jobs of an environment run only on servers that declare it."""

import pytest
from redis import Redis

from routing.admission.constraints import encode_constraints, environment_of, unmet_conditions
from slotkeeper.errors import InvalidJob
from slotkeeper.registry.values import Server as CatalogServer
from tests.support.fleet_queue import FleetQueue, Server, a

TESTNET = encode_constraints(None, "testnet")


def _on(queue: FleetQueue, job: str, constraints: str = "") -> list[str]:
    return [offer.server for offer in queue.enqueue(a(job, int(job[1:]), constraints=constraints))]


def test_production_is_no_condition_and_another_environment_is_one() -> None:
    assert (encode_constraints(None), encode_constraints(None, "production"), TESTNET) == (
        "",
        "",
        "environment=testnet",
    )
    assert (environment_of(""), environment_of("cpu=arm\nenvironment=testnet\ngpu=H100")) == ("production", "testnet")
    assert environment_of("my-environment=testnet") == "production"


@pytest.mark.parametrize("constraints, environment", [({"environment": "testnet"}, "production"), ({}, "a,b")])
def test_an_environment_among_the_constraints_or_with_an_invalid_name_is_rejected(
    constraints: dict[str, str], environment: str
) -> None:
    with pytest.raises(InvalidJob, match="environment"):
        encode_constraints(constraints, environment)


def test_a_job_runs_only_in_its_environment(client: Redis) -> None:
    queue = FleetQueue(client).with_servers(
        Server("test", attributes={"environment": "testnet"}),
        Server("both", attributes={"environment": "testnet,production"}),
        Server("open"),
    )
    assert {*_on(queue, "j1"), *_on(queue, "j2")} == {"both", "open"}
    assert _on(queue, "j3") == [], "the server of the testnet is free"
    assert _on(queue, "j4", TESTNET) == ["test"]


def test_a_job_of_another_environment_does_not_run_on_a_server_that_declares_none(client: Redis) -> None:
    queue = FleetQueue(client).with_servers(
        Server("open"), Server("both", attributes={"environment": "testnet,production"})
    )
    assert _on(queue, "j1", TESTNET) == ["both"]
    assert _on(queue, "j2", TESTNET) == []


def test_many_free_servers_of_another_environment_keep_no_job_from_its_server(client: Redis) -> None:
    """They are of another kind, so the offer does not read them."""
    others = [Server(f"test{n:02}", attributes={"environment": "testnet"}) for n in range(40)]
    queue = FleetQueue(client).with_servers(*others, Server("open"))
    assert _on(queue, "j1") == ["open"]
    assert len(_on(queue, "j2", TESTNET)) == 1


def test_a_model_may_have_another_environment_than_the_other_models_of_its_server() -> None:
    server = CatalogServer("gpu", "zimg", 1, "online", {"zimg": "", "flux": ""}, 0, {"zimg:environment": "testnet"})
    assert unmet_conditions("", server, "zimg") == ["environment=production"]
    assert unmet_conditions("", server, "flux") == unmet_conditions(TESTNET, server, "zimg") == []
    assert unmet_conditions(TESTNET, server, "flux") == ["environment=testnet"]
