"""The transfers of a timeline by their content: a bucket of the plan, a unit, or other values.

for group in group_transfers(timeline, plan, fabric):
    print(group.label, group.name, group.choice.algorithm, group.waited_seconds)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jddp.inspection.collectives import bucket_of, is_backward, purpose_of
from jddp.reduce.plan import Bucket, BucketPlan
from jddp.workbench.modelled.links import Choice, Fabric
from jddp.workbench.modelled.schedule import Timeline, Transfer


@dataclass(frozen=True)
class TransferGroup:
    """The runs of one bucket's or unit's collective, or of all other collectives of a kind.

    Attributes:
      label: "bucket 3" or "unit 3", numbered as in the plan; or empty.
      purpose: Use of the values that it sends.
      paths: Names of the parameters.
      choices: Algorithm that is assumed for each run.
      transfers: The runs, in order.
    """

    label: str
    purpose: str
    paths: tuple[str, ...]
    choices: tuple[Choice, ...]
    transfers: tuple[Transfer, ...]

    @property
    def op(self) -> str:
        """Name of the collective."""
        return self.transfers[0].op

    @property
    def dtype(self) -> str:
        """Dtypes on the wire."""
        return ",".join(dict.fromkeys(self.transfers[0].collectives[0].dtypes))

    @property
    def bytes(self) -> int:
        """Bytes of all runs."""
        return sum(x.bytes for x in self.transfers)

    @property
    def choice(self) -> Choice:
        """The algorithm of the longest run."""
        return max(self.choices, key=lambda choice: choice.seconds)

    @property
    def sent_bytes(self) -> float:
        """Bytes that each GPU sends in all runs."""
        return sum(x.sent_bytes for x in self.choices)

    @property
    def host_bytes(self) -> float:
        """Bytes that each host sends to other hosts in all runs."""
        return sum(x.host_bytes for x in self.choices)

    @property
    def needed_seconds(self) -> float:
        """Time that all runs are under way."""
        return sum(x.needed_seconds for x in self.transfers)

    @property
    def waited_seconds(self) -> float:
        """Time that computing stands still for them."""
        return sum(x.waited_seconds for x in self.transfers)

    @property
    def name(self) -> str:
        """The first and the last parameter; or else the purpose."""
        ends = dict.fromkeys((self.paths[0], self.paths[-1])) if self.paths else (self.purpose,)
        return " .. ".join(ends)


def group_transfers(
    timeline: Timeline, plan: BucketPlan, fabric: Fabric
) -> tuple[TransferGroup, ...]:
    """Groups the transfers of a timeline, in the order in which they first start.

    A gather of parameters does not name its bucket or unit: it is the one of its size that comes
    next in the plan, or in the backward pass before.
    """
    planned = _Planned(plan)
    by_name: dict[str, list[Transfer]] = {}
    for transfer in sorted(timeline.transfers, key=lambda x: x.started_at):
        by_name.setdefault(transfer.name, []).append(transfer)
    found, others = list[TransferGroup](), dict[tuple[str, str], list[Transfer]]()
    for transfers in by_name.values():
        first = transfers[0]
        purpose = purpose_of(first.collectives[0])
        number = planned.number(first, purpose)
        if number is None:
            others.setdefault((purpose, first.op), []).extend(transfers)
        else:
            label, paths = planned.label(number), planned.items[number].paths
            found.append(_group(label, purpose, paths, transfers, fabric))
    rest = (_group("", purpose, (), each, fabric) for (purpose, _), each in others.items())
    return (*found, *rest)


def _group(
    label: str, purpose: str, paths: tuple[str, ...], runs: Sequence[Transfer], fabric: Fabric
) -> TransferGroup:
    choices = [fabric.among(x.collectives[0].devices).best(x.bytes, x.op) for x in runs]
    return TransferGroup(label, purpose, paths, tuple(choices), tuple(runs))


class _Planned:
    """The buckets and units of a plan, and which of them have been found in a program."""

    def __init__(self, plan: BucketPlan) -> None:
        self.num_buckets = len(plan)
        self.items: tuple[Bucket, ...] = (*plan.buckets, *(x.bucket for x in plan.units))
        self._taken: dict[str, set[int]] = {}

    def label(self, number: int) -> str:
        if number < self.num_buckets:
            return f"bucket {number}"
        return f"unit {number - self.num_buckets}"

    def number(self, transfer: Transfer, purpose: str) -> int | None:
        sent = transfer.collectives[0]
        if (bucket := bucket_of(sent)) is not None:
            return bucket if bucket < self.num_buckets else None
        if not purpose.startswith(("parameters", "gradients")):
            return None
        taken = self._taken.setdefault(purpose, set())
        fitting = [x for x in self._fitting(sent.num_elements) if x not in taken]
        if not fitting:
            return None
        number = fitting[-1 if is_backward(sent.op_name) else 0]
        taken.add(number)
        return number

    def _fitting(self, num_elements: int) -> Iterator[int]:
        """Numbers of those that have as many elements, which may have been padded."""
        for number, item in enumerate(self.items):
            if item.size <= num_elements <= 1.02 * item.size + 1024:
                yield number
