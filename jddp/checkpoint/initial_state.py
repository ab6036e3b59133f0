"""Makes the first state of training: by the model from a seed, or from given values.

    first = InitialState(steps)
    state = first.make(seed, inputs, params=None)       # the same on every device

All processes start with the same state: new values are made on every device from the same seed and
rows, and given values are replicated.
"""

import dataclasses
import functools
import logging
import operator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jddp.checkpoint.weights import Loaded, fit_weights, read_weights
from jddp.config.permissions import expand
from jddp.engine.calls import call
from jddp.engine.compiled import CompiledSteps
from jddp.engine.first_state import put_given
from jddp.engine.mesh import replicate, replicated, sharded, with_shardings
from jddp.engine.planned import Planned
from jddp.engine.processes import connect, from_process_zero
from jddp.engine.state import Inputs, TrainState, Values, stack_rows
from jddp.errors import ConfigError, UsageError
from jddp.typing import Leaf, Params


class First(NamedTuple):
    """A first state, and the plan of the step for the rows that it was made with."""

    state: TrainState
    planned: Planned


class InitialState:
    """Makes first states.

    Args:
      steps: Steps that plan for the rows, on the mesh of the state.

    Attributes:
      loaded: Report on the values that were given last; None before the first.
    """

    def __init__(self, steps: CompiledSteps) -> None:
        self.loaded: Loaded | None = None
        self._model = steps.spec.model
        self._steps = steps
        self._mesh = steps.mesh

    def make(
        self, seed: int, inputs: Inputs, params: Params = None, *, partial: bool = False
    ) -> First:
        """Makes a state and its plan; the arguments are those of `jddp.DataParallel.init`."""
        _check_seed(seed)
        steps = self._steps
        connect(self._mesh, steps.spec.placement.groups)
        values = self._values(seed, inputs, params, partial=partial)
        # The rows of process 0, so that all processes start with the same state.
        example = inputs._replace(rows=from_process_zero(steps.example(inputs.rows, values)))
        values = put_given(steps.spec, self._mesh, values)
        state = call(steps.init, np.uint32(seed), example, *values)
        self._model.check_kinds(state.model_state)
        planned = steps.plan(state, inputs)
        outer, comm_state = state.comm_state.outer, replicate(steps.comm_state(planned), self._mesh)
        state = state.replace(comm_state=dataclasses.replace(comm_state, outer=outer))
        layouts, num = steps.layouts(state), steps.rows.num_replicas
        state = with_shardings(state, layouts, self._mesh)
        return First(stack_rows(state, layouts, sharded(self._mesh), num), planned)

    def refuse_foreign(
        self, state: TrainState, latest: TrainState | None, inputs: Inputs | None
    ) -> None:
        """Refuses a state whose shapes differ from the latest state, or from the state for inputs.

        If there are inputs, for a step, the optimizer's state is compared, too.

        Raises:
          UsageError: If they differ, or the state is on other devices.
        """
        if state.step.committed and state.step.devices() != replicated(self._mesh).device_set:
            raise UsageError("This state lies on other devices: make one with init, or restore it.")
        own = latest or (None if inputs is None else self._steps.shapes(inputs))
        if own is None or own is state:
            return
        shapes = functools.partial(jax.tree.map, np.shape)
        if shapes(own.params) != shapes(state.params):
            raise UsageError("This state has the parameters of another model: make one with init.")
        if inputs is not None and shapes(own.opt_state) != shapes(state.opt_state):
            raise UsageError(
                "This state is from another optimizer. Make one with init; "
                "init(params=state.params) keeps the parameters."
            )

    def _split(self, params: Params) -> Values:
        return (self._model.values or (None, None)) if params is None else self._model.split(params)

    def _values(self, seed: int, inputs: Inputs, params: Params, *, partial: bool) -> Values:
        """The given values, checked against the model's own if these are known."""
        is_path = isinstance(params, str | Path)
        values, state = self._split(read_weights(expand(params)) if is_path else params)
        is_unchecked = params is None or (self._model.values is None and inputs.rows is None)
        if is_unchecked and partial:
            raise UsageError("init(partial=True) needs params=, and for a Linen model batch=.")
        if is_unchecked:
            if params is not None and state is None:
                self._model.refuse_bare(values)
            return values, state
        own_values, own_state = self._model.values or self._own(seed, inputs, with_values=partial)
        values, self.loaded = fit_weights(values, own_values, partial=partial)
        if state is not None:
            state, loaded = fit_weights(state, own_state, partial=partial)
            self.loaded += loaded
        if partial:
            logging.getLogger("jddp").warning("params=: %s", self.loaded)
        return (jax.tree.map(_like, values, own_values) if is_path else values), state

    def _own(self, seed: int, inputs: Inputs, *, with_values: bool) -> Values:
        """The model's own initial values, or their shapes."""
        steps = self._steps
        whole = steps.spec.model.whole
        if with_values:
            made = self.make(seed, inputs).state
            return whole(*steps.merged((made.params, made.model_state)))
        shapes = steps.shapes(inputs)
        return whole(*jax.eval_shape(steps.merged, (shapes.params, shapes.model_state)))


def _check_seed(seed: int) -> None:
    is_whole = hasattr(seed, "__index__") and not isinstance(seed, bool)
    if not (is_whole and 0 <= operator.index(seed) < 2**32):
        raise ConfigError(f"seed {seed!r} is no whole number from 0 to {2**32 - 1}. Give one.")


def _like(x: Leaf, wanted: Leaf) -> Leaf:
    """A floating array in another floating dtype; other arrays unchanged."""
    both = (jax.numpy.issubdtype(v.dtype, np.floating) for v in (x, wanted))
    return np.asanyarray(x).astype(wanted.dtype, copy=False) if all(both) else x
