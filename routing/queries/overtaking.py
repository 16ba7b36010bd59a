"""For how long a job may be overtaken by what comes after it, as its model's policy says."""

from slotkeeper.jobs.values import PRIORITY_DEFAULT, PRIORITY_LEAST_URGENT
from slotkeeper.registry.model_config import ModelConfig
from slotkeeper.registry.policies import POLICIES

PRIORITIES = range(1, PRIORITY_LEAST_URGENT + 1)


def longest_overtaking_s(priority: int, config: ModelConfig) -> float | None:
    """For how many seconds after its acceptance others may still be accepted that come before a job of this priority.

    The bound on what order alone can make it wait: the work that was accepted until then.  None: there is none.
    """
    return POLICIES[config.policy].longest_overtaking_s(priority, config.tier_head_start)


def longest_wait(config: ModelConfig, priority: int = PRIORITY_DEFAULT) -> str:
    """The longest that order can make a job of this priority wait, in terms of the load: a sentence."""
    return POLICIES[config.policy].describe_wait(priority, config.tier_head_start)
