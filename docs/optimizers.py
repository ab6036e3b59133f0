"""Every optimizer of optax, and what becomes of it with each strategy."""

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from jddp.engine.optimizer import choose_optimizer, mixes_elements
from jddp.engine.step import Placement
from jddp.ground.errors import ConfigError
from jddp.reduce.shards import Flat

RATE = 0.05
SGD = optax.sgd(RATE, momentum=0.9)
MATRICES = "matrices"


def are_matrices(params: Any) -> Any:
    """Whether each parameter is a matrix: a mask of optax."""
    return jax.tree.map(lambda x: x.ndim > 1, params)


def by_dims(params: Any) -> Any:
    """Labels of parameters, by their number of dims."""
    return jax.tree.map(lambda x: MATRICES if x.ndim > 1 else "others", params)


def scaled(updates: Any, params: Any) -> Any:
    """A transformation without state."""
    return jax.tree.map(lambda x: -RATE * x, updates)


def largest(updates: Any, *_: Any, **__: Any) -> Any:
    """A measure of updates."""
    return jnp.max(jnp.stack([jnp.abs(x).max() for x in jax.tree.leaves(updates)]))


# Arguments beside `learning_rate`, of those that have others without a default.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "adaptive_grad_clip": {"clipping": 0.1},
    "add_noise": {"eta": 0.1, "gamma": 0.5, "key": 0},
    "apply_if_finite": {"inner": SGD, "max_consecutive_errors": 3},
    "clip": {"max_delta": 0.1},
    "clip_by_block_rms": {"threshold": 0.1},
    "clip_by_global_norm": {"max_norm": 0.1},
    "conditionally_mask": {"inner": SGD, "should_transform_fn": lambda step, **_: step > 1},
    "conditionally_transform": {"inner": SGD, "should_transform_fn": lambda step, **_: step > 1},
    "contrib.differentially_private_aggregate": {
        "l2_norm_clip": 1.0,
        "noise_multiplier": 0.1,
        "key": 0,
    },
    "contrib.dog": {},
    "contrib.dowg": {},
    "contrib.dpsgd": {"l2_norm_clip": 1.0, "noise_multiplier": 0.1, "seed": 0},
    "contrib.hutchinson_estimator_diag_hessian": {},
    "contrib.mechanize": {"base_optimizer": SGD},
    "contrib.sam": {"optimizer": SGD, "adv_optimizer": optax.sgd(RATE)},
    "contrib.schedule_free": {"base_optimizer": optax.sgd(RATE), "learning_rate": RATE},
    "contrib.split_real_and_imaginary": {"inner": SGD},
    "ema": {"decay": 0.9},
    "flatten": {"inner": SGD},
    "freeze": {"mask": are_matrices},
    "inject_hyperparams": {"inner_factory": optax.sgd},
    "inject_stateful_hyperparams": {"inner_factory": optax.sgd},
    "lookahead": {"fast_optimizer": SGD, "sync_period": 2, "slow_step_size": 0.5},
    "masked": {"inner": SGD, "mask": are_matrices},
    "measure_with_ema": {"measure": largest, "decay": 0.9},
    "monitor": {"measures": {"largest": largest}},
    "multi_transform": {
        "transforms": {MATRICES: SGD, "others": optax.adam(RATE)},
        "param_labels": by_dims,
    },
    "noisy_sgd": {"key": 0},
    "partition": {
        "transforms": {MATRICES: SGD, "others": optax.adam(RATE)},
        "param_labels": by_dims,
    },
    "scale": {"step_size": -RATE},
    "scale_by_backtracking_linesearch": {"max_backtracking_steps": 3},
    "scale_by_factored_rms": {"min_dim_size_to_factor": 2},
    "scale_by_schedule": {"step_size_fn": lambda step: -RATE / (step + 1)},
    "scale_by_zoom_linesearch": {"max_linesearch_steps": 3},
    "selective_transform": {"optimizer": SGD, "freeze_mask": are_matrices},
    "snapshot": {"measure_name": "largest", "measure": largest},
    "stateless": {"f": scaled},
    "stateless_with_tree_map": {"f": lambda x, _: -RATE * x},
    "trace": {"decay": 0.9},
    "with_extra_args_support": {"tx": SGD},
}
CHAINED = {"chain": (optax.trace(0.9), optax.scale(-RATE)), "named_chain": (("sgd", SGD),)}
# Functions that have no annotation, and make no optimizer.
HELPERS = {
    "bias_correction",
    "contrib.schedule_free_eval_params",
    "matrix_inverse_pth_root",
    "sigmoid_binary_cross_entropy",
    "update_infinity_moment",
    "update_moment",
    "update_moment_per_elem_norm",
}


def functions() -> Iterator[tuple[str, Any]]:
    """The public functions of optax that may make an optimizer, by name."""
    for prefix, module in (("", optax), ("contrib.", optax.contrib)):
        for name, found in sorted(vars(module).items()):
            if name[0] != "_" and inspect.isfunction(found) and prefix + name not in HELPERS:
                returned = inspect.signature(found).return_annotation
                if returned is inspect.Signature.empty or "GradientTransf" in str(returned):
                    yield prefix + name, found


def optimizers() -> dict[str, optax.GradientTransformation]:
    """Every optimizer and transformation of optax, with the fewest arguments."""
    made = {}
    for name, function in functions():
        arguments = inspect.signature(function).parameters
        rate = arguments.get("learning_rate")
        needed = {"learning_rate": RATE} if rate and rate.default is inspect.Parameter.empty else {}
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            tx = function(*CHAINED.get(name, ()), **needed | ARGUMENTS.get(name, {}))
        # `inject_hyperparams` returns a function that makes it.
        tx = tx if hasattr(tx, "update") else tx(learning_rate=RATE)
        # What they scale is a gradient, of which no step subtracts anything by itself.
        is_part = "scale_by_" in name and name != "scale_by_schedule"
        made[name] = optax.chain(tx, optax.scale(-RATE)) if is_part else tx
    return made


def outcome(tx: optax.GradientTransformation) -> str:
    """How the parts of parameters are updated, or why they are not: a row of the table."""
    params = {
        "kernel": jax.ShapeDtypeStruct((4, 8), jnp.float32),
        "bias": jax.ShapeDtypeStruct((8,), jnp.float32),
    }
    try:
        choose_optimizer(tx, "zero", Placement(), 1).check(params)
    except ConfigError:
        return "refused, with `ddp` too: it makes no updates of gradients and the loss alone"
    is_whole = mixes_elements(tx, params, Flat("data", 2))
    return "all parameters, gathered" if is_whole else "its shard of each parameter"


def table() -> str:
    """What each replica updates with `zero1` and `fsdp`, and the optimizers of which this holds."""
    rows: dict[str, list[str]] = {}
    for name, tx in optimizers().items():
        rows.setdefault(outcome(tx), []).append(f"`{name}`")
    text = "".join(f"| {result} | {', '.join(names)} |\n" for result, names in rows.items())
    return f"| each replica updates | optimizers and transformations |\n| --- | --- |\n{text}"
