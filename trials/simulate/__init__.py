"""What if: days of a load in seconds, on routing's own scripts.

outcome = run(Scenario(arrivals, catalog, begin_ms, end_ms))
figures(outcome).waits.p99
"""

from trials.simulate.engine import run
from trials.simulate.figures import Figures, figures, jain
from trials.simulate.scenario import Arrival, Job, Outage, Outcome, Scenario, Wrong

__all__ = ["Arrival", "Figures", "Job", "Outage", "Outcome", "Scenario", "Wrong", "figures", "jain", "run"]
