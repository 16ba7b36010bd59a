"""A tenant submits so many jobs a second, and so many at once."""

from collections.abc import Iterable

from routing.admission import questions
from routing.admission.gates.gate import AdmissionRequest, Limit, LimitContext, Phase, RedisCheck
from slotkeeper.errors import InvalidJob, TooManyRequests
from slotkeeper.registry.tenants import Tenant


def _check(submit: AdmissionRequest, known: LimitContext) -> Iterable[RedisCheck[int]]:
    tenant = submit.tenant
    if tenant is not None and tenant.rate_per_s:
        yield _question(known, tenant, tenant.rate_per_s, len(submit.jobs))


def _question(known: LimitContext, tenant: Tenant, rate_per_s: int, count: int) -> RedisCheck[int]:
    burst = max(tenant.burst or rate_per_s, 1)
    if count > burst:  # However long it waited, this would never fit.
        raise InvalidJob("jobs", f"Tenant {tenant.name!r} may submit {burst} at once, not {count}; split them.")

    def judge(wait_ms: int) -> None:
        if wait_ms:
            raise TooManyRequests(
                f"Tenant {tenant.name!r} may submit {rate_per_s} jobs a second, {burst} at once; slow down.",
                retry_after_s=wait_ms / 1000,
                tenant=tenant.name,
            )

    return RedisCheck(questions.rate_limit_command(known.queues, tenant.name, count, 1000 / rate_per_s, burst), judge)


GATE = Limit("rate", Phase.COUNT, _check)
