"""The attacks of all doors: each door has a module with its ATTACKS, and is listed here."""

from tests.system.attacks import api
from tests.system.attacks.frame import Attack

ALL: list[Attack] = [*api.ATTACKS]
