"""The pipeline schedules of the catalog, by kind."""

from titan_dit.config import catalog
from titan_dit.pipeline.schedules import looped
from titan_dit.pipeline.schedules.schedule import Schedule, schedule_of

SCHEDULES = tuple(catalog.SCHEDULES)
INTERLEAVED = tuple(name for name in SCHEDULES if schedule_of(name).interleaved)
V_SHAPED = tuple(name for name in SCHEDULES if schedule_of(name).v_shaped)
SPLIT_BACKWARD = tuple(name for name in SCHEDULES if schedule_of(name).splits_backward)

OWN = Schedule(program=looped.gpipe)
LATER = Schedule(program=looped.gpipe, torch="X")
OTHER = Schedule(program=looped.gpipe, torch="1F1B")
