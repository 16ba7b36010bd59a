"""Effects of faults on a stack in which only the affected part is real."""

import base64
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest
from pytest_httpserver import HTTPServer
from redis import Redis
from redis.exceptions import OutOfMemoryError, ReadOnlyError
from werkzeug import Request, Response

from app.up.guardian import Guardian
from tests.tools.cluster.sockets import Listener, receives_nothing
from tools.cluster.cluster import Cluster, ServerSpec
from tools.cluster.tcp_proxy import Proxy
from tools.cluster.valkey_process import Valkey
from tools.drill import fault_injection
from tools.drill.drill_setup import cluster_spec
from tools.drill.fault_injection import ACTS, FaultInjector, InjectedFault, NotApplicable, limits_in_force
from tools.drill.fault_schedule import BOTH, DEAD, SLOW, Change, Fault, Kind

S = 1_000_000_000
SERVER = ServerSpec("a", "zimg", 4, 9001)


def fault(kind: Kind, target: str, how: str = "", lasts_s: float = 1.0) -> Fault:
    return Fault(0.0, kind, target, lasts_s, how)


def wait_until(condition: Callable[[], Any], within_s: float = 10.0) -> None:
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_every_kind_of_fault_has_an_act() -> None:
    assert set(ACTS) == set(Kind)


# -- the network -------------------------------------------------------------------------------------------


@pytest.fixture
def doors(proxy: Proxy, listener: Listener) -> Cluster:
    """A stack of doors alone."""
    names = ("redis", "receivers")
    return cast(Cluster, SimpleNamespace(proxy_ports={name: proxy.open(name, listener.address) for name in names}))


@pytest.mark.parametrize(
    "one",
    [
        fault(Kind.SILENCE, "redis", BOTH),
        fault(Kind.SILENCE, "redis", "requests"),
        fault(Kind.RECEIVERS, "receivers", DEAD),
    ],
)
def test_silence_lasts_until_it_is_mended(doors: Cluster, listener: Listener, one: Fault) -> None:
    talk = listener.connect_through(doors.proxy_ports[one.target].port)
    mend = ACTS[one.kind](doors, one)
    talk.client.sendall(b"hello")
    assert receives_nothing(talk.server)
    mend()
    assert talk.server.recv(4096) == b"hello"


@pytest.mark.parametrize("one", [fault(Kind.DELAYS, "redis"), fault(Kind.RECEIVERS, "receivers", SLOW)])
def test_delays_end_when_they_are_mended(
    doors: Cluster, listener: Listener, one: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault_injection, "_DELAY_S", 0.05)
    monkeypatch.setattr(fault_injection, "_SLOW_S", 0.05)
    talk = listener.connect_through(doors.proxy_ports[one.target].port)
    mend = ACTS[one.kind](doors, one)
    began = time.monotonic()
    for _ in range(10):
        talk.send_request(b"hello")
    assert time.monotonic() - began > 0.1
    mend()
    assert talk.send_request(b"again") == b"again"


def test_a_cut_resets_open_connections_and_new_connections_work_at_once(doors: Cluster, listener: Listener) -> None:
    door = doors.proxy_ports["redis"]
    talk = listener.connect_through(door.port)
    talk.send_request(b"hello")
    ACTS[Kind.CUTS](doors, fault(Kind.CUTS, "redis"))()
    with pytest.raises(ConnectionResetError):
        talk.client.recv(1)
    assert listener.connect_through(door.port).send_request(b"hello") == b"hello"


# -- Redis -------------------------------------------------------------------------------------------------


@pytest.fixture
def stores(tmp_path: Path, proxy: Proxy) -> Iterator[Cluster]:
    """A stack with nothing but its Valkeys."""
    with Guardian() as guardian:
        stack = Cluster(tmp_path, guardian, proxy, cluster_spec((Kind.STALE,)))
        try:
            stack.start_stores()
            yield stack
        finally:
            stack.end()


def test_a_failover_of_redis_loses_the_latest_writes(stores: Cluster) -> None:
    one = fault(Kind.STALE, "redis")
    for key in ("first", "second"):  # a failover to the replica, and one back
        with Redis.from_url(stores.redis_url, socket_timeout=5) as redis:
            redis.set(key, "1")
            mend = _struck(stores, one)
            redis.set(f"after {key}", "1")
        mend()
        with Redis.from_url(stores.redis_url, socket_timeout=5) as redis:
            assert redis.get(key) == b"1"
            assert redis.get(f"after {key}") is None
            assert redis.set("new", "1")


def _struck(stack: Cluster, one: Fault) -> fault_injection.Undo:
    """Inject the fault once the replica has received all writes."""
    found: list[fault_injection.Undo] = []

    def strikes() -> bool:
        try:
            found.append(ACTS[one.kind](stack, one))
        except NotApplicable:
            return False
        return True

    with Redis.from_url(stack.redis_url, socket_timeout=5) as redis:
        wait_until(lambda: redis.info("replication")["connected_slaves"] == 1)
        wait_until(lambda: redis.wait(1, 1000) == 1)
    wait_until(strikes)
    return found[0]


def test_a_replica_refuses_writes(stores: Cluster) -> None:
    with stores._valkey("replica") as replica:
        wait_until(lambda: replica.info("replication")["role"] == "slave")
        with pytest.raises(ReadOnlyError):
            replica.set("a", 1)


def test_a_flush_deletes_the_data_of_redis(stores: Cluster) -> None:
    with Redis.from_url(stores.redis_url, socket_timeout=5) as redis:
        redis.set("a", "1")
        ACTS[Kind.FLUSH](stores, fault(Kind.FLUSH, "redis"))()
        assert redis.get("a") is None


def test_a_full_redis_takes_nothing_until_that_is_mended(stores: Cluster) -> None:
    with Redis.from_url(stores.redis_url, socket_timeout=5) as redis:
        mend = ACTS[Kind.FULL](stores, fault(Kind.FULL, "redis"))
        with pytest.raises(OutOfMemoryError):
            redis.set("a", "1")
        mend()
        assert redis.set("a", "1")


# -- people ------------------------------------------------------------------------------------------------


def test_a_revoke_goes_to_all_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_injection, "_active_job_ids", lambda _: ["j1", "j2"])
    with Valkey(tmp_path) as broker, broker.client() as client:
        stack = SimpleNamespace(broker_url=broker.url, revoked=set())
        with client.pubsub() as worker:
            worker.psubscribe("*celery.pidbox*")
            assert worker.get_message(timeout=5)
            ACTS[Kind.REVOKES](cast(Cluster, stack), fault(Kind.REVOKES, "jobs"))()
            messages: list[Any] = []
            wait_until(lambda: messages or messages.extend(filter(None, [worker.get_message(timeout=0.1)])))
        assert b"j1" in base64.b64decode(orjson.loads(messages[0]["data"])["body"])
    assert stack.revoked == {"j1", "j2"}


def test_no_job_is_revoked_if_no_job_is_active(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_injection, "_active_job_ids", lambda _: [])
    with pytest.raises(NotApplicable):
        ACTS[Kind.REVOKES](cast(Cluster, SimpleNamespace()), fault(Kind.REVOKES, "jobs"))


class Api:
    """An API that notes what it is asked for, and says yes."""

    def __init__(self, server: HTTPServer) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self.away = 0
        """So many requests are answered 503."""
        server.expect_request(re.compile(".*")).respond_with_handler(self._answer)

    def _answer(self, request: Request) -> Response:
        if self.away:
            self.away -= 1
            return Response("{}", 503, content_type="application/json")
        self.asked.append((request.method, request.path, orjson.loads(request.data) if request.data else None))
        return Response("{}", 200, content_type="application/json")


@pytest.fixture
def httpserver() -> Iterator[HTTPServer]:
    with HTTPServer(host="127.0.0.1") as server:
        yield server


@pytest.fixture
def stack(httpserver: HTTPServer, tmp_path: Path, proxy: Proxy) -> Iterator[Cluster]:
    with Guardian() as guardian:
        stack = Cluster(tmp_path, guardian, proxy)
        stack.url, stack.servers = httpserver.url_for("").rstrip("/"), [SERVER]
        yield stack


@pytest.fixture
def api(httpserver: HTTPServer) -> Api:
    return Api(httpserver)


SERVERS, MODEL, CONFIG = "/admin/servers/a", "/admin/models/zimg", "/admin/model-configs/zimg"


@pytest.mark.parametrize(
    ("change", "does", "undoes"),
    [
        (Change.SLOTS, ("POST", "/admin/register", "slots", 2), ("POST", "/admin/register", "slots", 4)),
        (Change.REMOVAL, ("DELETE", SERVERS, None, None), ("POST", "/admin/register", "slots", 4)),
        (Change.DRAIN, ("PATCH", SERVERS, "state", "draining"), ("PATCH", SERVERS, "state", "online")),
        (Change.PAUSE, ("PATCH", MODEL, "state", "paused"), ("PATCH", MODEL, "state", "online")),
        (Change.LIMIT, ("PUT", CONFIG, "tenant_slots", 1), ("PUT", CONFIG, "tenant_slots", None)),
    ],
)
def test_an_operator_changes_something_and_undoes_it(
    stack: Cluster, api: Api, change: Change, does: tuple[Any, ...], undoes: tuple[Any, ...]
) -> None:
    mend = ACTS[Kind.OPERATOR](stack, fault(Kind.OPERATOR, "zimg", change))
    assert _asked(api, does)
    api.asked.clear()
    mend()
    assert _asked(api, undoes)


def _asked(api: Api, for_: tuple[str, str, str | None, Any]) -> bool:
    method, path, field, value = for_
    return any(
        (request[0], request[1]) == (method, path) and (field is None or request[2].get(field) == value)
        for request in api.asked
    )


def test_a_policy_is_another_one_and_then_that_of_before(stack: Cluster, api: Api) -> None:
    mend = ACTS[Kind.OPERATOR](stack, fault(Kind.OPERATOR, "zimg", Change.POLICY))
    assert api.asked[-1][2]["policy"] in ("fifo", "aging", "edf", "fair")
    mend()
    assert "policy" not in api.asked[-1][2]


def test_a_change_that_is_refused_has_not_happened(stack: Cluster, api: Api) -> None:
    api.away = 1
    with pytest.raises(NotApplicable):
        ACTS[Kind.OPERATOR](stack, fault(Kind.OPERATOR, "zimg", Change.DRAIN))


def test_a_change_is_undone_even_if_the_api_is_unreachable_at_first(stack: Cluster, api: Api) -> None:
    mend = ACTS[Kind.OPERATOR](stack, fault(Kind.OPERATOR, "zimg", Change.DRAIN))
    api.away = 2
    mend()
    assert _asked(api, ("PATCH", SERVERS, "state", "online"))


@pytest.mark.parametrize(
    ("change", "most"),
    [(Change.SLOTS, 2), (Change.REMOVAL, 0), (Change.DRAIN, 0), (Change.PAUSE, 0), (Change.LIMIT, 1)],
)
def test_a_change_limits_runs_for_as_long_as_it_lasts(change: Change, most: int) -> None:
    struck = InjectedFault(
        fault(Kind.OPERATOR, "zimg", change), 1 * S, 1, effect_ns=2 * S, undo_began_ns=9 * S, undone_ns=10 * S
    )
    (limit,) = limits_in_force([struck], [SERVER])
    assert (limit.most, limit.from_ns, limit.until_ns, limit.servers) == (most, 2 * S, 9 * S, {"a"})


def test_a_change_of_policy_limits_nothing() -> None:
    struck = InjectedFault(fault(Kind.OPERATOR, "zimg", Change.POLICY), 1 * S, 1, effect_ns=2 * S, undo_began_ns=9 * S)
    assert limits_in_force([struck], [SERVER]) == []


# -- the order of it all -----------------------------------------------------------------------------------


def test_a_fault_that_does_not_apply_is_neither_recorded_nor_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    mended: list[str] = []

    def act(_: Cluster, one: Fault) -> fault_injection.Undo:
        if one.target == "busy":
            raise NotApplicable
        return lambda: mended.append(one.target)

    monkeypatch.setitem(cast(dict[Kind, fault_injection.Act], ACTS), Kind.BEAT, act)
    stack = cast(Cluster, SimpleNamespace(restart_ended=lambda: None))
    faults = [fault(Kind.BEAT, name, lasts_s=0.01) for name in ("busy", "beat")]
    saboteur = FaultInjector(stack, faults, lambda _: None)
    saboteur.start()
    saboteur.join(10)
    assert saboteur.error is None
    assert [one.fault.target for one in saboteur.injected] == mended == ["beat"]
    (one,) = saboteur.injected
    assert one.at_ns <= one.effect_ns <= one.undo_began_ns <= one.undone_ns
