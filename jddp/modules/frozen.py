"""Parameters that are not trained, kept with the other state of a model.

    params, model_state = freeze(params, model_state, ["backbone/.*"])  # once, in the first state
    params, model_state = thaw(params, model_state)  # all of them, for the model

Whatever works on `state.params` then leaves them alone without knowing of it: they are not
differentiated, sent, clipped, averaged or updated, and have no optimizer state. They are the
collection "params" of the other state, a name that no other state of a model can have.
"""

from collections.abc import Callable, Sequence

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from jddp.errors import ConfigError
from jddp.names import match_paths
from jddp.reduce.plan import in_mebibytes
from jddp.typing import ModelState, Params, Path

COLLECTION = "params"
Frozen = Sequence[str] | Callable[[str], bool]


def is_frozen(path: Path) -> bool:
    """Whether a leaf of the other state is a parameter that is not trained."""
    return bool(path[0].key == COLLECTION)


def freeze(params: Params, model_state: ModelState, frozen: Frozen) -> tuple[Params, ModelState]:
    """Moves parameters that are not trained into the other state.

    Args:
      params: All parameters.
      model_state: Other state.
      frozen: Regular expressions, each for whole paths such as "backbone/Dense_0/kernel"; or a
        function of such a path. An empty list freezes nothing.

    Raises:
      ConfigError: If an expression matches no parameter, with the nearest ones; or if all
        parameters are frozen.
    """
    if not (callable(frozen) or frozen):
        return params, model_state
    leaves = flatten_dict(params, keep_empty_nodes=True)
    names = {"/".join(map(str, path)): path for path in leaves}
    is_chosen = (
        frozen if callable(frozen) else match_paths(frozen, names, key="frozen").__contains__
    )
    still = {path: leaves[path] for name, path in names.items() if is_chosen(name)}
    trained = {path: x for path, x in leaves.items() if path not in still}
    if not (still and trained):
        raise ConfigError(f"frozen: it matches {'all parameters' if still else 'none'}.")
    return unflatten_dict(trained), {**model_state, COLLECTION: unflatten_dict(still)}


def thaw(params: Params, model_state: ModelState) -> tuple[Params, ModelState]:
    """Returns all parameters, and the other state without those that are not trained."""
    if COLLECTION not in model_state:
        return params, model_state
    rest = {name: x for name, x in model_state.items() if name != COLLECTION}
    both = [flatten_dict(tree, keep_empty_nodes=True) for tree in (model_state[COLLECTION], params)]
    return unflatten_dict(both[0] | both[1]), rest


def describe_frozen(model_state: ModelState) -> list[str]:
    """A sentence on the parameters that are not trained; none where there are none."""
    leaves = jax.tree.leaves(model_state.get(COLLECTION, {}))
    if not leaves:
        return []
    size = in_mebibytes(sum(x.size * x.dtype.itemsize for x in leaves))
    return [f"{len(leaves)} frozen leaves, {size} MiB: neither trained nor sent"]
