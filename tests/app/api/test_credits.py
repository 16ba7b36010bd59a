"""Credits over the REST API: accounts, idempotent acts, prices, the cost of a job, refusals."""

import pytest

from app.api import job_views
from slotkeeper.clock import now_ms
from slotkeeper.jobs.states import Reason
from slotkeeper.jobs.store import JobStore
from slotkeeper.registry.identity import Scope
from slotkeeper.registry.tenants import Tenants
from tasks import services
from tests.support.api import Api
from tests.support.ends import store_end
from tools.cluster.direct_starts import store_start

KEYED = pytest.mark.parametrize("settings", [{"REQUIRE_KEYS": "true", "CATALOG_REFRESH_S": "0"}])
pytestmark = KEYED
_MICRO = 1_000_000
_PRICES = {"prices": [{"model": "zimg", "constraints": {"gpu": "H100"}, "per_slot_s": 50_000}, {"per_slot_s": 20_000}]}
Headers = dict[str, str]


@pytest.fixture
def root(api: Api) -> Headers:
    return api.with_key("root", Scope.OPERATE)


@pytest.fixture
def acme(api: Api, root: Headers) -> Headers:
    """Create a tenant with 4 credits; each job reserves 3 of them (60 s at 0.05)."""
    headers = api.with_key("acme")
    assert api.client.put("/admin/model-configs/zimg", json={}, headers=root).status_code == 200
    assert api.client.put("/admin/prices", json=_PRICES, headers=root).status_code == 200
    assert api.client.put("/admin/tenants/acme/credit-account", json={}, headers=root).status_code == 200
    assert _act(api, root, kind="grant", amount=4 * _MICRO, reason="invoice 17").status_code == 201
    return headers


def _act(api: Api, headers: Headers, key: str = "first", **body: object):
    return api.client.post("/admin/tenants/acme/credits", json=body, headers=headers | {"Idempotency-Key": key})


def _end(api: Api, job_id: str, ms: int, why: Reason = Reason.FINISHED) -> None:
    store: JobStore = api.dispatcher.store
    at_ms = now_ms()
    run = store_start(store, job_id, "gpu", "gpu-slot0", "lease", at_ms, price=20_000)
    assert run is not None
    result = "1" if why is Reason.FINISHED else None
    assert store_end(store, job_id, run.attempt, why, at_ms + ms, result=result, run_ended_ms=at_ms + ms)


def test_a_job_holds_credits_and_shows_its_cost_after_its_end(api: Api, acme: Headers) -> None:
    job_id = api.submitted(acme)
    held = api.client.get(f"/queue/jobs/{job_id}", headers=acme).json["cost"]
    assert (held["held"], held["charged"], held["price"]) == (3 * _MICRO, 0, 50_000)
    assert held["sentence"].startswith("3 credits are held for it; at its end it costs 0.05 credits for each second")
    _end(api, job_id, 7500)
    cost = api.client.get(f"/queue/jobs/{job_id}", headers=acme).json["cost"]
    assert (cost["held"], cost["charged"], cost["slot_ms"]) == (0, 150_000, 7500)
    assert cost["sentence"] == "It cost 0.15 credits: 7.5 s of a slot at 0.02 credits a second."
    answer = api.client.get("/tenants/me/credits", headers=acme).json
    assert (answer["available"], answer["held"], answer["spent"], answer["open"]) == (3_850_000, 0, 150_000, True)
    assert [(row["kind"], row["amount"], row["job_id"]) for row in answer["transfers"]] == [
        ("settle", 150_000, job_id),
        ("reserve", 3 * _MICRO, job_id),
        ("grant", 4 * _MICRO, None),
    ]
    assert [answer["transfers"][-1][name] for name in ("why", "actor")] == ["invoice 17", "root"]


@pytest.mark.parametrize(
    ("why", "sentence"),
    [
        (Reason.RETRIES_EXHAUSTED, "runs that failed, or whose server or worker was lost, are not charged"),
        (Reason.CRASHES_EXHAUSTED, "runs that failed, or whose server or worker was lost, are not charged"),
    ],
)
def test_an_uncharged_job_explains_why_it_cost_nothing(api: Api, acme: Headers, why: Reason, sentence: str) -> None:
    job_id = api.submitted(acme)
    _end(api, job_id, 7500, why)
    cost = api.client.get(f"/queue/jobs/{job_id}", headers=acme).json["cost"]
    assert cost["charged"] == 0 and sentence in cost["sentence"]


def test_a_job_that_never_ran_explains_that_it_cost_nothing(api: Api, acme: Headers) -> None:
    job_id = api.submitted(acme)
    assert api.client.post(f"/queue/jobs/{job_id}/cancel", headers=acme).status_code == 200
    cost = api.client.get(f"/queue/jobs/{job_id}", headers=acme).json["cost"]
    assert (cost["charged"], cost["sentence"][:33]) == (0, "It cost nothing: it ended without")


def test_a_submit_that_the_tenant_cannot_pay_is_402_and_stores_nothing(api: Api, acme: Headers) -> None:
    api.submitted(acme)
    before = api.stored()
    refused = api.submit(acme)
    assert (refused.status_code, refused.json["code"]) == (402, "insufficient_credits")
    assert "has 1 credits available, and this needs 3 reserved; ask the operator" in refused.json["detail"]
    assert (refused.json["available"], refused.json["needed"]) == (_MICRO, 3 * _MICRO)
    batch = [{"model": "zimg", "payload": {}}] * 2
    assert api.client.post("/queue/submit-batch", json=batch, headers=acme).status_code == 402
    assert api.stored() == before


def test_lines_of_a_batch_are_refused_without_credits_and_the_batch_shows_its_cost(
    api: Api, acme: Headers, root: Headers
) -> None:
    batch = api.client.post("/batches", json={"model": "zimg"}, headers=acme).json["batch"]
    lines, path = b'{"payload": {}}\n' * 2, f"/batches/{batch}/lines"
    headers = acme | {"Content-Type": "application/x-ndjson"}
    assert api.client.post(path, data=lines, headers=headers).status_code == 402
    assert api.client.get(f"/batches/{batch}", headers=acme).json["next_line"] == 0
    assert _act(api, root, "second", kind="grant", amount=2 * _MICRO).status_code == 201
    assert api.client.post(path, data=lines, headers=headers).json["accepted"] == 2
    first, _ = api.client.get(f"/queue/jobs?batch={batch}", headers=acme).json["jobs"]
    _end(api, first["job_id"], 1000)
    cost = api.client.get(f"/batches/{batch}/cost", headers=acme).json
    assert cost == {"batch": batch, "held": 3 * _MICRO, "charged": 20_000, "slot_ms": 1000}


def test_a_dead_job_is_not_retried_without_credits(api: Api, acme: Headers, root: Headers) -> None:
    job_id = api.submitted(acme)
    _end(api, job_id, 10, Reason.RETRIES_EXHAUSTED)
    assert _act(api, root, "w", kind="withdraw", amount=2 * _MICRO).status_code == 201
    assert api.client.post(f"/admin/dlq/{job_id}/retry", headers=acme).status_code == 402
    assert _act(api, root, "g", kind="grant", amount=2 * _MICRO).status_code == 201
    assert api.client.post(f"/admin/dlq/{job_id}/retry", headers=acme).status_code == 200


def test_dead_jobs_of_tenants_without_credits_stay_and_those_of_others_are_retried(
    api: Api, acme: Headers, root: Headers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_views, "_MAX_RETRIED", 2)
    other, dead = api.with_key("other"), []
    for headers in (other, other, acme, acme, acme):
        dead.append(api.submitted(headers))
        _end(api, dead[-1], 10, Reason.RETRIES_EXHAUSTED)
    answer = api.client.post("/admin/dlq/retry-all", headers=root).json
    assert answer == {"retried": 3, "more": False, "left_out": 0, "unpaid": ["acme"]}
    assert len(api.client.get("/admin/dlq", headers=root).json["jobs"]) == 2


def test_a_credit_act_is_applied_once_for_each_idempotency_key(api: Api, acme: Headers, root: Headers) -> None:
    again = _act(api, root, kind="grant", amount=4 * _MICRO, reason="invoice 17")
    assert again.status_code == 200 and again.json["amount"] == 4 * _MICRO
    assert _act(api, root, kind="grant", amount=5 * _MICRO).json["code"] == "idempotency_conflict"
    assert api.client.get("/tenants/acme/credits", headers=root).json["available"] == 4 * _MICRO
    acts = [act["act"] for act in api.client.get("/admin/audit?tenant=acme", headers=root).json["acts"]]
    assert acts.count("credit.grant") == 1 and "credit.open" in acts


def test_the_refunds_of_a_job_never_exceed_its_cost(api: Api, acme: Headers, root: Headers) -> None:
    job_id = api.submitted(acme)
    assert _act(api, root, "r0", kind="refund", job_id=job_id).status_code == 409, "the job has no cost yet"
    _end(api, job_id, 1000)
    assert _act(api, root, "r1", kind="refund", amount=5_000, job_id=job_id).status_code == 201
    assert _act(api, root, "r2", kind="refund", amount=15_001, job_id=job_id).status_code == 409
    assert _act(api, root, "r3", kind="refund", job_id=job_id).json["amount"] == 15_000
    assert _act(api, root, "r4", kind="refund", job_id="nobody").status_code == 404
    answer = api.client.get("/tenants/me/credits", headers=acme).json
    assert (answer["available"], answer["spent"]) == (4 * _MICRO, 0)
    cost = api.client.get(f"/queue/jobs/{job_id}", headers=acme).json["cost"]
    assert cost["charged"] == 0 and cost["sentence"].endswith("0.02 credits were refunded.")


@pytest.mark.parametrize(
    ("body", "key", "status", "field"),
    [
        ({"kind": "grant", "amount": 1}, None, 422, "Idempotency-Key"),
        ({"kind": "grant"}, "k", 422, "amount"),
        ({"kind": "grant", "amount": 0}, "k", 422, "amount"),
        ({"kind": "grant", "amount": 1, "job_id": "x"}, "k", 422, "job_id"),
        ({"kind": "refund", "amount": 1}, "k", 422, "job_id"),
        ({"kind": "settle", "amount": 1}, "k", 422, "kind"),
        ({"kind": "withdraw", "amount": 5 * _MICRO}, "k", 409, None),
    ],
)
def test_an_invalid_credit_act_is_refused_and_names_the_field(
    api: Api, acme: Headers, root: Headers, body, key, status, field
) -> None:
    headers = root | ({} if key is None else {"Idempotency-Key": key})
    refused = api.client.post("/admin/tenants/acme/credits", json=body, headers=headers)
    assert (refused.status_code, refused.json.get("field")) == (status, field)


def test_credits_are_for_operators_to_change_and_for_their_tenant_to_read(
    api: Api, acme: Headers, root: Headers
) -> None:
    other = api.with_key("other")
    assert api.client.get("/tenants/acme/credits", headers=other).status_code == 404
    assert api.client.get("/tenants/me/credits", headers=other).status_code == 404, "it has no account"
    assert _act(api, acme, "mine", kind="grant", amount=1).status_code == 403
    assert api.client.put("/admin/tenants/nobody/credit-account", json={}, headers=root).status_code == 404
    accounts = api.client.get("/admin/credit-accounts", headers=root).json["accounts"]
    assert [account["tenant"] for account in accounts] == ["acme"]


def test_transfers_are_read_page_by_page_and_as_a_table(api: Api, acme: Headers, root: Headers) -> None:
    for n in range(3):
        _act(api, root, f"g{n}", kind="grant", amount=n + 1)
    first = api.client.get("/tenants/me/credits?limit=3", headers=acme).json
    second = api.client.get(f"/tenants/me/credits?limit=3&cursor={first['next_cursor']}", headers=acme).json
    assert [row["amount"] for row in first["transfers"] + second["transfers"]] == [3, 2, 1, 4 * _MICRO]
    assert second["next_cursor"] is None
    table = api.client.get("/tenants/me/credits", headers=acme | {"Accept": "text/csv"})
    assert table.text.splitlines()[0].startswith("id,kind,amount,at,job_id") and len(table.text.splitlines()) == 5
    assert api.client.get("/tenants/me/credits?cursor=x", headers=acme).json["field"] == "cursor"


def test_a_closed_account_makes_jobs_free_and_keeps_its_balance(api: Api, acme: Headers, root: Headers) -> None:
    closed = api.client.delete("/admin/tenants/acme/credit-account", headers=root).json
    assert (closed["open"], closed["available"]) == (False, 4 * _MICRO)
    job_id = api.submitted(acme)
    assert api.client.get(f"/queue/jobs/{job_id}", headers=acme).json["cost"] is None
    opened = api.client.put("/admin/tenants/acme/credit-account", json={"overdraft": 7}, headers=root).json
    assert (opened["open"], opened["overdraft"], opened["available"]) == (True, 7, 4 * _MICRO)


def test_no_account_is_opened_beside_a_process_of_another_release(api: Api, root: Headers) -> None:
    api.with_key("acme")
    services.processes().report("w1", {"role": "worker", "host": "here", "version": "0.0.1"})
    refused = api.client.put("/admin/tenants/acme/credit-account", json={}, headers=root)
    assert refused.status_code == 409 and "Processes of release 0.0.1 run" in refused.json["detail"]


def test_a_tenant_whose_jobs_hold_credits_is_not_removed_and_a_new_one_inherits_no_account(
    api: Api, acme: Headers, root: Headers
) -> None:
    job_id = api.submitted(acme)
    tenants = Tenants(api.database)
    with pytest.raises(Exception, match="hold 3 credits; cancel them"):
        tenants.remove("acme")
    _end(api, job_id, 1000)
    tenants.remove("acme")
    later = api.with_key("acme")
    assert api.client.get("/tenants/me/credits", headers=later).status_code == 404
    assert api.client.put("/admin/tenants/acme/credit-account", json={}, headers=root).status_code == 200
    answer = api.client.get("/tenants/me/credits", headers=later).json
    assert (answer["available"], answer["held"], answer["spent"], answer["transfers"]) == (0, 0, 0, [])


@pytest.mark.parametrize(
    ("prices", "status"),
    [
        ([{"model": "zimg", "constraints": {"gpu": ["A100", "H100"]}, "per_slot_s": 5, "reserve_s": 9}], 200),
        ([{"constraints": {"memory": {"min": 40}}, "per_slot_s": 0}], 200),
        ([], 200),
        ([{"per_slot_s": -1}], 422),
        ([{"per_slot_s": 1, "reserve_s": 0}], 422),
        ([{"per_slot_s": 1}, {"per_slot_s": 1, "constraints": {"gpu": []}}], 422),
        ([{"per_slot_s": 1, "constraints": {"environment": "x"}}], 422),
    ],
)
def test_a_price_list_is_stored_as_it_is_sent_or_refused(api: Api, root: Headers, prices: list, status: int) -> None:
    answer = api.client.put("/admin/prices", json={"prices": prices}, headers=root)
    assert answer.status_code == status, answer.text
    if status == 200:
        stored = api.client.get("/admin/prices", headers=root).json["prices"]
        assert [{name: row[name] for name in sent} for row, sent in zip(stored, prices, strict=True)] == prices


def test_an_account_that_runs_low_writes_one_event_each_time(api: Api, acme: Headers, root: Headers) -> None:
    accounts = services.credit_accounts()
    accounts.open("acme", 0, 2 * _MICRO, now_ms())

    def low_events() -> int:
        with api.database.read() as connection:
            found = connection.exec_driver_sql("SELECT job_id, tenant FROM events WHERE type = 'credit.low'").all()
        assert set(found) <= {("tenant/acme", "acme")}
        return len(found)

    accounts.note_low(now_ms())
    assert low_events() == 0
    job_id = api.submitted(acme)
    for _ in range(2):
        accounts.note_low(now_ms())
        assert low_events() == 1
    api.client.post(f"/queue/jobs/{job_id}/cancel", headers=acme)
    accounts.note_low(now_ms())
    api.submitted(acme)
    accounts.note_low(now_ms())
    assert low_events() == 2
