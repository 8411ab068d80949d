"""The orders of work: from numbers of stages, micro-batches and ranks to a schedule. No torch here.

Fill-drain ("gpipe") follows the paper, section 2.3 and Figure 2c (arXiv 1811.06965); "1f1b" starts a micro-batch's
backward pass as soon as its forward pass has left the pipeline, as PipeDream-flush and Megatron-LM do; "eager_1f1b" is
1f1b with more forward passes ahead (Zhuang et al. 2023, arXiv 2211.05322, section 4, for hiding transfers). Ours go as
far ahead as the first gradient takes to come back, and the cut gives earlier ranks, which then wait less, more layers
(see cut_weights): that saves a third to a half of what the bubble costs. "zero_bubble" runs as far ahead and, in the
same measure at the other end, leaves the weights' gradients of the last micro-batches to when all others have been sent
(Qi et al. 2023, arXiv 2401.10241, whose schedules are others): half of the bubble or more is gone, with an even cut.

Fill-drain for K = 3 stages and M = 3 micro-batches (time runs to the right; F forward, B backward)::

    rank 0   F0 F1 F2             B2 B1 B0
    rank 1      F0 F1 F2       B2 B1 B0
    rank 2         F0 F1 F2 B2 B1 B0
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import pairwise

from .schedule import (
    B,
    F,
    Operation,
    OperationKind,
    R,
    Schedule,
    W,
    deferred_in,
    max_held_micro_batches,
    stage_weights,
)
from .sizes import relative_sizes

POLICIES = ("gpipe", "1f1b", "eager_1f1b", "zero_bubble", "interleaved")
REMAT_MODES = ("full", "except_last", "none", "auto")


def place_stages(num_stages: int, num_ranks: int, policy: str) -> tuple[tuple[int, ...], ...]:
    """The stages of each rank: consecutive ones, as even as possible, or dealt in turn for "interleaved".

    Raises ValueError unless 1 <= num_ranks <= num_stages and, for "interleaved", every rank gets as many.
    """
    if not 1 <= num_ranks <= num_stages:
        raise ValueError(f"num_ranks={num_ranks}: {num_stages} stages need between 1 and {num_stages} ranks")
    if policy == "interleaved":
        if num_stages % num_ranks:
            raise ValueError(
                f"schedule=interleaved: {num_stages} stages cannot be dealt evenly to {num_ranks} ranks; "
                f"use a multiple of {num_ranks} partitions"
            )
        return tuple(tuple(range(rank, num_stages, num_ranks)) for rank in range(num_ranks))
    base, extra = divmod(num_stages, num_ranks)
    starts = [rank * base + min(rank, extra) for rank in range(num_ranks + 1)]
    return tuple(tuple(range(a, b)) for a, b in pairwise(starts))


def make_schedule(
    num_stages: int,
    num_micro_batches: int,
    policy: str = "gpipe",
    remat: str = "full",
    num_ranks: int | None = None,
    kept: Sequence[int] | None = None,
    taper: bool = False,
) -> Schedule:
    """The training schedule of one mini-batch.

    ``remat``: "full" recomputes every micro-batch whose backward pass does not follow its forward pass at once (there
    is nothing to save there: the activations are still needed); "except_last" also spares the last micro-batch, as
    torchgpipe does; "none" keeps all activations; "auto" recomputes only what is needed to hold the activations of at
    most ``kept[stage]`` micro-batches at any time; 0 is as "full". "zero_bubble" defers no weights' gradients past the
    next operation where that would hold recomputed activations for longer. ``taper`` makes the first and last
    micro-batches smaller than the others (see sizes): with "1f1b" and its kin that shortens the bubble, "gpipe" gets
    slower. Raises ValueError naming the argument.
    """
    if policy not in POLICIES:
        raise ValueError(f"schedule={policy}: choose one of {', '.join(POLICIES)}")
    if remat not in REMAT_MODES:
        raise ValueError(f"remat={remat}: choose one of {', '.join(REMAT_MODES)}")
    if num_micro_batches < 1:
        raise ValueError(f"num_micro_batches={num_micro_batches}: give a whole number of 1 or more")
    if (remat == "auto") != (kept is not None):
        raise ValueError("kept belongs to remat=auto: give both or neither")
    if kept is not None and (len(kept) != num_stages or min(kept) < 0):
        raise ValueError(f"kept={list(kept)}: give one number of 0 or more for each of the {num_stages} stages")
    stages_of_rank = place_stages(num_stages, num_ranks if num_ranks is not None else num_stages, policy)
    order = {
        "gpipe": _fill_drain, "1f1b": _1f1b, "eager_1f1b": _eager_1f1b, "zero_bubble": _zero_bubble,
        "interleaved": _interleaved,
    }[policy]  # fmt: skip
    bare = tuple(
        tuple(order(rank, len(stages_of_rank), stages, num_micro_batches)) for rank, stages in enumerate(stages_of_rank)
    )
    plain = Schedule(policy, remat, num_stages, num_micro_batches, stages_of_rank, bare, taper)
    if remat == "none":
        return plain
    if kept is not None:
        by_stage = dict(enumerate(kept))
        return replace(plain, operations=tuple(rank_operations(plain, r, by_stage) for r in range(plain.num_ranks)))
    spared = {(stage, num_micro_batches - 1) for stage in range(num_stages)} if remat == "except_last" else set()
    return replace(plain, operations=tuple(tuple(_recomputing(ops, spared)) for ops in bare))


def cut_weights(schedule: Schedule) -> tuple[float, ...]:
    """How much a layer's work counts on each stage when a network is cut for ``schedule``.

    A stage that does more in a mini-batch, see stage_weights, gets fewer layers. With "eager_1f1b" the first rank need
    not wait, and any rank can work only from when the first micro-batch reaches it until its last gradient leaves: less
    than the rank before by what that one takes for one micro-batch (the first one's forward and the last one's backward
    pass, where their sizes are tapered). Its layers count for more in the same measure, so
    that all ranks are done when the first one is. That needs enough micro-batches to go ahead with: fewer than two for
    each rank leave the cut even.
    """
    work = stage_weights(schedule)
    num_micro_batches, num_ranks = schedule.num_micro_batches, schedule.num_ranks
    if schedule.policy != "eager_1f1b" or num_micro_batches < 2 * num_ranks:
        return work
    weights, room = list(work), 1.0
    sizes = relative_sizes(num_micro_batches, schedule.tapered)
    one_micro_batch = (sizes[0] + 2 * sizes[-1]) / 3 / num_micro_batches
    for stages in schedule.stages_of_rank:
        for stage in stages:
            weights[stage] = work[stage] / room
        # Its forward and backward pass of one micro-batch; what it recomputes delays nobody.
        room -= room * len(stages) / sum(work[stage] for stage in stages) * one_micro_batch
    return tuple(weights)


def weights_for_cut(
    num_stages: int,
    num_micro_batches: int,
    policy: str,
    remat: str,
    num_ranks: int | None = None,
    taper: bool = False,
) -> tuple[float, ...]:
    """The weights of such a schedule's stages, see cut_weights and remat_for_cut."""
    remat = remat_for_cut(remat)
    return cut_weights(make_schedule(num_stages, num_micro_batches, policy, remat, num_ranks, taper=taper))


def remat_for_cut(remat: str) -> str:
    """What a network is cut for: what remat=auto recomputes depends on the cut, until then as if it were everything."""
    return "full" if remat == "auto" else remat


def rank_operations(schedule: Schedule, rank: int, kept: Mapping[int, int]) -> tuple[Operation, ...]:
    """What ``rank`` runs in this order of work with remat=auto, where its stage s holds the activations of at most
    ``kept[s]`` micro-batches at any time."""
    bare = keeping_all(schedule.operations[rank])
    spared = {(stage, m) for stage, count in kept.items() for m in _spared(schedule, bare, stage, count)}
    return tuple(_recomputing(bare, spared))


def keeping_all(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """What a rank runs in this order of work with remat=none."""
    last = tuple(op for op in operations if op.kind is W)
    return (*(op for op in operations if op.kind is F or op.kind is B), *last)


def make_forward_schedule(num_micro_batches: int, stages_of_rank: tuple[tuple[int, ...], ...]) -> Schedule:
    """The schedule of an evaluation on stages placed so: forward passes only."""
    num_ranks = len(stages_of_rank)
    operations = tuple(
        tuple(
            Operation(stage, F, micro_batch)
            for group in _groups(num_micro_batches, num_ranks if _is_dealt(stages) else 1)
            for stage in stages
            for micro_batch in group
        )
        for stages in stages_of_rank
    )
    num_stages = sum(len(stages) for stages in stages_of_rank)
    return Schedule("forward", "none", num_stages, num_micro_batches, stages_of_rank, operations)


def _is_dealt(stages: tuple[int, ...]) -> bool:
    return len(stages) > 1 and stages[1] - stages[0] > 1


def _pass(kind: OperationKind, stages: Sequence[int], micro_batch: int) -> Iterable[Operation]:
    """A micro-batch through consecutive stages: forward in order, backward in reverse."""
    return (Operation(stage, kind, micro_batch) for stage in (stages if kind is F else reversed(stages)))


def _fill_drain(rank: int, num_ranks: int, stages: tuple[int, ...], num_micro_batches: int) -> Iterable[Operation]:
    del rank, num_ranks  # the order is the same on every rank
    for m in range(num_micro_batches):
        yield from _pass(F, stages, m)
    for m in reversed(range(num_micro_batches)):
        yield from _pass(B, stages, m)


def _1f1b(rank: int, num_ranks: int, stages: tuple[int, ...], num_micro_batches: int) -> Iterable[Operation]:
    return _in_turn(num_ranks - 1 - rank, stages, num_micro_batches)


def _eager_1f1b(rank: int, num_ranks: int, stages: tuple[int, ...], num_micro_batches: int) -> Iterable[Operation]:
    # The first gradient returns after a forward and a backward pass, three forward passes' time, of every later rank.
    return _in_turn(3 * (num_ranks - 1 - rank), stages, num_micro_batches)


def _zero_bubble(rank: int, num_ranks: int, stages: tuple[int, ...], num_micro_batches: int) -> Iterable[Operation]:
    # The mirror image of running ahead: the last gradients leave a rank early, while the ranks before it have most left
    # to do.
    first_deferred = num_micro_batches - min(num_micro_batches, 3 * rank)
    yield from _eager_1f1b(rank, num_ranks, stages, num_micro_batches)
    for m in range(first_deferred, num_micro_batches):
        yield from _pass(W, stages, m)


def _in_turn(num_ahead: int, stages: tuple[int, ...], num_micro_batches: int) -> Iterable[Operation]:
    """Some forward passes ahead, then one forward and one backward pass in turn, then the rest of the backward ones."""
    num_ahead = min(num_micro_batches, num_ahead)
    for m in range(num_ahead):
        yield from _pass(F, stages, m)
    for m in range(num_ahead, num_micro_batches):
        yield from _pass(F, stages, m)
        yield from _pass(B, stages, m - num_ahead)
    for m in range(num_micro_batches - num_ahead, num_micro_batches):
        yield from _pass(B, stages, m)


def _interleaved(rank: int, num_ranks: int, stages: tuple[int, ...], num_micro_batches: int) -> Iterable[Operation]:
    """One forward, one backward over stages that are dealt to the ranks in turn (Narayanan et al. 2021, section 2.2).

    Micro-batches go in groups of one per rank: a group passes a rank's first stage, then its second, and so on.
    """
    groups = _groups(num_micro_batches, num_ranks)
    forward = [Operation(stage, F, m) for group in groups for stage in stages for m in group]
    backward = [Operation(stage, B, m) for group in groups for stage in reversed(stages) for m in group]
    num_ahead = (num_ranks - rank - 1) * 2 + (len(stages) - 1) * num_ranks
    if num_micro_batches % num_ranks:  # a short last group breaks the even step: fill first, then drain
        num_ahead = len(forward)
    num_ahead = min(num_ahead, len(forward))
    yield from forward[:num_ahead]
    for ahead, behind in zip(forward[num_ahead:], backward, strict=False):
        yield ahead
        yield behind
    yield from backward[len(forward) - num_ahead :]


def _groups(num_micro_batches: int, size: int) -> list[range]:
    return [range(start, min(start + size, num_micro_batches)) for start in range(0, num_micro_batches, size)]


def _recomputing(operations: Iterable[Operation], spared: Set[tuple[int, int]]) -> Iterator[Operation]:
    """Operations with recomputation before each backward pass but those of the ``spared`` (stage, micro-batch).

    Gradients of weights keep activations until they are computed: those of the others' no longer than needed.
    """
    operations = tuple(operations)
    deferred = deferred_in(operations) - spared
    previous: Operation | None = None
    for op in operations:
        if op.kind is W and (op.stage, op.micro_batch) in deferred:
            continue
        if op.kind is B:
            still_fresh = previous == Operation(op.stage, F, op.micro_batch)
            if not still_fresh and (op.stage, op.micro_batch) not in spared:
                yield Operation(op.stage, R, op.micro_batch)
        yield op
        if op.kind is B and (op.stage, op.micro_batch) in deferred:
            yield Operation(op.stage, W, op.micro_batch)
        previous = op


def _spared(schedule: Schedule, bare: Sequence[Operation], stage: int, kept: int) -> Sequence[int]:
    """Micro-batches that ``stage`` need not recompute when it may hold the activations of ``kept`` at any time."""
    num_micro_batches = schedule.num_micro_batches
    in_flight = max_held_micro_batches(bare, stage)
    if kept >= in_flight:
        return range(num_micro_batches)
    if schedule.policy == "gpipe":
        # The last ones, whose backward passes come first: they are gone when the first recomputation needs room.
        return range(num_micro_batches - kept, num_micro_batches)
    # Any so many consecutive micro-batches are in flight together. One place stays for the one being recomputed, unless
    # all that are kept are gone by then.
    regular = [m for m in range(num_micro_batches) if m % in_flight < kept]
    tried = tuple(_recomputing(bare, {(stage, m) for m in regular}))
    if max_held_micro_batches(tried, stage) <= kept:
        return regular
    return [m for m in regular if m % in_flight < kept - 1]
