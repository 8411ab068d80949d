"""Decisions that need the gradients of all stages: the sum over the uses of a tied parameter, and the global norm.

Both are computed in an order fixed by the layers, so that the result is the same to the bit for every cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .layers import Tie
from .runtime import TIE_CHANNEL
from .transport import Packet, ProcessGroups, Receiver, Sender


class TiedParameters:
    """Keeps the copies of every tied parameter equal: same initial values, same summed gradient.

    ``modules`` are this rank's layers by global index, ``ranks`` the position in the pipeline of every layer's rank.
    Raises ValueError when a declared name is no parameter or shapes differ.
    """

    def __init__(
        self,
        ties: Sequence[Tie],
        modules: Mapping[int, nn.Module],
        ranks: Sequence[int],
        position: int,
        groups: ProcessGroups | None,
        device: torch.device,
    ) -> None:
        self._ties = [tie for tie in ties if any(ranks[layer] == position for layer, _ in tie.uses)]
        self._ranks, self._position = ranks, position
        self._parameters = {
            use: _parameter(modules[use[0]], use[1]) for tie in self._ties for use in tie.uses if use[0] in modules
        }
        peers = {ranks[layer] for tie in self._ties for layer, _ in tie.uses} - {position}
        self._links: dict[int, tuple[Sender, Receiver]] = {}
        for peer in sorted(peers):
            assert groups is not None
            link = (groups.ranks[peer], TIE_CHANNEL, groups.forward, groups.control)
            self._links[peer] = (Sender(*link), Receiver(*link, device))
        self._earlier: dict[tuple[int, str], Tensor | None] = {}
        self._share_initial_values()

    @property
    def later_uses(self) -> frozenset[tuple[int, str]]:
        """Copies of a parameter that is counted at its first use."""
        return frozenset(use for tie in self._ties for use in tie.uses[1:])

    def begin(self) -> None:
        """Set gradients of earlier mini-batches aside, so that only this one's are summed over the uses."""
        for use, parameter in self._parameters.items():
            self._earlier[use] = parameter.grad
            parameter.grad = None

    def sum_gradients(self) -> None:
        """Give every use the sum of the gradients of all uses, added in layer order, on top of what was set aside."""
        for number, tie in enumerate(self._ties):
            own = {use: self._parameters[use].grad for use in tie.uses if use in self._parameters}
            gradients = self._exchange(("gradient", number), tie, own)
            total: Tensor | None = None
            for use in tie.uses:
                gradient = gradients[use]
                if gradient is not None:
                    total = gradient if total is None else total + gradient
            for use in own:
                earlier = self._earlier.pop(use, None)
                parameter = self._parameters[use]
                if total is None:
                    parameter.grad = earlier
                else:
                    parameter.grad = total.clone() if earlier is None else earlier + total

    def _share_initial_values(self) -> None:
        with torch.no_grad():
            for number, tie in enumerate(self._ties):
                own: dict[tuple[int, str], Tensor | None] = {
                    use: self._parameters[use].detach() for use in tie.uses if use in self._parameters
                }
                first = self._exchange(("value", number), tie, own)[tie.uses[0]]
                assert first is not None
                for use in own:
                    parameter = self._parameters[use]
                    if parameter.shape != first.shape:
                        raise ValueError(
                            f"ties: {use[1]!r} has shape {tuple(parameter.shape)}, not {tuple(first.shape)}"
                        )
                    if use != tie.uses[0]:
                        parameter.copy_(first)

    def _exchange(
        self, key: object, tie: Tie, own: Mapping[tuple[int, str], Tensor | None]
    ) -> dict[tuple[int, str], Tensor | None]:
        """The tensors of all uses, from the ranks that have them."""
        everything = dict(own)
        peers = sorted({self._ranks[layer] for layer, _ in tie.uses} - {self._position})
        for peer in peers:
            sender, receiver = self._links[peer]
            packet = Packet(tuple(own.values()), True, (False,) * len(own))
            # One side sends first, the other receives first: NCCL keeps the order of what a pair asks for.
            if self._position < peer:
                sender.send(key, packet)
                receiver.expect([key])
            else:
                receiver.expect([key])
                sender.send(key, packet)
        for peer in peers:
            sender, receiver = self._links[peer]
            theirs = [use for use in tie.uses if self._ranks[use[0]] == peer]
            everything.update(zip(theirs, receiver.receive().tensors, strict=True))
            sender.flush()
        return everything


def tied_pairs(ties: Sequence[Tie], ranks: Sequence[int]) -> set[tuple[int, int]]:
    """Pairs of positions between which tied parameters travel; ``ranks`` as for :class:`TiedParameters`."""
    homes = ({ranks[layer] for layer, _ in tie.uses} for tie in ties)
    return {pair for home in homes for pair in combinations(sorted(home), 2)}


def _parameter(module: nn.Module, name: str) -> nn.Parameter:
    try:
        return module.get_parameter(name)
    except AttributeError as error:
        raise ValueError(f"ties: {name!r} is no parameter of {type(module).__name__}") from error


def clip_grad_norm(
    modules: Mapping[int, nn.Module],
    later_uses: frozenset[tuple[int, str]],
    num_layers: int,
    max_norm: float,
    groups: ProcessGroups | None,
    device: torch.device,
) -> Tensor:
    """Scale gradients so that their norm over all layers is at most ``max_norm``; returns the norm before, float64.

    ``modules`` are this rank's layers by global index; ``later_uses`` of tied parameters are scaled but not counted.
    """
    norms = torch.zeros(num_layers, dtype=torch.float64, device=device)
    for index, module in modules.items():
        gradients = [
            parameter.grad
            for name, parameter in module.named_parameters()
            if parameter.grad is not None and (index, name) not in later_uses
        ]
        if gradients:
            norms[index] = nn.utils.get_total_norm(gradients).double()
    if groups is not None:
        dist.all_reduce(norms, group=groups.collective)  # exact: all entries but one of each sum are zero
    total = norms.square().sum().sqrt()
    parameters = [parameter for module in modules.values() for parameter in module.parameters()]
    nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total
