"""Sixteen processes reserve the credits of one tenant, on both databases."""

import subprocess
import sys

import pytest

from slotkeeper.db import Database
from slotkeeper.jobs import credits
from slotkeeper.registry.credit_accounts import Act, CreditAccounts
from slotkeeper.registry.identity import Tenant
from slotkeeper.registry.tenants import Tenants
from tests.support.builders import T0
from tools.cluster.stack import REPO

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

_PROCESSES, _EACH, _HELD, _AFFORDED = 16, 20, 7, 101
_SUBMIT = """
import sys
from slotkeeper.db import Database
from slotkeeper.errors import InsufficientCredits
from slotkeeper.jobs.store import JobStore
from slotkeeper.jobs.values import NewJob, new_job_id

url, count, held = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = JobStore(Database(url))
print("ready", flush=True)
sys.stdin.readline()
accepted = 0
for _ in range(count):
    try:
        store.submit([NewJob(id=new_job_id(), model="m", payload="{}", tenant="acme", reserved=held, price=1)], 1)
    except InsufficientCredits as refused:
        assert refused.facts["available"] < held
    else:
        accepted += 1
print(accepted)
"""


def test_sixteen_processes_never_reserve_more_credits_than_the_tenant_has(database: Database) -> None:
    Tenants(database).add(Tenant("acme"), T0)
    accounts = CreditAccounts(database)
    accounts.open("acme", 0, None, T0)
    accounts.act("acme", Act("grant", _AFFORDED * _HELD + _HELD - 1, "", "g"), T0)
    command = [sys.executable, "-c", _SUBMIT, database.url, str(_EACH), str(_HELD)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPO)
        for _ in range(_PROCESSES)
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    accepted = [int(process.communicate(timeout=120)[0]) for process in processes]
    account = accounts.get("acme")
    assert (sum(accepted), account.available, account.held) == (_AFFORDED, _HELD - 1, _AFFORDED * _HELD)
    assert credits.find_unbalanced(database, with_transfers=True) == {}
