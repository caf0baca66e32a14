"""Records of checkpoints that have what every run's record has."""

SECTIONS = {
    **{section: {"name": "a"} for section in ("model", "objective", "data", "optimizer")},
    "job": {},
    "checkpoint": {"resume": "auto"},
    "ema": {"decays": []},
}


def of_run(step=7, config=None, **more):
    """The record of a run after `step`; `config`: its sections that matter."""
    about = {"count": 0, "digest": ""} | more.pop("data", {})
    config = SECTIONS | (config or {})
    return {"step": step, "cursor": step, "config": config, "data": about, **more}
