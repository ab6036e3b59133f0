"""Strategies: how parameters and the optimizer's state are kept, and when replicas synchronize.

    "ddp"              equal on all replicas, which average gradients in each step
    "zero1"            the same, and each replica keeps a shard of the optimizer's state
    "fsdp"             each replica keeps a part of parameters, their average and that state
    LocalSteps(16)     each replica's own, averaged every 16 steps

One is chosen, and decides on several parts of the step together. `Strategy` lists its decisions;
`jddp.LogicalReplicas`, in the workbench, is another. The pairs of options that conflict are refused
here.

    steps 1 to H of local steps    each replica alone: its rows, its gradient, its optimizer
    after step H                   outer parameters - own ─► bucketed mean ─► outer optimizer ─► all
"""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from typing import final

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from jddp.config.options import Reduction
from jddp.engine.guard import unscaled
from jddp.engine.mesh import axis_of, count_processes, platform
from jddp.engine.micro_batches import Local, View
from jddp.engine.optimizer import OPTIMIZER
from jddp.engine.placement import FullySharded
from jddp.engine.state import KeepsOwn, TrainState, is_float, name_of, own_layouts
from jddp.engine.step import EVERY_STEP, Averaged, Placement, Replicas, Synchronization
from jddp.ground.errors import ConfigError
from jddp.ground.typing import ModelState, Params, Path, PyTree, Shaped
from jddp.modules.base import FlaxModel
from jddp.reduce import hooks
from jddp.reduce.backward import Finished
from jddp.reduce.lazy import Lazy
from jddp.reduce.plan import BucketPlan
from jddp.reduce.reducer import Reducer, bucket_sizes, choose_layout
from jddp.reduce.shards import Groups, divided_dim, exchange_on
from jddp.reduce.units import Gather

MEAN = optax.sgd(1.0)

# Pairs of options that cannot be combined, and why. They are refused by their names: the parts
# themselves know nothing of each other.
REFUSED = {
    ("fsdp", "reduction.hook"): "the backward pass of the gathers averages gradients",
    ("fsdp", "reduction.overlap=True"): "gradients leave inside the backward pass anyway",
    ("fsdp", "reduction.layout='leaf'"): "parameters of a unit are gathered as one vector",
    ("fsdp", "reduction.wire_dtype='float16'"): "its sums cannot be scaled; see bfloat16",
    ("fsdp", "batch_norm='local' or 'broadcast'"): "a replica without valid rows would send NaN",
    ("logical replicas", "reduction.hook"): "gradients are added in one order, which no hook keeps",
    ("logical replicas", "reduction.wire_dtype"): "sums would round by the number of devices",
    ("logical replicas", "reduction.overlap=True"): "gradients of several replicas are added first",
    ("local steps", "reduction.hook"): "a hook reduces gradients of each step; see wire_dtype",
    ("local steps from the first", "reduction.overlap=True"): "outer steps follow backward passes",
    ("reduction.layout='leaf'", "reduction.overlap=True"): "leaves are reduced one by one",
}


class Strategy:
    """The decisions of a strategy; here the decisions of "ddp".

    Attributes:
      name: Name of the strategy in `REFUSED`; none where nothing is refused.
      number: Fixed number of replicas; None for one on each device.
      sends_buckets: Whether each step sends gradients in buckets, and a backward pass could overlap
        with them.
      shards_optimizer: Whether each replica updates its shard of the parameters.
    """

    name = ""
    number: int | None = None
    sends_buckets = True
    shards_optimizer = False

    @property
    def sync(self) -> Synchronization:
        """The synchronization of the replicas."""
        return EVERY_STEP

    def replicas(self, axis: str, model: FlaxModel) -> Replicas:
        """Returns the replicas of a model."""
        return Replicas(axis, model)

    def packed(
        self, layout: hooks.BucketLayout, hook: hooks.CommHook | None, mesh: jax.sharding.Mesh
    ) -> hooks.Packed:
        """Returns the packing of gradients, with its hook and the name of a custom one."""
        on_network = count_processes(mesh) > 1
        return hooks.choose_packing(
            layout, hook, platform(mesh), on_network=on_network, is_sharded=self.shards_optimizer
        )

    def placement(self, reducer: Reducer, mesh: jax.sharding.Mesh) -> Placement:
        """Returns the placement of parameters.

        Args:
          reducer: Reducer of the gradients of whole parameters.
          mesh: The devices.
        """
        return Placement()


@dataclasses.dataclass(frozen=True)
class ZeRO1(Strategy):
    """Each replica updates its shard of every parameter, and keeps the optimizer's state for it.

    An optimizer that does not update each element by itself, such as Muon, gets whole arrays for
    the update: its equations show which it is.

    References:
      Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
      2020, stage 1. https://arxiv.org/abs/1910.02054.
    """

    shards_optimizer = True


@dataclasses.dataclass(frozen=True)
class FSDP(Strategy):
    """Each replica keeps a part of each parameter, and gathers the rest where the model uses it.

    A parameter is divided along the largest of its dims that the number of replicas divides; one
    that has none stays whole. The optimizer's state is divided in the same way, and optimizers that
    need whole arrays get them, as with `ZeRO1`.

    Attributes:
      regather: Whether parameters are gathered again in the backward pass. If not, they are kept
        from the forward pass: that is faster, and takes the memory of all parameters.
      group_size: Number of neighbouring replicas that divide parameters among them: the GPUs of a
        host, whose links are fast. Each group has a whole copy, and groups average their gradients,
        each replica its part. None for one group, of all replicas.

    Raises:
      ConfigError: If the size is not a number of at least 2.

    References:
      Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023.
      https://arxiv.org/abs/2304.11277.
    """

    regather: bool = True
    group_size: int | None = None
    name = "fsdp"
    sends_buckets = False

    def __post_init__(self) -> None:
        """Refuses a size that is no number, or of one replica."""
        size = self.group_size
        if size is not None and (type(size) is not int or size < 2):
            raise ConfigError(
                f"FSDP: group_size is a number of replicas, at least 2, or None for all; got "
                f"{size!r}. Parameters that are whole on each replica are strategy='ddp'."
            )

    def groups(self, num_replicas: int) -> Groups:
        """Returns the groups of so many replicas.

        Raises:
          ConfigError: If groups of this size are not all of them, with the sizes that would do.
        """
        size = self.group_size or num_replicas
        if num_replicas % size:
            sizes = [k for k in range(2, num_replicas + 1) if num_replicas % k == 0]
            raise ConfigError(
                f"strategy.group_size={size} does not divide {num_replicas} replicas. Choose "
                + (f"one of {sizes}." if sizes else "None.")
            )
        return Groups(size, num_replicas // size)

    def placement(self, reducer: Reducer, mesh: jax.sharding.Mesh) -> Placement:
        """Returns the placement of divided parameters; on one device they are whole."""
        groups = self.groups(mesh.size)
        if groups.size == 1:
            logging.getLogger("jddp").warning("strategy='fsdp' on one device is 'ddp'.")
            return Placement()
        exchange = exchange_on(platform(mesh), groups)
        gather = Gather(reducer.axis, exchange, groups, reducer.wire_dtype)
        return FullySharded(Lazy(gather, reducer.bucket_bytes, keeps=not self.regather))


@final
@dataclasses.dataclass(frozen=True)
class LocalSteps(Strategy, Synchronization):
    """Local steps of each replica, between outer steps in which parameters are averaged.

        jddp.LocalSteps(every=16)                                              # their mean
        jddp.LocalSteps(every=16, start=1000)                                  # post-local SGD
        jddp.LocalSteps(16, optax.sgd(0.7, momentum=0.9, nesterov=True))       # DiLoCo

    Attributes:
      every: Number of steps from one outer step to the next.
      outer: Optimizer of the outer step, which takes the mean of (parameters after the last outer
        step - own) for a gradient of those parameters. By default SGD of rate 1, which gives the
        mean of the replicas' parameters; with Nesterov momentum it is the outer step of DiLoCo.
      start: Number of first steps that are plain ones, with gradients averaged in each.

    Steps that `skip_nonfinite` leaves out are not counted.

    Raises:
      ConfigError: If a number breaks its rule.

    References:
      Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
      algorithm 1. https://arxiv.org/abs/2311.08105. Lin et al., "Don't Use Large Mini-Batches, Use
      Local SGD", 2018. https://arxiv.org/abs/1808.07217. Stich, "Local SGD Converges Fast and
      Communicates Little", 2018. https://arxiv.org/abs/1805.09767.
    """

    every: int = dataclasses.field()  # Drops the default of the base class.
    outer: optax.GradientTransformation = MEAN
    start: int = 0
    alone = "With LocalSteps replicas differ by design, and one device has one set of parameters"
    name = "local steps"
    sends_buckets = False

    def __post_init__(self) -> None:
        """Refuses numbers out of range."""
        if self.every < 1 or self.start < 0:
            raise ConfigError(
                "LocalSteps: every is at least 1 and start at least 0; got "
                f"every={self.every}, start={self.start}."
            )

    @property
    def rhythm(self) -> str:
        """Returns "every N steps"."""
        return f"every {self.every} steps"

    def runs(self, num_runs: int, *, is_gradient: bool, is_outer: bool) -> float:
        """Returns the mean number of runs per step: no gradients are sent in local steps."""
        return 1 / self.every if is_outer else 0 if is_gradient else num_runs

    @property
    def sync(self) -> Synchronization:
        """The synchronization: this strategy itself."""
        return self

    def init(self, params: Params) -> PyTree:
        """Returns outer parameters, and the outer optimizer's state."""
        return {"params": params, "opt_state": self.outer.init(params)}

    def check(self, model_state: ModelState, keeps_own: KeepsOwn) -> None:
        """Refuses floating leaves that replicas would share.

        Raises:
          ConfigError: If there is one, with its name.
        """
        for path, x in jax.tree_util.tree_leaves_with_path(model_state):
            if is_float(x) and not keeps_own(path, x):
                raise ConfigError(
                    f"LocalSteps: replicas would have to agree on {name_of(path)!r} in each step, "
                    "and between outer steps nothing is to be sent. Choose batch_norm='local', or "
                    "declare its collection 'per_replica' in state=: each replica then has its "
                    "own, and their mean is evaluated."
                )

    def keeps_own(self, path: Path, x: Shaped) -> bool:
        """Returns True for floating leaves, which differ between outer steps."""
        return is_float(x)

    def layouts(self, state: TrainState, layouts: TrainState) -> TrainState:
        """Returns layouts with parameters, their average and the optimizer's state per replica."""
        own = {name: getattr(state, name) for name in ("params", "ema_params", "opt_state")}
        return layouts.replace(**{k: own_layouts(x, self.keeps_own) for k, x in own.items()})

    def sent(self, reducer: Reducer, plan: BucketPlan, params: Params) -> BucketPlan:
        """Plans all parameters, also parameters that no gradient reaches."""
        return self.note(reducer.plan(params))

    def note(self, plan: BucketPlan) -> BucketPlan:
        """Notes how often parameters are sent."""
        when = f"LocalSteps: sent every {self.every} steps"
        if self.start:
            when += f", and in each of the first {self.start}"
        return plan.noted(when)

    def view(self, of_packing: View) -> View:
        """Returns the view of a gradient of its own."""
        return View(of_packing.axis, is_mean=False)

    def mean(self, reducer: Reducer, plan: BucketPlan, local: Local, state: TrainState) -> Averaged:
        """Averages in the first `start` steps alone."""
        hook = state.comm_state.hook
        # Without plain steps no gradient is ever averaged, and the program needs no branch for it.
        if not self.start:
            return local.grads.tree(), hook
        # A collective stands in a branch, so all replicas must take the same one: the counts of
        # steps and of skipped steps are the same everywhere.
        return jax.lax.cond(
            self._is_plain(state),
            lambda: reducer(local.grads, hook, plan, local.units),
            lambda: (local.grads.tree(), hook),
        )

    def count(self, state: TrainState, own: Array, mean: Array) -> Array:
        """Returns the mean in plain steps, else the count of the replica whose gradient it is."""
        return jnp.where(self._is_plain(state), mean, own)

    def settle(
        self, reducer: Reducer, local: Local, before: TrainState, after: TrainState
    ) -> TrainState:
        """Takes an outer step where one is due.

        A replica without a valid entry keeps its parameters, and counts the step.
        """
        # Without a valid entry the gradient is zero, but momentum and weight decay would still move
        # the parameters.
        learns = self._is_plain(before) | (local.count > 0)

        def choose(new: Array, old: Array) -> Array:
            return jnp.where(learns, new, old) if is_float(new) else new

        params, opt_state = jax.tree.map(
            choose, (after.params, after.opt_state), (before.params, before.opt_state)
        )
        # Skipped steps do not count, and only the devices know how many there were: the host would
        # have to wait for each step to choose the program.
        taken = before.step - before.skipped + 1
        is_due = ((taken - self.start) % self.every == 0).astype(jnp.int32)

        branches: list[Callable[[Params, Mapping[str, PyTree]], tuple[Params, PyTree]]] = [
            lambda params, outer: (params, outer),
            functools.partial(self._outer_step, reducer),
        ]
        if self.start:
            # In the plain steps parameters are equal already, and the outer parameters follow
            # without a message.
            branches.append(lambda params, outer: (params, {**outer, "params": params}))
        chosen = jnp.where(taken <= self.start, 2, is_due)
        params, outer = jax.lax.switch(chosen, branches, params, before.comm_state.outer)
        comm_state = dataclasses.replace(after.comm_state, outer=outer)
        return after.replace(params=params, opt_state=opt_state, comm_state=comm_state)

    def _outer_step(
        self, reducer: Reducer, params: Params, outer: Mapping[str, PyTree]
    ) -> tuple[Params, PyTree]:
        """Returns the same parameters for all replicas, and their shared state."""
        start = outer["params"]
        with jax.named_scope("outer_step"):
            moved = jax.tree.map(jnp.subtract, start, params)
            # Averages all parameters, also if no gradient reaches them.
            mean, _ = reducer(Finished(moved), (), reducer.plan(params))
        # Every replica computes the same from the same mean: outer parameters need not be sent.
        with jax.named_scope(OPTIMIZER):
            updates, opt_state = self.outer.update(mean, outer["opt_state"], start)
            params = optax.apply_updates(start, updates)
        return params, {"params": params, "opt_state": opt_state}

    def _is_plain(self, state: TrainState) -> Array:
        return state.step - state.skipped < self.start


def choose_strategy(strategy: str | Strategy) -> Strategy:
    """Returns the strategy of a word, or a strategy itself.

    Raises:
      ConfigError: If it is none.
    """
    words = {"ddp": Strategy(), "zero1": ZeRO1(), "fsdp": FSDP()}
    chosen = words.get(strategy) if isinstance(strategy, str) else strategy
    if not isinstance(chosen, Strategy):
        raise ConfigError(
            f"strategy={strategy!r} is none. Choose 'ddp', 'zero1', 'fsdp', "
            "jddp.LogicalReplicas(number) or jddp.LocalSteps(every)."
        )
    return chosen


def choose_reducer(
    reduction: Reduction,
    strategy: Strategy,
    batch_norm: str,
    mesh: jax.sharding.Mesh,
    *,
    is_scaled: bool,
) -> tuple[Reducer, bool]:
    """Returns the reducer of the gradients, and whether it works inside the backward pass.

    Args:
      reduction: Form in which gradients are averaged.
      strategy: The strategy.
      batch_norm: "sync", "broadcast" or "local".
      mesh: The devices.
      is_scaled: Whether the loss is scaled; a custom hook gets gradients without that scale.

    Raises:
      ConfigError: If the two cannot be combined, with the reason, or the hook is none.
    """
    given = {
        strategy.name: True,
        "local steps from the first": strategy.name == "local steps" and not strategy.sync.start,
        "reduction.hook": reduction.hook is not None,
        "reduction.wire_dtype": reduction.wire_dtype is not None,
        "reduction.wire_dtype='float16'": reduction.wire_dtype == "float16",
        "batch_norm='local' or 'broadcast'": batch_norm != "sync",
        "reduction.overlap=True": reduction.overlap is True,
        "reduction.layout='leaf'": reduction.layout == "leaf",
    }
    for pair, why in REFUSED.items():
        if all(given.get(name) for name in pair):
            raise ConfigError(f"{' and '.join(pair)} cannot be combined: {why}. Leave one out.")
    # There is nothing to overlap where a step sends no gradients; and where some steps do, the
    # program, which holds steps with and without a mean, would hold the backward pass twice.
    sends = (mesh.size > 1 and strategy.sends_buckets) or reduction.overlap is True
    overlap = reduction.overlap if sends else False
    layout, overlaps = choose_layout(reduction.layout, overlap, lambda: mesh.devices.flat[0])
    packed = strategy.packed(layout, reduction.hook, mesh)
    wire_dtype = None if reduction.wire_dtype is None else jnp.dtype(reduction.wire_dtype)
    sizes, seen = bucket_sizes(reduction.bucket_mb), unscaled if is_scaled else None
    exchange = exchange_on(platform(mesh))
    reducer = Reducer(axis_of(mesh), sizes, *packed, wire_dtype, seen, exchange=exchange)
    if isinstance(strategy, FSDP) and (size := strategy.groups(mesh.size).size) > 1:
        reducer = dataclasses.replace(
            reducer, is_divided=lambda shape: divided_dim(shape, size) is not None
        )
    return reducer, overlaps
