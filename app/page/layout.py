"""What stands around every screen: where one can go, who looks, light or dark."""

from dataclasses import dataclass
from typing import Any

from flask import current_app, request

from app.auth.access import current_tenant
from app.page import visitor
from slotkeeper.registry.tenants import Tenant


@dataclass(frozen=True, slots=True)
class NavItem:
    """One of the main screens."""

    name: str
    path: str
    admin: bool = True
    audit: bool = False

    @property
    def is_here(self) -> bool:
        return request.path == self.path or (self.path != "/" and request.path.startswith(self.path + "/"))


NAVIGATION = (
    NavItem("Overview", "/", admin=False),
    NavItem("Jobs", "/page/jobs", admin=False),
    NavItem("Batches", "/page/batches", admin=False),
    NavItem("Servers", "/page/servers"),
    NavItem("Dead", "/page/dead"),
    NavItem("Tenants", "/page/tenants"),
    NavItem("Webhooks", "/page/webhooks", admin=False),
    NavItem("Audit", "/page/audit", admin=False, audit=True),
    NavItem("Settings", "/page/settings"),
)
# What was done, by the word in the address that a form leads to.
MESSAGES = {
    "canceled": "The job is canceled.",
    "batch-canceled": "Its jobs that waited are canceled; those that run end as soon as their servers let go.",
    "canceling": "Its server was asked to stop the run; the job ends as soon as that lets go.",
    "retried": "It waits in line again, at its own place and with fresh budgets.",
    "changed": "Done; it holds everywhere within two seconds.",
    "tested": "A test is on its way; the latest tries say what came of it.",
    "enabled": "It is told again, from where it was disabled on.",
    "disabled": "It is told nothing until it is enabled.",
    "replayed": "It is told once more.",
    "reset": "The server counts as well: its breaker is closed, and its cooldown is over.",
    "removed": "It is removed.",
    "leaving": "It takes nothing new, and the rest follows when what is left there has ended.",
    "kept": "Called off: it gets jobs again.",
}


def template_values() -> dict[str, Any]:
    """For every template."""
    me = current_tenant() if visitor.is_logged_in() else None
    return {
        "me": me,
        "keys_required": visitor.keys_required(),
        "ways": [way for way in NAVIGATION if me is not None and _may_go(way, me)],
        "theme": visitor.theme(),
        "form_token": visitor.form_token(),
        "said": _said(request.args.get("said", "")),
        "path": request.full_path.rstrip("?"),
        "version": current_app.extensions["slotkeeper_version"],
    }


def _may_go(way: NavItem, me: Tenant) -> bool:
    return me.admin or (way.audit and me.audits) or not (way.admin or way.audit)


def _said(word: str) -> str | None:
    if word in MESSAGES:
        return MESSAGES[word]
    number, _, rest = word.partition("-")
    if rest in ("retried", "left") and number.isdecimal() and len(number) < 7:
        more = "  There are more: do it once more for the next." if rest == "left" else ""
        return f"{number} of them wait in line again.{more}"
    return None
