"""Nodes as real processes: from the token to the result, with disconnects, restarts and false messages."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.home_node import Gateway, HomeNode
from tests.support.http_api import HttpApi
from tests.support.installation import SLOTKEEPER
from tools.cluster.stack import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def _serve(api: HttpApi, model: str = "zimg", **config: object) -> None:
    body = {"node_pools": ["homes"], "poll_interval": 0.2, "retry_backoff": 0.1, "retry_jitter": 0, **config}
    answer = api.call("PUT", f"/admin/model-configs/{model}", json=body)
    assert answer.ok, answer.text


def _submit(api: HttpApi, seconds: float = 0.1, **payload: object) -> str:
    return api.submit("zimg", {"prompt": "a cat", "seconds": seconds, **payload})


def _running(api: HttpApi, job_id: str) -> None:
    eventually(lambda: api.job(job_id)["status"] == "running", f"job {job_id} runs")


def _received(node: HomeNode, count: int = 1) -> None:
    eventually(lambda: node.count_runs() >= count, "the node has received it")


def _attempts(api: HttpApi, job_id: str) -> list[dict[str, Any]]:
    return api.call("GET", f"/queue/jobs/{job_id}/attempts").json()["attempts"]


def _costs(job: dict[str, Any]) -> tuple[int, int]:
    return job["failures"], job["crashes"]


def test_a_job_runs_on_a_node_that_no_worker_can_reach(api: HttpApi, gateway: Gateway, tmp_path: Path) -> None:
    _serve(api)
    HomeNode(api, "attic", gateway.port).started()

    job = api.ended(_submit(api))

    assert (job["status"], job["server"]) == ("completed", "attic"), job
    signed = api.call("GET", f"/queue/jobs/{job['job_id']}/envelope").json()
    assert json.loads(signed["result"]) == job["result"] and signed["node"] == "attic"
    (tmp_path / "bundle.json").write_text(json.dumps(signed))
    assert job["job_id"] in api.stack.run([SLOTKEEPER, "verify", str(tmp_path / "bundle.json")])


def test_a_job_that_waits_for_a_paused_node_names_the_pause_and_its_reason(api: HttpApi, gateway: Gateway) -> None:
    _serve(api)
    node = HomeNode(api, "attic", gateway.port).started()
    node.command("pause", "--reason", "a game")
    node.wait_for("paused")
    job_id = _submit(api)
    explained = api.call("GET", f"/queue/jobs/{job_id}/explain").json()["sentence"]
    assert "paused by its owner" in explained and "a game" in explained
    node.command("resume")
    assert api.ended(job_id)["attempts"] == 1


def test_a_disconnect_during_a_run_costs_no_retry_and_no_crash(api: HttpApi, gateway: Gateway) -> None:
    _serve(api)
    node = HomeNode(api, "attic", gateway.port).started()
    job_id = _submit(api, 3)
    _received(node)
    gateway.process.kill()
    again = Gateway(api.stack, "gateway2", gateway.port)
    node.wait_for("connected", 60)

    job = api.ended(job_id)

    assert (job["status"], job["attempts"], *_costs(job)) == ("completed", 1, 0, 0), (job, again.process.log)
    assert node.count_runs() == 1


def test_a_gateway_that_stops_regularly_interrupts_no_run(api: HttpApi, gateway: Gateway) -> None:
    _serve(api)
    node = HomeNode(api, "attic", gateway.port).started()
    other = Gateway(api.stack, "gateway2")
    job_id = _submit(api, 2)
    _received(node)
    gateway.process.ask_to_stop()

    job = api.ended(job_id)

    assert (job["status"], job["attempts"], *_costs(job)) == ("completed", 1, 0, 0), (job, other.process.log)


def test_a_restarted_agent_has_lost_its_runs_and_kept_its_results(api: HttpApi, gateway: Gateway) -> None:
    _serve(api, max_crashes=3)
    node = HomeNode(api, "attic", gateway.port).started()
    job_id = _submit(api, 30)
    _received(node)
    assert node.process is not None
    node.process.kill()
    node.started()
    eventually(lambda: api.job(job_id)["attempts"] == 2, "it runs again", 60)
    assert _costs(api.job(job_id)) == (0, 1)
    assert api.call("POST", f"/queue/jobs/{job_id}/cancel").ok
    assert api.ended(job_id)["status"] == "canceled"


def test_a_result_that_was_finished_during_a_cut_is_used(api: HttpApi, gateway: Gateway) -> None:
    _serve(api)
    node = HomeNode(api, "attic", gateway.port).started()
    job_id = _submit(api, 1.5)
    _received(node)
    gateway.process.kill()
    eventually(lambda: node.count_runs(ended=True), "the run has ended")
    assert node.process is not None
    node.process.kill()
    Gateway(api.stack, "gateway2", gateway.port)
    node.started()

    job = api.ended(job_id)

    assert (job["status"], job["attempts"], *_costs(job)) == ("completed", 1, 0, 0), _attempts(api, job_id)


def test_a_node_that_stays_disconnected_loses_its_run_after_the_node_patience_of_the_model(
    api: HttpApi, gateway: Gateway
) -> None:
    _serve(api, node_patience=2.0)
    node = HomeNode(api, "attic", gateway.port).started()
    job_id = _submit(api, 60)
    _received(node)
    assert node.process is not None
    node.process.kill()

    eventually(lambda: api.job(job_id)["crashes"] == 1, "the run is lost", 60)
    assert api.job(job_id)["status"] == "queued"


def test_a_killed_worker_leaves_a_run_that_the_next_one_resumes(api: HttpApi, gateway: Gateway) -> None:
    _serve(api)
    node = HomeNode(api, "attic", gateway.port).started()
    job_id = _submit(api, 4)
    _received(node)
    api.stack.processes["worker"].kill()
    api.stack.worker("worker2")

    job = api.ended(job_id)

    assert job["status"] == "completed", _attempts(api, job_id)
    assert node.count_runs() == 1


def test_a_large_result_is_received_through_the_status_request_and_is_signed(api: HttpApi, gateway: Gateway) -> None:
    _serve(api)
    HomeNode(api, "attic", gateway.port, zimg={"function": "slotkeeper.serve.demo:zimg"}).started()
    HomeNode(api, "cellar", gateway.port, big={"function": "tests.system.nodes.models:big"}).started()
    _serve(api, "big")

    job = api.ended(api.submit("big", {"bytes": 3_000_000}), 120)

    assert job["status"] == "completed" and len(job["result"]["text"]) == 3_000_000
    assert api.call("GET", f"/queue/jobs/{job['job_id']}/envelope").ok


def test_a_revoked_node_is_disconnected_and_does_not_reconnect(api: HttpApi, gateway: Gateway) -> None:
    _serve(api)
    node = HomeNode(api, "attic", gateway.port).started()
    assert api.call("POST", "/nodes/attic/revoke", json={}).ok
    assert node.process is not None
    assert node.process.popen.wait(30) == 3
    assert "refuses this node" in node.process.log


def test_a_copy_of_a_node_is_refused_while_the_first_answers(api: HttpApi, gateway: Gateway) -> None:
    _serve(api)
    node = HomeNode(api, "attic", gateway.port).started()
    first = node.process
    node.start()
    assert node.process is not None and first is not None
    eventually(lambda: "another agent" in node.process.log, "the copy is refused")
    first.popen.send_signal(signal.SIGSTOP)
    try:
        eventually(lambda: "connected to" in node.process.log, "the copy replaces a dead connection", 60)
    finally:
        first.popen.send_signal(signal.SIGCONT)
    assert api.ended(_submit(api))["status"] == "completed"


@pytest.mark.parametrize(
    "lie", ["wrong_key", "other_job", "older_attempt", "other_node", "changed_result", "changed_payload", "no_envelope"]
)
def test_a_false_message_costs_the_job_no_retry_and_freezes_the_node(api: HttpApi, gateway: Gateway, lie: str) -> None:
    _serve(api)
    node = HomeNode(api, "attic", gateway.port)
    node.lie = lie
    node.started()

    job_id = _submit(api)

    server = eventually(
        lambda: next(
            (one for one in api.call("GET", "/admin/servers").json()["servers"] if one["state"] == "frozen"), None
        ),
        "the node is frozen",
        60,
    )
    assert server["server"] == "attic" and "bad_signature" in server["reason"]
    eventually(lambda: api.job(job_id)["status"] == "queued", "the job waits again")
    job = api.job(job_id)
    assert (job["result"], *_costs(job)) == (None, 0, 0)
    HomeNode(api, "cellar", gateway.port).started()
    assert api.ended(job_id)["server"] == "cellar"


def test_a_job_fails_only_after_three_refusals_of_a_single_node(api: HttpApi, gateway: Gateway) -> None:
    _serve(api, "picky")
    HomeNode(api, "attic", gateway.port, picky={"function": "tests.system.nodes.models:refuses"}).started()
    job_id = api.submit("picky", {})
    job = api.ended(job_id, 60)
    assert (job["status"], job["error"]["code"]) == ("failed", "refused_by_node")
    assert [one["server"] for one in _attempts(api, job_id)] == ["attic"] * 3


@pytest.mark.parametrize("lie", ["final_error", "final_end"])
def test_a_final_error_of_a_single_node_does_not_end_the_job(api: HttpApi, gateway: Gateway, lie: str) -> None:
    _serve(api)
    node = HomeNode(api, "attic", gateway.port)
    node.lie = lie
    node.started()
    job_id = _submit(api)
    eventually(lambda: api.job(job_id)["failures"] >= 1, "it is tried again", 60)
    assert api.job(job_id)["last_error"]["code"] == "refused_by_node"


def test_a_node_replaces_its_key_without_losing_a_job(api: HttpApi, gateway: Gateway) -> None:
    _serve(api)
    node = HomeNode(api, "attic", gateway.port).started()
    before = node.command("status")
    job_id = _submit(api, 3)
    _received(node)
    node.command("rotate")
    eventually(lambda: node.command("status").splitlines()[0] != before.splitlines()[0], "the key is replaced")
    assert api.ended(job_id)["status"] == "completed"
    assert api.ended(_submit(api))["status"] == "completed"
    assert not (node.folder / "agent-state" / "next-key.pem").exists()


def test_a_second_node_confirms_a_refusal(api: HttpApi, gateway: Gateway) -> None:
    _serve(api, "picky")
    for name in ("attic", "cellar"):
        HomeNode(api, name, gateway.port, picky={"function": "tests.system.nodes.models:refuses"}).started()
    job_id = api.submit("picky", {})
    assert api.ended(job_id, 60)["status"] == "failed"
    assert len(_attempts(api, job_id)) <= 3


def test_a_local_server_is_called_by_the_agent(api: HttpApi, gateway: Gateway) -> None:
    _serve(api, "local")
    server = api.stack.server("local", 1)
    node = HomeNode(api, "attic", gateway.port, local={"forward": server.endpoint}).started()
    job = api.ended(api.submit("local", {"prompt": "a cat", "seconds": 0.1}))
    assert job["status"] == "completed", job
    server.process.kill()
    node.wait_for("paused")
    shown = api.call("GET", "/nodes/attic").json()
    assert "refuses connections" in shown["reason"]


def test_a_node_gets_no_callback_token(api: HttpApi, gateway: Gateway) -> None:
    _serve(api)
    node = HomeNode(api, "attic", gateway.port)
    node.lie = "note_headers"
    node.started()
    assert api.ended(_submit(api))["status"] == "completed"
    names = {name.lower() for name in json.loads((node.folder / "headers.json").read_text())}
    assert "x-job-id" in names and not {name for name in names if "callback" in name or name == "authorization"}


def test_a_deployment_of_everything_at_once_loses_nothing(api: HttpApi, gateway: Gateway) -> None:
    _serve(api)
    node = HomeNode(api, "attic", gateway.port).started()
    jobs = [_submit(api, 0.3) for _ in range(6)]
    time.sleep(0.5)
    for name in ("worker", "gateway"):
        api.stack.processes[name].ask_to_stop()
    api.stack.worker("worker2")
    api.stack.processes["gateway"].popen.wait(60)
    Gateway(api.stack, "gateway2", gateway.port)
    ended = [api.ended(job_id, 90) for job_id in jobs]
    assert {(job["status"], *_costs(job)) for job in ended} == {("completed", 0, 0)}
    assert node.count_runs() == len(jobs)
