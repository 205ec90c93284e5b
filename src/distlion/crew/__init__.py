"""A crew: workers that train together while some of them are lost, return or join."""

from distlion.crew.changes import CrewTraffic
from distlion.crew.crew import Crew
from distlion.crew.local_steps import CrewLocalSteps
from distlion.crew.memory import NOW
from distlion.crew.optimizer import CrewLion
from distlion.crew.sampler import CrewSampler
from distlion.crew.store import DEFAULT_PORT, name_run, start_store

__all__ = [
    "DEFAULT_PORT",
    "NOW",
    "Crew",
    "CrewLion",
    "CrewLocalSteps",
    "CrewSampler",
    "CrewTraffic",
    "name_run",
    "start_store",
]
