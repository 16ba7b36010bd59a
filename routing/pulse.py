"""Whether maintenance goes on: each sweep leaves a mark in Redis, which fades."""

from routing.scripts import Scripts

FADES_S = 15


def leave(scripts: Scripts) -> None:
    """Maintenance has swept just now.  Raises redis errors."""
    scripts.redis.set(scripts.keys.pulse(), "", ex=FADES_S)


def has_stopped(scripts: Scripts) -> bool:
    """Nobody has swept for FADES_S.  Raises redis errors."""
    return not scripts.redis.exists(scripts.keys.pulse())
