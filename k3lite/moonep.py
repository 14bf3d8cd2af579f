"""Perfect balance between ranks: copies of a few busy experts, planned anew for every batch and layer.

Experts live on ranks in contiguous ranges. If each token travels to its experts' home, the rank with the busiest
experts sets the pace. MoonEP lends experts out instead: with some redundant copies on other ranks, every rank
computes exactly as many tokens as every other.

    counts[r, e]    tokens that rank r has for expert e; every row sums to S k (S tokens a rank, k experts a token)
    share[r, e]     tokens of expert e that rank r computes; every row sums to S k, column e to e's tokens
    redundant       share[r, e] > 0 away from e's home: a copy of the expert's weights must come to r

Source of the promise: Kimi K3 report §5.2.1 as given in k3-architecture §2.7: every rank receives exactly S k tokens,
and at most E/R redundant experts a rank always suffice. How Moonshot plans was not read. The plan below is our
own construction, the alias method (Walker 1974) with ranks as its columns:

    a rank that has too few tokens takes all that it lacks from ONE rank that has too many, and is done;
    the giver may fall short by that, and then takes from one other rank in its turn.

A rank takes at most once, and gives only before it takes. So all that it gives is of its own experts, and all that a
rank takes is of one giver's: at most ceil(E/R) different experts, which is the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Plan:
    """Who computes what in one layer and batch. All tensors int64."""

    home: Tensor  # [E] the rank that owns each expert
    share: Tensor  # [R,E] tokens of each expert that each rank computes
    sent: Tensor  # [R,R,E] from which rank to which rank, of which expert

    @property
    def loads(self) -> Tensor:
        """[R] tokens that each rank computes."""
        return self.share.sum(1)

    @property
    def redundant(self) -> Tensor:
        """[R] experts of other ranks that each rank needs a copy of."""
        away = self.home != torch.arange(len(self.share)).unsqueeze(1)
        return ((self.share > 0) & away).sum(1)

    @property
    def traffic(self) -> Tensor:
        """[R,R] tokens from rank (row) to rank (column); the diagonal stays where it is."""
        return self.sent.sum(2)

    @property
    def slowest(self) -> float:
        """Tokens of the busiest rank over the mean; a layer waits for that rank. 1 is perfect."""
        return float(self.loads.max() / self.loads.double().mean()) if self.loads.any() else 1.0


def home_ranks(experts: int, ranks: int) -> Tensor:
    """[E]: the rank of each expert, in contiguous ranges that differ by at most one expert in length."""
    if not 1 <= ranks <= experts:
        raise ValueError(f"ranks: got {ranks} for {experts} experts, wanted 1 to {experts}")
    return torch.arange(experts) * ranks // experts


def most_redundant(experts: int, ranks: int) -> tuple[int, int]:
    """Redundant experts on one rank in the worst case: what any plan needs at least, what this plan needs at most.

    At least: one rank's experts get nothing and all others get the same. The empty rank must then take the load of
    E (R - 1) / R^2 experts (k3-architecture §2.7). At most: ceil(E/R), see above.
    """
    home_ranks(experts, ranks)  # checks them
    return -(-experts * (ranks - 1) // ranks**2), -(-experts // ranks)


def plan_at_home(counts: Tensor) -> Plan:
    """Every token goes to the home of its expert: no copies, no balance. counts: [R,E], see above."""
    home = _check(counts)
    at_home = home == torch.arange(len(counts)).unsqueeze(1)
    return _plan(counts, home, at_home * counts.sum(0))


def plan_balanced(counts: Tensor) -> Plan:
    """Every rank computes the same number of tokens, with at most ceil(E/R) redundant experts on each.

    counts: [R,E], see above.   Raises ValueError where the ranks do not bring the same number of tokens.
    """
    share = plan_at_home(counts).share
    home, brought = home_ranks(*reversed(counts.shape)), counts.sum(1)
    target = int(brought[0])
    if bool((brought != target).any()):
        raise ValueError(f"counts: the ranks bring {brought.tolist()} tokens, wanted the same from each")
    loads = share.sum(1)
    while int(loads.min()) < target:
        taker, giver = int(loads.argmin()), int(loads.argmax())
        moved = _largest_first(share[giver] * (home == giver), target - int(loads[taker]))
        share[giver] -= moved
        share[taker] += moved
        loads = share.sum(1)
    return _plan(counts, home, share)


def _largest_first(held: Tensor, amount: int) -> Tensor:
    """[E] `amount` tokens out of held [E], from the largest entries on: the fewest experts that will do."""
    order = held.argsort(descending=True, stable=True)
    before = held[order].cumsum(0) - held[order]
    moved = torch.zeros_like(held)
    moved[order] = (amount - before).clamp(min=0).minimum(held[order])
    return moved


def _plan(counts: Tensor, home: Tensor, share: Tensor) -> Plan:
    """Decide whose tokens go where: what a rank can compute of its own stays, the rest is matched up in order."""
    stays = counts.minimum(share)
    left, room = counts - stays, share - stays
    start, place = left.cumsum(0) - left, room.cumsum(0) - room  # intervals on one line for each expert
    end = torch.minimum((start + left).unsqueeze(1), (place + room).unsqueeze(0))
    sent = (end - torch.maximum(start.unsqueeze(1), place.unsqueeze(0))).clamp(min=0)
    sent.diagonal().add_(stays.T)
    return Plan(home, share, sent)


def _check(counts: Tensor) -> Tensor:
    """The experts' homes. Raises ValueError unless counts are whole numbers [R,E] from 0 on."""
    if counts.dim() != 2 or counts.dtype != torch.int64 or bool((counts < 0).any()):
        raise ValueError(f"counts: got {counts.dtype} of shape {tuple(counts.shape)}, wanted int64 [R,E] of 0 or more")
    return home_ranks(counts.shape[1], counts.shape[0])
