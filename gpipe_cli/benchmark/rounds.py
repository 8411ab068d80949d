"""The order of measuring: configurations that are compared take turns, a round each, several rounds.

On a CPU all of a group are alive at once and sleep between their turns; a round starts with another one each time. On
GPUs, where memory is what they would take from one another, each is started, measured in all rounds and ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gpipe_cli.benchmark.member import Member
from gpipe_cli.benchmark.results import Result
from gpipe_cli.benchmark.survey import rank_plan
from gpipe_cli.benchmark.worker import Finish, Measure, Prepare, Request
from gpipe_cli.errors import GpipeError

if TYPE_CHECKING:
    from gpipe_cli.benchmark.grid import Case
    from gpipe_cli.config_bench import BenchConfig

# Told how many steps have been made since the last time.
Tell = Callable[[int], None]


def steps_of_rounds(num_steps: int, num_rounds: int) -> list[int]:
    """Steps of each round, as even as possible."""
    base, extra = divmod(num_steps, num_rounds)
    return [base + (index < extra) for index in range(num_rounds)]


def measure_group(config: BenchConfig, cases: Sequence[Case], device_type: str, tell: Tell) -> list[Result]:
    """Measure configurations that are to be compared. A failed one does not stop the others; its result says why."""
    if device_type == "cuda":
        return [result for case in cases for result in _measure_in_turn(config, [case], tell)]
    return _measure_in_turn(config, cases, tell)


def _measure_in_turn(config: BenchConfig, cases: Sequence[Case], tell: Tell) -> list[Result]:
    results = [Result(case=case) for case in cases]
    members: list[Member | None] = []

    def ask(index: int, request: Request, num_steps: int) -> object:
        """The answer, or None when there is none any more."""
        member = members[index]
        if member is None:
            return None
        try:
            return member.ask(request)
        except GpipeError as error:
            results[index].error = error
            member.close()
            members[index] = None
            return None
        finally:
            if num_steps:
                tell(num_steps)

    try:
        for case in cases:
            members.append(Member(config, case, rank_plan(config, case)))
        for index, result in enumerate(results):
            result.ready = ask(index, Prepare(), config.warmup_steps)  # type: ignore[assignment]
        for number, num_steps in enumerate(steps_of_rounds(config.steps, config.rounds)):
            for place in range(len(cases)):
                index = (place + number) % len(cases)
                spells = ask(index, Measure(num_steps=num_steps), num_steps)
                if isinstance(spells, list):
                    results[index].spells.append(spells)
        for index, result in enumerate(results):
            result.end = ask(index, Finish(trace=config.trace), 0)  # type: ignore[assignment]
    finally:
        for member in members:
            if member is not None:
                member.close()
    return results
