"""A limit that only tests have: a tenant's jobs are at most half of those that wait for a model, once ten do."""

from collections.abc import Iterable

from routing.admission.submit_limits import AdmissionRequest, Limit, LimitContext, Phase, RedisCheck
from routing.queue.queues import ModelStatus
from slotkeeper.errors import TooManyRequests


def _check(request: AdmissionRequest, context: LimitContext) -> Iterable[RedisCheck]:
    for (name, tenant), jobs in request.by_account.items():
        yield _share_check(context, name, tenant, len(jobs))


def _share_check(context: LimitContext, model: str, tenant: str, count: int) -> RedisCheck:
    def judge(status: ModelStatus) -> None:
        if status.all_tenants >= 10 and status.own + count > (status.all_tenants + count) / 2:
            raise TooManyRequests(
                f"Half of the jobs of model {model!r} are {tenant!r}'s; try again later.", 5.0, model=model
            )

    fleet = context.catalog.resolve(model).fleet
    return RedisCheck(fleet, context.queues.model_status_command(fleet, model, tenant), judge)


LIMIT = Limit("share", Phase.READ, _check)
