"""Pairs and random sets of options: each equals a loop in NumPy over Flax, or is refused."""

import dataclasses
import functools
import inspect
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from judge import assert_close, host, joined
from sweeps import swept

import jddp
from jddp.config.options import BatchNormConfig, PrecisionConfig
from jddp.engine.strategy import REFUSED

FEATURES, TOKENS, CLASSES, ROWS, STEPS = 3, 4, 3, 16, 3
MIB = 2**20
# Sums of 64 losses in another order, over three steps, of the largest entry; a wire of 8 bits of
# mantissa rounds each replica's gradient, one of 11 bits as well.
TOLERANCES = {None: 5e-5, "bfloat16": 2**-5, "float16": 2**-8}
MEANS = ("mean", "arrays")  # forms of a loss that is a `jddp.Mean`


class Net(nn.Module):
    """Layers that couple what they may: tokens by attention, rows by batch norm."""

    norm: str
    attention: bool
    counts: bool
    unused: bool

    @nn.compact
    def __call__(self, x, mask, train):
        if self.unused:
            self.param("unused", nn.initializers.ones, (2,))
        biggest = x.argmax(-1).ravel() % CLASSES  # Logits may be equal: rounding would decide.
        x = nn.Dense(4, name="first")(x)
        if self.norm == "batch":
            where = None if mask is None else mask.reshape(*mask.shape, *[1] * (3 - mask.ndim))
            x = nn.BatchNorm(not train, momentum=0.5, epsilon=0.1, name="norm")(x, mask=where)
        elif self.norm == "layer":
            x = nn.LayerNorm(name="norm")(x)
        x = nn.gelu(x)
        if self.attention:
            scores = jnp.einsum("btf,bsf->bts", nn.Dense(4, name="queries")(x), x)
            x = jnp.einsum("bts,bsf->btf", nn.softmax(scores), x)
        logits = nn.Dense(CLASSES, name="last")(x)
        if self.counts:
            seen = self.variable("counts", "seen", jnp.zeros, (CLASSES,), jnp.int32)
            if train and not self.is_initializing():
                seen.value += jnp.bincount(biggest, length=CLASSES)
        return logits


def token_losses(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def make_loss(form):
    """What a user writes, in each of the forms that a loss may have."""

    def loss_fn(model, batch, train):
        mask = batch.get("mask")
        logits = model(batch["x"], mask, train)
        losses = token_losses(logits, batch["label"])
        right = (logits.argmax(-1) == batch["label"]).astype(jnp.float32)
        match form:
            case "rows":
                return losses.mean(1), {"accuracy": right.mean(1)}
            case "scalar":
                return losses.mean(), {"accuracy": right.mean()}
            case "mean":
                total = (losses * batch["weights"]).sum()
                return jddp.Mean(total, batch["weights"].sum()), {"accuracy": right}
            case "arrays":
                return jddp.Mean(losses * batch["weights"], batch["weights"]), {"accuracy": right}
        return losses, {"accuracy": right}

    return loss_fn


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, a form of its loss, a kind of mask, an optimizer, and options of DataParallel."""

    model: Net
    form: str
    mask: str
    optimizer: str
    fails: bool
    options: dict

    @functools.cached_property
    def chosen(self):
        """The options, one value a name."""
        strategy, state = self.options["strategy"], self.options.get("state") or {}
        reduction = jddp.Reduction.chosen(self.options["reduction"], "reduction")
        norm = BatchNormConfig.chosen(self.options["batch_norm"], "batch_norm")
        precision = PrecisionConfig.chosen(self.options["precision"], "precision")
        return {
            **self.options,
            **reduction.model_dump(),
            **precision.model_dump(),
            "batch_norm": norm.name,
            "batch_norm_group_size": norm.group_size,
            "local_steps": strategy if isinstance(strategy, jddp.LocalSteps) else None,
            "per_replica": "per_replica" in state.values(),
            "synchronized": bool({"sum", "mean", "first"} & {*state.values()}),
        }

    @property
    def replicas(self):
        strategy = self.options["strategy"]
        is_logical = isinstance(strategy, jddp.LogicalReplicas)
        return strategy.number if is_logical else self.options["mesh"]


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.3, momentum=0.9),
    # A large epsilon keeps Adam from turning the rounding of a zero gradient into a whole update.
    "adamw": lambda: optax.adamw(3e-2, eps=1e-2, weight_decay=0.5),
}


def choose(seed):
    """A set of options, most of them at their default."""
    rng = random.Random(seed)

    def maybe(*others, default, chance=0.3):
        return rng.choice(others) if rng.random() < chance else default

    form = maybe("rows", "scalar", "mean", "arrays", default="tokens", chance=0.6)
    masks = ["row", "empty", "token"] if form == "tokens" else ["row", "empty"]
    mask = maybe(*masks, default="no", chance=0.7) if form in ("tokens", "rows") else "no"
    norm = maybe("batch", "layer", default="none", chance=0.7)
    model = Net(norm, *(rng.random() < chance for chance in (0.3, 0.25, 0.2)))
    strategies = "zero1", "fsdp", jddp.LogicalReplicas(8), jddp.LocalSteps(2)
    options = {
        "mesh": rng.choice([1, 2, 4, 8]),
        "strategy": maybe(*strategies, default="ddp", chance=0.5),
        "batch_norm": maybe("local", "broadcast", default="sync"),
        "accumulate_steps": maybe(2, default=1),
        "max_grad_norm": maybe(0.05, default=None),
        "ema_decay": maybe(0.5, default=None),
        "unused_parameters": maybe("skip", "error", default="zero"),
        "skip_nonfinite": maybe(True, default=False, chance=0.2),
    }
    reduction = {
        "bucket_mb": rng.choice([40 / MIB, 25]),
        "layout": rng.choice(["leaf", "flat"]),
        "overlap": rng.choice([False, True]),
        "wire_dtype": maybe("bfloat16", "float16", default=None),
        "hook": maybe(jddp.CommHook(lambda plan: (), halves), default=None, chance=0.15),
    }
    loss_scale = maybe(2.0**6, "dynamic", default=None, chance=0.2)
    if maybe(True, default=False, chance=0.15):
        options["batch_norm"] = jddp.SyncBatchNorm(group_size=2)
        options["mesh"] = max(2, options["mesh"])
    # By numbers of its own: the other options of a seed are those without groups.
    size = random.Random(seed).choice([None, 2, 4])
    if options["strategy"] == "fsdp" and size is not None:
        options["strategy"] = jddp.FSDP(group_size=size)
        options["mesh"] = max(size, options["mesh"])
    if model.counts:
        options["state"] = {"counts": maybe("per_replica", default="sum")}
    if rng.random() < 0.8:
        change_what_is_refused(model, options, reduction)
    if loss_scale == "dynamic" and reduction["wire_dtype"] == "float16":
        reduction["wire_dtype"] = "bfloat16"  # or the first steps are skipped until the scale fits
    options["reduction"] = jddp.Reduction(**reduction)
    options["precision"] = jddp.Precision(loss_scale=loss_scale)
    # The statistics of a group without a valid row are anything, and so is what is counted of them.
    has_groups = model.norm == "batch" and isinstance(options["batch_norm"], jddp.SyncBatchNorm)
    if mask == "empty" and has_groups and model.counts:
        mask = "row"
    skips = options["skip_nonfinite"] or loss_scale == "dynamic"
    optimizer = rng.choice(["sgd", "adamw"])
    return Case(model, form, mask, optimizer, skips and rng.random() < 0.6, options)


def change_what_is_refused(model, options, reduction):
    """Changes options that are known to be refused together, so that most sets are run."""
    strategy = options["strategy"]
    if reduction["overlap"]:
        reduction["layout"] = "flat"
    if isinstance(strategy, jddp.LogicalReplicas | jddp.LocalSteps):
        reduction |= {"hook": None, "overlap": False}
        if model.norm == "batch":
            options["batch_norm"] = "local"
    if isinstance(strategy, jddp.LogicalReplicas):
        reduction["wire_dtype"] = None
    if strategy == "fsdp" or isinstance(strategy, jddp.FSDP):
        reduction |= {"hook": None, "overlap": False, "layout": "flat"}
        if reduction["wire_dtype"] == "float16":
            reduction["wire_dtype"] = "bfloat16"
        if options["batch_norm"] in ("local", "broadcast"):
            options["batch_norm"] = "sync"
    if model.unused and options["unused_parameters"] == "error":
        options["unused_parameters"] = "zero"


def halves(bucket, state, axis):
    """A mean by hand: not `lax.pmean`, and with no state."""
    return jax.tree.map(lambda x: lax.psum(x / lax.axis_size(axis), axis), bucket), state


def make_batch(case, number):
    rng = np.random.default_rng(number)
    batch = {
        "x": rng.normal(size=(ROWS, TOKENS, FEATURES)).astype(np.float32),
        "label": rng.integers(0, CLASSES, (ROWS, TOKENS)),
    }
    if case.form in MEANS:
        batch["weights"] = rng.choice([0.0, 0.5, 1.0, 3.0], (ROWS, TOKENS)).astype(np.float32)
        if case.replicas > 1:
            batch["weights"][: ROWS // case.replicas] = 0  # a replica of which nothing counts
    if case.mask != "no":
        shape = (ROWS, TOKENS) if case.mask == "token" else (ROWS,)
        batch["mask"] = (rng.random(shape) < 0.6).astype(np.float32)
        batch["mask"][-1] = 1
        if case.mask == "empty":
            batch["mask"][: ROWS // 2] = 0
    if case.fails and number == 1:
        batch["x"][-1] = np.inf
    return batch


# The judge.


def weights_of(case, rows):
    """What each loss of these rows counts for."""
    if case.form in ("scalar", *MEANS):
        return rows.get("weights", np.ones(()))
    mask = rows.get("mask", np.ones(len(rows["x"]), np.float32))
    return np.repeat(mask[:, None], TOKENS, 1) if case.form == "tokens" and mask.ndim == 1 else mask


@functools.cache
def run_piece(model, form, train):
    """Flax alone on some rows: the weighted sum of losses, its gradient, right answers, state."""

    def losses(params, model_state, rows, weights):
        given, mutable = {"params": params, **model_state}, list(model_state) if train else []
        logits, written = model.apply(given, rows["x"], rows.get("mask"), train, mutable=mutable)
        losses = token_losses(logits, rows["label"])
        right = (logits.argmax(-1) == rows["label"]).astype(jnp.float32)
        if form in ("rows", "scalar"):
            dims = 1 if form == "rows" else None
            losses, right = losses.mean(dims), right.mean(dims)
        # Metrics have no weights but the mask.
        counts = jnp.ones_like(right) if form in MEANS else weights
        total = jnp.where(weights > 0, losses * weights, 0).sum()
        return total, ((right * counts).sum(), counts.sum(), {**model_state, **written})

    if not train:
        return jax.jit(losses)
    return jax.jit(jax.value_and_grad(losses, has_aux=True))


@functools.cache
def update(name):
    """Parameters and optimizer state after an update of this optimizer."""

    def updated(grads, opt_state, params):
        updates, opt_state = OPTIMIZERS[name]().update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return jax.jit(updated)


def add(*trees):
    return jax.tree.map(lambda *x: np.sum(np.asarray(x, np.float64), 0).astype(np.float32), *trees)


@dataclasses.dataclass
class Replica:
    """What a replica has of its own; under plain data parallelism all have the same."""

    params: object
    opt_state: object
    model_state: object


def put(replicas, statistics):
    """Gives replicas batch statistics, where they share them."""
    for replica, x in zip(replicas, statistics, strict=True):
        replica.model_state = {**replica.model_state, "batch_stats": x}


def divided(grads, count, limit):
    """The mean gradient, clipped to a norm, and its norm before."""
    grads = jax.tree.map(lambda g: g / np.float32(count or 1), grads)
    norm = np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(grads)))
    if limit is not None and norm >= limit:
        grads = jax.tree.map(lambda g: g / norm * limit, grads)
    return grads, norm


class OneDevice:
    """Takes the steps of a case, one piece after the other."""

    def __init__(self, case, params, model_state):
        names = list(params) if case.chosen.get("frozen") else []
        self.frozen = {name: params.pop(name) for name in names if name == "first"}
        self.case, opt_state = case, OPTIMIZERS[case.optimizer]().init(params)
        self.replicas = [Replica(params, opt_state, model_state) for _ in range(case.replicas)]
        self.ema, self.together, self.taken = params, params, 0
        if plan := case.chosen["local_steps"]:
            self.outer = plan.outer.init(params)

    def groups(self):
        """The replicas that are run as one: those that share batch statistics."""
        options, num = self.case.chosen, self.case.replicas
        if self.case.model.norm == "batch" and options["batch_norm"] == "sync" and num > 1:
            size = options["batch_norm_group_size"] or num
            return [[*range(i, i + size)] for i in range(0, num, size)]
        return [[i] for i in range(num)]

    def gradients(self, batch):
        """For each group: the sum of its gradients, its sums, and whether it has any entry."""
        case, num = self.case, self.case.replicas
        parts = case.chosen["accumulate_steps"]
        split = {k: x.reshape(num, parts, -1, *x.shape[1:]) for k, x in batch.items()}
        run = run_piece(case.model, case.form, True)
        grads, sums = {}, {}
        is_shared = case.model.norm == "batch" and case.chosen["batch_norm"] == "sync"
        sharing = self.replicas if is_shared else []
        # Each part moves the statistics from where the step begins.
        begin = moved = [replica.model_state["batch_stats"] for replica in sharing]
        for part in range(parts):
            put(sharing, begin)
            states, first = {}, None
            for group in self.groups():
                rows = {k: x[group, part].reshape(-1, *x.shape[3:]) for k, x in split.items()}
                weights, replica = weights_of(case, rows), self.replicas[group[0]]
                given = self.whole(replica), replica.model_state
                (total, (right, counts, state)), grad = run(*given, rows, weights)
                grad = {name: grad[name] for name in replica.params}
                if weights.sum() == 0:
                    # A replica alone keeps its statistics, as do all where all is masked; what
                    # is counted of its rows is counted all the same.
                    grad = jax.tree.map(np.zeros_like, replica.params)
                    total, right = 0.0, right if case.form in MEANS else 0.0
                    kept = replica.model_state.get("batch_stats")
                    is_own = case.chosen["batch_norm"] == "local"
                    keeps = case.model.norm == "batch" and ("mask" in rows or is_own)
                    state = {**state, "batch_stats": kept} if keeps else state
                if first is None and rows.get("mask", np.ones(1)).any():  # weights are no mask
                    first = group[0]
                key = tuple(group)
                grads[key] = add(grads[key], host(grad)) if key in grads else host(grad)
                new = np.array([total, weights.sum(), right, counts], np.float64)
                sums[key] = sums.get(key, 0) + new
                states[key] = host(state)
            self.settle(states, first or 0)
            new = [replica.model_state["batch_stats"] for replica in sharing]
            moved = jax.tree.map(lambda x, y, z: x + (y - z) / parts, moved, new, begin)
        put(sharing, jax.tree.map(np.float32, moved))
        return grads, sums

    def settle(self, states, first):
        """State beside the parameters, as the options have it agree."""
        options = self.case.chosen
        new = {i: state for key, state in states.items() for i in key}
        old = [replica.model_state for replica in self.replicas]
        for i, replica in enumerate(self.replicas):
            state = dict(new[i])
            if "batch_stats" in state and options["batch_norm"] == "sync":
                valid = [new[key[0]]["batch_stats"] for key in states]
                state["batch_stats"] = jax.tree.map(lambda *x: np.mean(x, 0), *valid)
            if "batch_stats" in state and options["batch_norm"] == "broadcast":
                state["batch_stats"] = new[first]["batch_stats"]
            if "counts" in state and options["synchronized"]:
                moved = [new[k[0]]["counts"]["seen"] - old[k[0]]["counts"]["seen"] for k in states]
                state["counts"] = {"seen": sum(moved, old[i]["counts"]["seen"])}
            replica.model_state = state

    def step(self, batch):
        """One optimizer step; the metrics."""
        options, before = self.case.chosen, [dataclasses.replace(r) for r in self.replicas]
        with np.errstate(invalid="ignore"):
            grads, sums = self.gradients(batch)
            total = np.sum([*sums.values()], 0)
        loss = total[0] / (total[1] or 1)
        metrics = {"loss": loss, "accuracy": total[2] / (total[3] or 1)}
        if self.case.form in ("tokens", "rows"):
            metrics["count"] = total[1]
        plan, limit = options["local_steps"], options["max_grad_norm"]
        alone = bool(plan) and self.taken >= plan.start
        means = dict.fromkeys(grads, divided(add(*grads.values()), total[1], limit))
        if alone:
            means = {key: divided(g, sums[key][1], limit) for key, g in grads.items()}
        if limit is not None:
            metrics["grad_norm"] = np.mean([norm for _, norm in means.values()], dtype=np.float64)
        skips = options["skip_nonfinite"] or options["loss_scale"] == "dynamic"
        if skips and not all(np.isfinite(x).all() for x in jax.tree.leaves((loss, means))):
            self.replicas = before
            return metrics | {"skipped": np.float64(1)}
        for key, (mean, _) in means.items():
            for i in key:
                self.update(self.replicas[i], mean, waits=alone and not sums[key][1])
        self.taken += 1
        if alone and (self.taken - plan.start) % plan.every == 0:
            moved = jax.tree.map(np.subtract, self.together, self.mean(lambda r: r.params))
            updates, self.outer = plan.outer.update(moved, self.outer, self.together)
            self.together = host(optax.apply_updates(self.together, updates))
            for replica in self.replicas:
                replica.params = self.together
        elif not alone:
            self.together = self.replicas[0].params
        mean = self.mean(lambda r: r.params)
        self.ema = jax.tree.map(lambda a, b: 0.5 * a + 0.5 * b, self.ema, mean)
        return metrics

    def update(self, replica, grads, *, waits):
        """Takes a step; a replica that waits, without a valid entry, counts it and no more."""
        params, opt_state = update(self.case.optimizer)(grads, replica.opt_state, replica.params)
        if waits:
            replica.opt_state = jax.tree.map(
                lambda new, old: old if jnp.issubdtype(new.dtype, jnp.inexact) else new,
                host(opt_state),
                replica.opt_state,
            )
            return
        params = host(params)
        if self.case.model.unused and self.case.chosen["unused_parameters"] == "skip":
            params["unused"] = replica.params["unused"]
        replica.params, replica.opt_state = params, host(opt_state)

    def whole(self, replica):
        return replica.params | self.frozen

    def mean(self, of):
        def mean(*x):
            return np.mean(x, 0) if x[0].dtype.kind == "f" else x[0]

        return jax.tree.map(mean, *map(of, self.replicas))

    def variables(self):
        options, found = self.case.chosen, {"params": self.mean(self.whole)}
        if not options["per_replica"]:
            found |= self.mean(lambda r: r.model_state)
        if options["ema_decay"]:
            found["ema"] = self.ema | self.frozen
        if options["local_steps"]:
            rows = [replica.params for replica in self.replicas]
            found["replicas"] = jax.tree.map(lambda *x: np.stack(x), *rows)
        return found

    def evaluate(self, batches):
        """The exact means over all rows, with the parameters and statistics of all replicas."""
        run, totals = run_piece(self.case.model, self.case.form, False), np.zeros(4)
        means = self.mean(self.whole), self.mean(lambda r: r.model_state)
        for rows in batches:
            weights = weights_of(self.case, rows)
            total, (right, counts, _) = run(*means, rows, weights)
            totals += np.array([total, weights.sum(), right, counts], np.float64)
        return {"loss": totals[0] / totals[1], "accuracy": totals[2] / totals[3]}


def hold(case, *, evaluates=True, num_steps=STEPS, rtol=None):
    """Holds a case to one device; returns the words of its refusal, or None if it is equal."""
    optimizer, loss_fn = OPTIMIZERS[case.optimizer](), make_loss(case.form)
    try:
        ddp = jddp.DataParallel(case.model, optimizer, loss_fn, **case.options)
        state = ddp.init(1, make_batch(case, 0))
    except jddp.Error as refusal:
        return str(refusal)
    variables = host(ddp.model(state))
    one = OneDevice(case, variables.pop("params"), variables)
    rtol = TOLERANCES[case.chosen["wire_dtype"]] if rtol is None else rtol
    for number in range(num_steps):
        batch = make_batch(case, number)
        try:
            state, metrics = ddp.step(state, batch)
        except jddp.Error as refusal:
            if number == 0:
                return str(refusal)
            raise
        want = one.step(batch)
        if not case.fails or number != 1:
            got = numbers(metrics, want)
            assert_each_close(got, numbers(want, want), rtol, f"step {number}: ")
        assert_each_close(variables_of(case, ddp, state), one.variables(), rtol)
    if evaluates:
        plain = dataclasses.replace(case, fails=False)
        batches = [make_batch(plain, number) for number in (7, 8)]
        if case.form in ("tokens", "rows", "arrays"):
            batches[1] = {k: x[-5:] for k, x in batches[1].items()}
        want = one.evaluate(batches)
        got = numbers(ddp.evaluate(state, batches), want)
        assert_each_close(got, numbers(want, want), rtol, "evaluate: ")
    return None


def assert_each_close(got, want, rtol, what=""):
    assert got.keys() == want.keys()
    for name in want:
        assert_close(got[name], want[name], rtol=rtol, what=what + name)


def numbers(metrics, like):
    """Means, which are held to the largest of them, and the count apart from them."""
    found = {name: np.float64(metrics[name]) for name in like}
    return {"count": found.pop("count", None), "means": found}


def variables_of(case, ddp, state):
    """All that is compared: as it is read, the moving average, the parameters of each replica."""
    found = host(ddp.model(state))
    if case.chosen["per_replica"]:
        found = {"params": found["params"]}
    if case.chosen["ema_decay"]:
        found["ema"] = host(ddp.model(state, params="ema"))["params"]
    if case.chosen["local_steps"]:
        found["replicas"] = host(state.params)
    return found


SEEDS = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(30)]
SEEDS += [
    pytest.param(seed, marks=pytest.mark.long) for seed in (*range(30, 60), *range(1000, 1600))
]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_set_of_options_equals_one_device_or_is_refused(seed):
    hold(choose(seed))


# An option with a value that is not its default, and what makes that value possible at all.
VALUES = {
    "reduction.bucket_mb": {"reduction": jddp.Reduction(bucket_mb=40 / MIB)},
    "reduction.overlap=True": {"reduction": jddp.Reduction(overlap=True, layout="flat")},
    "reduction.wire_dtype": {"reduction": "bfloat16"},
    "reduction.hook": {"reduction": jddp.Reduction(hook=jddp.CommHook(lambda plan: (), halves))},
    "synced statistics": {"batch_norm": "sync"},
    "statistics of groups": {"batch_norm": jddp.SyncBatchNorm(group_size=2)},
    "local statistics": {"batch_norm": "local"},
    "broadcast statistics": {"batch_norm": "broadcast"},
    "state of replicas": {"state": {"counts": "per_replica"}},
    "sums of state": {"state": {"counts": "sum"}},
    "accumulate_steps": {"accumulate_steps": 2},
    "zero1": {"strategy": "zero1"},
    "logical replicas": {"strategy": jddp.LogicalReplicas(8)},
    "fsdp": {"strategy": "fsdp", "reduction": jddp.Reduction(layout="flat")},
    "fsdp in groups": {
        "strategy": jddp.FSDP(group_size=2),
        "reduction": jddp.Reduction(layout="flat"),
    },
    "local steps from the first": {"strategy": jddp.LocalSteps(2)},
    "max_grad_norm": {"max_grad_norm": 0.05},
    "ema_decay": {"ema_decay": 0.5},
    "unused_parameters": {"unused_parameters": "skip"},
    "frozen": {"frozen": ["first/.*"]},
    "skip_nonfinite": {"skip_nonfinite": True},
    "loss_scale": {"precision": jddp.Precision(loss_scale="dynamic")},
}
DEFAULTS = {
    name: option.default
    for name, option in inspect.signature(jddp.DataParallel).parameters.items()
    if option.default is not option.empty
} | {"mesh": 4, "reduction": jddp.Reduction(layout="leaf", overlap=False)}
STATISTICS = {name for name, options in VALUES.items() if "batch_norm" in options}
COUNTS = {name for name, options in VALUES.items() if "state" in options}
# Replicas run one after the other, or apart, cannot agree on what these have them agree on.
APART = {"logical replicas", "local steps from the first"}
TOGETHER = STATISTICS - {"local statistics"}
KINDS = {"local steps from the first": "local steps", "fsdp in groups": "fsdp"}
OF_NO_GROUP = {"local statistics", "broadcast statistics"}


def is_pair(first, second):
    """Whether both can be given: one option has one value, but a reduction has several."""
    return first.keys() & second.keys() <= {"reduction"}


PAIRS = [p for p in itertools.combinations(VALUES, 2) if is_pair(*map(VALUES.get, p))]


def hold_options(options, *, norm="layer", form="tokens", mask="no", optimizer="sgd", **how):
    """Holds options, beside which all are at their defaults, to one device."""
    model = Net(norm, attention=False, counts=False, unused=False)
    options = joined(DEFAULTS, options)
    case = Case(model, form, mask, optimizer, options["skip_nonfinite"], options)
    assert hold(case, **how) is None


def refused_by_table(pair):
    """The names in the table under which a pair is refused; None if it is not."""
    names = {KINDS.get(name, name) for name in pair} | {*pair}
    return next((x for x in REFUSED if names.issuperset(x)), None)


def is_refused(pair):
    is_apart = APART & set(pair) and TOGETHER & set(pair)
    is_divided = {"fsdp", "fsdp in groups"} & set(pair) and OF_NO_GROUP & set(pair)
    return bool(refused_by_table(pair) or is_apart or is_divided)


@pytest.mark.slow
@pytest.mark.parametrize("pair", swept([(pair,) for pair in PAIRS], every=3), ids="-".join)
def test_a_pair_of_options_equals_one_device_or_is_refused(pair):
    """Rows without a replica's valid ones, steps that are skipped, decay of what is unused."""
    chosen = set(pair)
    model = Net(
        norm="batch" if STATISTICS & chosen else "layer",
        attention=False,
        counts=bool(COUNTS & chosen),
        unused="unused_parameters" in pair,
    )
    options = joined(DEFAULTS, *map(VALUES.get, pair))
    mask = "empty" if {*OF_NO_GROUP, "local steps from the first"} & chosen else "row"
    optimizer = "adamw" if model.unused else "sgd"
    fails = bool({"skip_nonfinite", "loss_scale"} & chosen)
    refusal = hold(Case(model, "tokens", mask, optimizer, fails, options), evaluates=False)
    assert (refusal is not None) == is_refused(pair), refusal
    if names := refused_by_table(pair):
        assert f"{' and '.join(names)} cannot be combined" in refusal


NAMED = VALUES | {
    "reduction.overlap=True": {"reduction": jddp.Reduction(overlap=True)},
    "reduction.layout='leaf'": {"reduction": jddp.Reduction(layout="leaf")},
    "reduction.wire_dtype='float16'": {"reduction": "float16"},
    "batch_norm='local' or 'broadcast'": VALUES["local statistics"],
    "local steps": VALUES["local steps from the first"],
}


@pytest.mark.parametrize("pair", REFUSED, ids="-".join)
def test_a_pair_of_the_table_is_refused_when_it_is_given(pair):
    model = Net("batch", attention=False, counts=False, unused=False)
    options = joined(*map(NAMED.get, pair))
    with pytest.raises(jddp.ConfigError, match=f"{' and '.join(pair)} cannot be combined: "):
        jddp.DataParallel(model, optax.sgd(0.1), make_loss("tokens"), **options, mesh=4)
