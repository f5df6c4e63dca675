"""Every value of an experiment, where it came from, and what follows from them: the text of `--explain`. Pure."""

from __future__ import annotations

from hotloop.experiment.load import Loaded, flatten
from hotloop.loop.resuming import plan_run
from hotloop.loop.support import find_support


def render_explanation(loaded: Loaded) -> str:
    """Render one line per value, then the derived ones."""
    experiment = loaded.experiment
    rows = []
    for path, value in flatten(experiment.model_dump(mode="json")):
        origin = loaded.origin(path)
        if find_support(path).role == "cluster":
            origin += ", cluster only"
        rows.append((path, repr(value), origin))
    plan = plan_run(experiment, None)
    per_round = experiment.sampling.num_groups * experiment.sampling.group_size
    steps = experiment.rounds * experiment.optimizer.steps_per_round
    rows += [
        ("rollouts per round", str(per_round), "derived: num_groups x group_size"),
        ("rollouts per optimizer step", str(per_round // experiment.optimizer.steps_per_round), "derived"),
        ("optimizer steps", str(steps), "derived: rounds x steps_per_round; horizon of the learning rate"),
        ("rounds saved", " ".join(map(str, plan.saves)) or "none", "derived: checkpoint_interval and the last"),
    ]
    width = max(len(path) for path, _, _ in rows)
    value_width = min(40, max(len(value) for _, value, _ in rows))
    return "\n".join(f"{path:<{width}}  {value:<{value_width}}  {origin}" for path, value, origin in rows)
