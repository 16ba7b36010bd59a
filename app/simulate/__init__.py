"""What if: days of a load in seconds, on routing's own scripts.

outcome = run(Scenario(arrivals, catalog, begin_ms, end_ms))
summarize(outcome).waits.p99

    plan         what is asked for, in few words            scenario     what is simulated, and what came of it
    load         arrivals by a seed                         recorded     or as they were, by history
    fleet        models and servers, and what if they changed
    engine       plays, in a room, on a Valkey (valkey) of its own
    figures      what it comes to                           show, plots  for people
"""

from app.simulate.outcome_statistics import Summary, jain, summarize
from app.simulate.scenario import Arrival, Job, Outage, Outcome, Scenario, SimulationError
from app.simulate.simulation import run

__all__ = ["Arrival", "Job", "Outage", "Outcome", "Scenario", "SimulationError", "Summary", "jain", "run", "summarize"]
