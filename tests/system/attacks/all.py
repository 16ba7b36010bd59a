"""The attacks on all surfaces: each surface has a module with its ATTACKS, which is listed here."""

from tests.system.attacks import api
from tests.system.attacks.frame import Attack

ALL: list[Attack] = [*api.ATTACKS]
