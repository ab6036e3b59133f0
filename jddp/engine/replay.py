"""A step that is replayed: its gradients are computed on two devices each before they count.

A device that computes a wrong number raises no error, and after the mean over the replicas every
parameter has it. Here the rows of each replica are computed again on the next device, and digests
of all that a replica computes are compared before the mean is taken.

    device            0          1          2
    first             rows 0     rows 1     rows 2      local gradients, their digests
    second            rows 2     rows 0     rows 1      digests alone
    third             rows 1     rows 2     rows 0      only if digests differ: two are right
    update            mean ─► clip ─► optimizer ─► ...  of the first gradients

All three are one program, on a mesh whose devices are turned. The replicas keep their numbers, and
with these their random numbers and the order of all sums, so equal devices give equal bits. Rows
are sent. State that is the same everywhere is not: each device computes with its own copy. GPUs
whose kernels add with atomics give other bits each time: there, two computations are compared to a
multiple of the difference of two runs on the same devices.

With synchronized batch norm a wrong number reaches all replicas, through sums. So what a replica
sends is compared too, in the order of the program: the first array that differs is from the device
that was wrong. A collective inside a loop, or a rematerialized layer, is not seen.
"""

import functools
import itertools
import logging
import os
import platform
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal
from jax.sharding import Mesh
from jaxtyping import Array, Float, UInt32

from jddp.distributed.coordination import gather
from jddp.engine import mesh as meshes
from jddp.engine.calls import connect, run_compiled
from jddp.engine.digest import digests
from jddp.engine.micro_batches import Local
from jddp.engine.state import CommState, Inputs, TrainState, is_float, name_of
from jddp.engine.step import Step, replica_update
from jddp.ground.errors import ConfigError, ReplicaMismatchError
from jddp.ground.jaxprs import axes_of, equations
from jddp.ground.typing import Batch, Grads, Metrics, ModelState, Params, PyTree, Tree
from jddp.modules.metrics import Sums
from jddp.reduce.backward import Finished, evaluate, opened, variables
from jddp.reduce.plan import BucketPlan
from jddp.reduce.reducer import compiler_options

SECONDS = 600.0  # Limit for other processes to name their hosts.
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
NUM_NOISES = 16  # Two devices may differ by so many differences of two runs on one device.
LEAST = float(jnp.finfo(jnp.float32).tiny)
NOISY = (
    "Without XLA_FLAGS=%s a GPU computes other bits each time: replayed steps are compared only to "
    "%d times the difference of two runs on the same GPUs."
)
IN_A_LOOP = (
    "A step cannot be replayed (replay_every_steps): replicas send inside a loop or a remat, as "
    "for synchronized batch norm with accumulate_steps. Such sums depend on the order of devices, "
    "and would differ without a fault. Choose batch_norm='local'."
)
log = logging.getLogger("jddp")


class Computed(NamedTuple):
    """All that the replicas compute with and compute, in the order of the program.

    What they compute has a row for each replica.

    Attributes:
      params: Parameters, as each device has them.
      model_state: Other state of the model, as each device has it.
      rows: Rows of each replica.
      sent: Arrays that replicas send while they compute, by number and layer of the collective.
      gradients: Local gradients.
      sums: Sums of the loss and metrics.
      new_state: The model's other state after the rows.
    """

    params: Params
    model_state: ModelState
    rows: Batch
    sent: dict[str, list[Array]]
    gradients: Grads
    sums: Sums
    new_state: ModelState

    @property
    def made(self) -> tuple[PyTree, ...]:
        """The arrays that replicas compute, which are the last leaves."""
        return self[3:]


def refuse_replay(spec: Step, mesh: Mesh) -> None:
    """Refuses steps whose replicas have no local gradients that another device could compute.

    Raises:
      ConfigError: If it is such a step, or there is one device.
    """
    reason = ""
    if mesh.size == 1:
        reason = "there is one device, and none to compare it with"
    elif spec.placement.division is not None:
        reason = "with strategy='fsdp' no replica has the gradients of its rows. Choose 'zero1'"
    elif spec.replicas.num is not None:
        reason = "with logical replicas a device sums the gradients of several. Choose 'ddp'"
    elif spec.sync.start:  # A branch with an all-reduce of its arguments: jax 0.10.2, by tests.
        reason = "XLA's program for CPUs crashes with LocalSteps(start=). Choose start=0"
    if reason:
        raise ConfigError(f"A step cannot be replayed (replay_every_steps): {reason}.")


class ReplayedStep:
    """`step(state, inputs)` over the mesh, which replays the step before it updates anything.

    Args:
      spec: The parts of the step.
      plan: The buckets.
      mesh: The devices.
      layouts: Layouts of the state.
      donate: Whether the update reuses the memory of the state.

    Raises:
      ConfigError: If such a step cannot be replayed.
    """

    def __init__(
        self, spec: Step, plan: BucketPlan, mesh: Mesh, layouts: TrainState, *, donate: bool
    ) -> None:
        refuse_replay(spec, mesh)
        self._spec, self._mesh, self._layouts = spec, mesh, layouts
        self._options = compiler_options(spec.reducer, mesh.devices.flat[0])
        self._computations: dict[int, jax.stages.Wrapped] = {}
        self._is_noisy, self._noise = may_be_noisy(meshes.platform(mesh)), np.zeros(1)

        def update(
            state: TrainState, results: PyTree, loss_limit: Array | None
        ) -> tuple[TrainState, Metrics]:
            state = spec.replicas.enter(state, layouts)
            grads, sums, model_state = jax.tree.map(lambda x: x[0], results)
            units = spec.backward.units(state.params, sums, spec.guard.scale(state))
            local = Local(Finished(grads), sums, model_state, units)
            state, metrics = replica_update(spec, plan, state, local, loss_limit)
            return spec.replicas.leave(state, layouts), metrics

        placed = meshes.shardings(layouts, mesh)
        in_specs = (placed, jax.P(spec.axis), jax.P())
        mapped = meshes.over_replicas(update, mesh, in_specs, (placed, jax.P()))
        donated = (0,) if donate else ()
        self._update = jax.jit(mapped, compiler_options=self._options, donate_argnums=donated)

    def __call__(self, state: TrainState, inputs: Inputs) -> tuple[TrainState, Metrics]:
        """Takes the step if both computations are equal.

        Raises:
          ReplicaMismatchError: If they differ, with the device that a third one finds wrong.
        """
        compute = functools.partial(self._compute, state, inputs)
        computed = [compute(turns=0), compute(turns=1)]
        if not self._are_equal(compute, computed):
            computed.append(compute(turns=2 % self._mesh.size))
            raise ReplicaMismatchError(self._describe(computed, state))
        results = computed[0].gradients, computed[0].sums, computed[0].new_state
        return run_compiled(self._update, state, results, inputs.loss_limit)

    def _are_equal(self, compute: Callable[..., Computed], computed: Sequence[Computed]) -> bool:
        """Whether two computations are equal, or as near as two runs on the same devices."""
        first, second = self._words(computed)
        if self._is_noisy and not np.array_equal(first, second):
            # Neither is the first computation: if that is wrong, it must not widen the bound.
            runs = [compute(turns=0).made for _ in range(2)]
            noise = np.asarray(distances(self._mesh, *runs)).max(0)
            self._noise = np.maximum(noise, self._noise)
            log.warning(NOISY, DETERMINISTIC, NUM_NOISES)
            first, second = self._words(computed)
        return np.array_equal(first, second)

    def _words(
        self, computed: Sequence[Computed]
    ) -> UInt32[np.ndarray, "computed replicas leaves"]:
        """The digests of computations; arrays as near as noise have the digest of the first one."""
        words = np.stack([digests(x) for x in computed])
        if not self._noise.any():
            return words
        bound = NUM_NOISES * np.maximum(self._noise, np.median(self._noise))
        of_made = words[:, :, -len(bound) :]
        # Back on the devices of the first computation.
        made = [
            turned(x.made, meshes.mesh_of(jax.tree.leaves(x.sums)[0]), self._mesh, -turns)
            for turns, x in enumerate(computed)
        ]
        for i, j in itertools.combinations(range(len(made)), 2):
            is_near = np.asarray(distances(self._mesh, made[i], made[j])) <= bound
            of_made[j] = np.where(is_near, of_made[i], of_made[j])
        return words

    def _compute(self, state: TrainState, inputs: Inputs, turns: int) -> Computed:
        """Computes the rows of replica r on device r + turns, up to its local gradients."""
        state, inputs = _needed(state), inputs._replace(loss_limit=None)
        mesh = meshes.make_mesh([*np.roll(self._mesh.devices, -turns)], meshes.axis_of(self._mesh))
        if turns not in self._computations:
            connect(mesh, None)
            self._computations[turns] = self._make_computation(mesh)
        state, inputs = turned((state, inputs), self._mesh, mesh, turns)
        results, sent = run_compiled(self._computations[turns], state, inputs)
        return Computed(state.params, state.model_state, inputs.rows, sent, *results)

    def _make_computation(self, mesh: Mesh) -> jax.stages.Wrapped:
        spec, layouts = self._spec, _needed(self._layouts)

        def run(state: TrainState, inputs: Inputs) -> PyTree:
            local = spec.replicas.run(spec.backward, spec.guard.scale, state, inputs)
            return local.grads.tree(), local.sums, local.model_state

        def compute(state: TrainState, inputs: Inputs) -> PyTree:
            state = spec.replicas.enter(state, layouts)
            return jax.tree.map(lambda x: x[None], with_sent(run, spec.axis, state, inputs))

        in_specs = (meshes.shardings(layouts, mesh), meshes.input_specs(mesh))
        mapped = meshes.over_replicas(compute, mesh, in_specs, jax.P(spec.axis))
        return jax.jit(mapped, compiler_options=self._options)

    def _describe(self, computed: Sequence[Computed], state: TrainState) -> str:
        leaf, suspects = suspects_of(self._words(computed))
        paths = jax.tree_util.tree_leaves_with_path(computed[0])
        hosts = gather("replay/hosts", platform.node(), timeout_seconds=SECONDS)
        wrong = " or ".join(
            f"device {x.id} (process {x.process_index}, host {hosts[x.process_index]})"
            for x in self._mesh.devices.flat[suspects]
        )
        return (
            f"Step {int(state.step) + 1}, computed again on other devices, differs: {wrong} is "
            f"wrong. The first array that differs is {name_of(paths[leaf][0])}. The step is not "
            "taken, and nothing is saved after it. Exclude the device, and start again: the run "
            "resumes from its last checkpoint."
        )


def _needed(state: TrainState) -> TrainState:
    """The part of a state, or of its layouts, that gradients depend on."""
    comm_state = CommState(loss_scale=state.comm_state.loss_scale)
    return state.replace(opt_state=(), ema_params=None, ema_state=None, comm_state=comm_state)


def with_sent(
    run: Callable[..., PyTree], axis: str, *arguments: PyTree
) -> tuple[PyTree, dict[str, list[Array]]]:
    """Runs a replica's function; returns its results, and what it sends to other replicas.

    Args:
      run: Function of trees of arrays.
      axis: Name of the axis of the replicas.
      arguments: Arguments of the function.

    Returns:
      The results; and the arrays that enter each collective, by its number and the layer.

    Raises:
      ConfigError: If it sends inside a loop, and is not for CPUs.
    """
    traced, shapes = jax.make_jaxpr(run, return_shape=True)(*arguments)
    inlined = opened(traced)
    jaxpr, sent = inlined.jaxpr, dict[str, list[Array]]()
    inputs = (*inlined.consts, *jax.tree.leaves(arguments))
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))
    for eqn in jaxpr.eqns:
        if axis in axes_of(eqn) and variables(eqn):  # It has none if it asks for the index.
            operands = [values[v] for v in variables(eqn)]
            sent[f"{len(sent):04} {eqn.source_info.name_stack}"] = operands
            if eqn.primitive.name == "psum":
                values |= zip(eqn.outvars, _added_in_order(eqn, operands), strict=True)
                continue
        values |= evaluate(jaxpr, [eqn], values)
    collectives = [x for x in equations(jaxpr) if axis in axes_of(x) and variables(x)]
    if len(collectives) > len(sent) and jax.default_backend() != "cpu":
        raise ConfigError(IN_A_LOOP)
    results = [v.val if isinstance(v, Literal) else values[v] for v in jaxpr.outvars]
    return jax.tree.unflatten(jax.tree.structure(shapes), results), sent


def _added_in_order(eqn: JaxprEqn, terms: Sequence[Array]) -> list[Array]:
    """The results of an all-reduce, for which each replica adds all terms by itself."""
    # An all-reduce adds in an order of the devices, in which the replicas are turned: on GPUs and
    # TPUs its sums would differ without a fault.
    gather = functools.partial(
        jax.lax.all_gather,
        axis_name=eqn.params["axes"],
        axis_index_groups=eqn.params["axis_index_groups"],
    )
    return [gather(x).sum(0, dtype=x.dtype) for x in terms]


def turned(tree: Tree, mesh: Mesh, other: Mesh, turns: int) -> Tree:
    """The same arrays on a mesh of the same devices, in which replica r is on device r + turns.

    Arrays that are the same everywhere stay where they are; what each device has of another one is
    sent to the device that has its replica now.
    """
    if not turns:
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    split = [i for i, x in enumerate(leaves) if not x.is_fully_replicated]
    placed = (meshes.sharded(mesh),) * len(split)
    sent = run_compiled(meshes.sender(mesh, turns, placed), [leaves[i] for i in split])
    leaves = [sent[split.index(i)] if i in split else x for i, x in enumerate(leaves)]

    def rename(x: jax.Array) -> jax.Array:
        sharding = meshes.replicated(other) if x.is_fully_replicated else meshes.sharded(other)
        by_device = {shard.device: shard.data for shard in x.addressable_shards}
        parts = [by_device[device] for device in other.local_devices]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)

    return cast(Tree, jax.tree.unflatten(treedef, map(rename, leaves)))


@functools.partial(jax.jit, static_argnums=0)
def distances(mesh: Mesh, first: PyTree, second: PyTree) -> Float[Array, "replicas leaves"]:
    """The largest difference of each array on each replica, in parts of its largest number."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    each = jnp.stack([jax.vmap(_distance)(*pair) for pair in pairs], axis=1)
    return jax.lax.with_sharding_constraint(each, meshes.replicated(mesh))


def _distance(x: Array, y: Array) -> Float[Array, ""]:
    if not is_float(x):
        return jnp.where((x == y).all(), 0.0, jnp.inf)
    x, y = (z.astype(jnp.float32) for z in (x, y))
    differs = (x != y) & ~(jnp.isnan(x) & jnp.isnan(y))
    largest = jnp.abs(x).max(initial=LEAST, where=jnp.isfinite(x))
    return jnp.abs(x - y).max(initial=0.0, where=differs) / largest


def may_be_noisy(hardware: str) -> bool:
    """Whether a device may compute other bits each time: a GPU whose kernels add with atomics."""
    return hardware == "gpu" and DETERMINISTIC not in os.environ.get("XLA_FLAGS", "")


def suspects_of(words: UInt32[np.ndarray, "3 replicas leaves"]) -> tuple[int, list[int]]:
    """The first leaf of which two computations differ, and the devices that may be wrong.

    Computation k has replica r on device r + k, the third one on two devices on device r again.

    Args:
      words: Digests of three computations, of which the first two differ.

    Returns:
      The number of the leaf, and one device, or several where the computations cannot tell.
    """
    first, second, third = words
    num, differ = len(first), first != second
    leaf = int(differ.any(0).argmax())
    suspects = set[int]()
    for replica in np.flatnonzero(differ[:, leaf]).tolist():
        devices = [(replica + k) % num for k in range(3)]
        if third[replica, leaf] == second[replica, leaf]:
            suspects.add(devices[0])
        elif third[replica, leaf] == first[replica, leaf] and num > 2:
            suspects.add(devices[1])
        else:  # Of two devices that stay different, either may be wrong.
            suspects.update(devices)
    return leaf, sorted(suspects)
