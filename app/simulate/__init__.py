"""Simulates days of load in seconds, with the scripts of routing and a private Valkey.

outcome = run(Scenario(arrivals, catalog, begin_ms, end_ms))
summarize(outcome).waits.p99
"""

from app.simulate.outcome_statistics import Summary, jain, summarize
from app.simulate.scenario import Arrival, Job, Outage, Outcome, Scenario, SimulationError
from app.simulate.simulation import run

__all__ = ["Arrival", "Job", "Outage", "Outcome", "Scenario", "SimulationError", "Summary", "jain", "run", "summarize"]
