"""Plan a run before renting GPUs: `python plan.py model=llama-3-8b target=gb200 devices=4`.

Takes train.py's configuration, compiles its training step ahead of time for the named GPUs, none of
which need be there, and prints what the step needs, does and should take. docs/planning.md says
which of it is compiled and which is a model.

Exit status: 0; 1 when the run does not fit into the GPUs' memory; 2 for a mistake in the command.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from rich.console import Console

from fp4zoo.configs import cli
from fp4zoo.configs.planning import PlanConfig
from fp4zoo.planning.compilation import compile_step
from fp4zoo.planning.forecast import Forecast, make_forecast
from fp4zoo.planning.search import search
from fp4zoo.planning.targets import find_target, use_cpu


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line (None: sys.argv's) and returns the exit status."""
    use_cpu()
    return cli.run(plan, argv, "plan")


def plan(config: PlanConfig) -> int:
    """Prints the forecast of one configuration, or of the best that a search finds."""
    target = find_target(config.target)
    console = Console(stderr=config.json)
    if config.search:
        forecast = search(config, target, console)
    else:
        with console.status(f"compiling for {config.devices} x {target.device_kind}"):
            forecast = make_forecast(config, target, compile_step(config, target, config.devices))
    _print(forecast, console)
    return 0 if forecast.fits else 1


def _print(forecast: Forecast, console: Console) -> None:
    if forecast.config.json:
        print(json.dumps(forecast.as_json()))
    else:
        forecast.print(console)


if __name__ == "__main__":
    sys.exit(main())
