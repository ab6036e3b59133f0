"""Divides epochs among sources in whole numbers: each epoch, and all together, exact to one.

    quotas = Quotas((Fraction(5, 2), Fraction(3, 2)))    # of epochs of four examples
    quotas.before(1)                                     # (3, 1)
    quotas.before(2)                                     # (5, 3)

In each epoch a source takes its quota, rounded down or up, and before each epoch it has taken the
sum of its quotas, rounded down or up. The rounding is a scheduling problem: sources are periodic
tasks, the examples that are left when all quotas are rounded down are processors, and an epoch is a
unit of time. The rule below always finds a schedule.

References:
  Baruah et al., "Proportionate Progress: A Notion of Fairness in Resource Allocation", Algorithmica
  1996, for the problem, and that it has a solution.
  Anderson and Srinivasan, "Mixed Pfair/ERfair Scheduling of Asynchronous Periodic Tasks", Journal
  of Computer and System Sciences 2004, for the rule (PD2).
"""

import math
from collections.abc import Sequence
from fractions import Fraction


class Quotas:
    """Whole numbers of examples of each source, by epoch.

    Args:
      quotas: Number of examples that each source should take in an epoch; not negative. Their sum
        is a whole number.
    """

    def __init__(self, quotas: Sequence[Fraction]):
        self._quotas = tuple(quotas)
        self._rests = [quota % 1 for quota in quotas]
        # After so many epochs all sums of quotas are whole numbers, and the roundings repeat.
        self._period = math.lcm(*(rest.denominator for rest in self._rests))
        # How many quotas of each source were rounded up before each epoch of a period.
        self._rounded_up = [(0,) * len(self._quotas)]

    def before(self, epoch: int) -> tuple[int, ...]:
        """Returns how many examples each source has taken before an epoch."""
        within = epoch % self._period
        while len(self._rounded_up) <= within:
            self._rounded_up.append(self._after_next_epoch())
        sums = [quota * (epoch - within) + math.floor(quota) * within for quota in self._quotas]
        return tuple(int(x) + up for x, up in zip(sums, self._rounded_up[within], strict=True))

    def _after_next_epoch(self) -> tuple[int, ...]:
        """Rounds up the quotas of those sources that can wait least."""
        epoch = len(self._rounded_up)
        counts = self._rounded_up[-1]
        may = [i for i, rest in enumerate(self._rests) if counts[i] < rest * epoch]
        may.sort(key=lambda i: _urgency(self._rests[i], counts[i] + 1))
        chosen = may[: int(sum(self._rests))]
        return tuple(count + (i in chosen) for i, count in enumerate(counts))


def _urgency(rest: Fraction, count: int) -> tuple[int, bool, int]:
    """A key that sorts sources by how little they can wait.

    Args:
      rest: Fractional part of a source's quota, above 0.
      count: How many of its quotas will have been rounded up.
    """
    exact = count / rest
    last = math.ceil(exact)  # epoch, counted from one
    # Of two sources with one last epoch, the one whose next turn may come in that epoch too is
    # first, and then the one that leaves out an epoch latest.
    is_alone = last == exact
    left_out = math.ceil(math.ceil(last * (1 - rest)) / (1 - rest)) if rest > Fraction(1, 2) else 0
    return last, is_alone, -left_out
