"""A contender of `gpu.py` in JAX, and the programs of all of them for a GPU that is only described.

    python gpu_jax.py JOB CONTENDER [smoke]     # CONTENDER: a key of CONTENDERS

The network is that of `jddp.zoo.models` for all, so that what differs is the step around it.
"""

import importlib.metadata
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import optax
from flax import linen as nn
from gpu_crew import Facts, Turn, one_line, serve
from gpu_jobs import JOBS, SMOKE_JOBS, Job
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jddp
from jddp.zoo.models import MODELS
from jddp.zoo.tiles import tiled_cross_entropy

Started = tuple[Callable[..., Any], Any, Any]  # A step, its first state, its batch.
WARM_UP_STEPS = 5


def make_model(job: Job, attention: str = "xla") -> Any:
    chosen = {} if job.model == "resnet50" else {"attention": attention}
    return MODELS[job.model](dtype="bfloat16", **job.sizes, **chosen)


def make_optimizer(job: Job) -> optax.GradientTransformation:
    if job.sgd:
        momentum = optax.sgd(0.01, momentum=0.9, nesterov=True)
        return optax.chain(optax.add_decayed_weights(1e-4), momentum)
    return optax.adamw(1e-4, b2=0.95, weight_decay=0.1)


def loss_fn(model: Any, batch: Any, train: bool) -> Any:
    """Losses of images, or the mean over tokens, which are scored in tiles."""
    if batch["targets"].ndim == 1:
        logits = model(batch["inputs"], train)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    head = partial(tiled_cross_entropy, labels=batch["targets"], train=train)
    return model(batch["inputs"], train, loss_head=head)[0]


def make_ddp(
    job: Job, mesh: Mesh | None = None, attention: str = "xla", batch_norm: str = "local"
) -> jddp.DataParallel:
    """As users write it; by default each replica has its own batch norm, as with PyTorch's DDP."""
    model, optimizer = make_model(job, attention), make_optimizer(job)
    return jddp.DataParallel(model, optimizer, loss_fn, mesh=mesh, batch_norm=batch_norm)


def start_jddp(job: Job, **options: str) -> Started:
    """Starts from the values of the step by hand, so that losses can be compared."""
    ddp, rows = make_ddp(job, **options), job.batch(rows=jax.local_device_count())
    params, model_state, _ = jax.jit(partial(first_state, job))(rows)
    state = ddp.init(seed=0, batch=rows, params={"params": params, **model_state})
    return ddp.step, state, ddp.shard_batch(job.batch(rows=job.rows * jax.local_device_count()))


def first_state(job: Job, batch: Any) -> Any:
    """Parameters, other state of the model, and the optimizer's."""
    inputs = batch["inputs"][:1]
    variables = make_model(job).init(jax.random.key(0), inputs, train=True)
    params = variables.pop("params")
    return params, variables, make_optimizer(job).init(params)


def make_step_by_hand(job: Job) -> Callable[..., Any]:
    """A step as one writes it with Flax and optax for one device."""
    model, optimizer = make_model(job), make_optimizer(job)

    def step(state: Any, batch: Any) -> Any:
        params, model_state, opt_state = state

        def mean_loss(params: Any) -> Any:
            variables = {"params": params, **model_state}
            run = nn.apply(partial(loss_fn, train=True), model, mutable=list(model_state))
            losses, after = run(variables, batch)
            is_mean = isinstance(losses, jddp.Mean)
            return losses.total / losses.count.sum() if is_mean else losses.mean(), after

        (loss, model_state), grads = jax.value_and_grad(mean_loss, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), model_state, opt_state), {"loss": loss}

    return jax.jit(step, donate_argnums=0)


def start_by_hand(job: Job) -> Started:
    batch = jax.device_put(job.batch())
    return make_step_by_hand(job), jax.jit(partial(first_state, job))(batch), batch


CONTENDERS: dict[str, Callable[[Job], Started]] = {
    "by_hand": start_by_hand,
    "jddp": start_jddp,
    "jddp_sync": partial(start_jddp, batch_norm="sync"),
    "jddp_of_8": start_jddp,  # Eight devices, by its environment.
    "jddp_sync_of_8": partial(start_jddp, batch_norm="sync"),
    "jddp_cudnn": partial(start_jddp, attention="cudnn"),
}


def prepare(job: Job, contender: str) -> Callable[[], tuple[Facts, Turn]]:
    """Makes state and batch, which takes the GPU a moment; the step is compiled later, alone."""
    started = time.perf_counter()
    begun = CONTENDERS[contender](job)
    return partial(build, begun, contender, time.perf_counter() - started)


def build(begun: Started, contender: str, prepared_seconds: float) -> tuple[Facts, Turn]:
    started = time.perf_counter()
    (step, state, batch), device = begun, jax.local_devices()[0]

    def turn(num_steps: int) -> Facts:
        nonlocal state
        begun = time.perf_counter()
        for _ in range(num_steps):
            state, metrics = step(state, batch)
        jax.block_until_ready(state)  # Steps are only sent until here.
        seconds = (time.perf_counter() - begun) / num_steps
        peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
        return {"seconds": seconds, "peak_bytes": peak, "loss": float(metrics["loss"])}

    warmed_up = turn(WARM_UP_STEPS)  # Compiles, and chooses kernels.
    facts = {
        "early_loss": warmed_up["loss"],
        "device": device.device_kind,
        "devices": 1 if contender == "by_hand" else jax.device_count(),
        "versions": versions(),
        "build_seconds": prepared_seconds + time.perf_counter() - started,
        "step_seconds": turn(WARM_UP_STEPS)["seconds"],
    }
    if contender == "jddp":
        facts["target_description"] = target_description(device)
    return facts, turn


def versions() -> dict[str, str]:
    names = ("jax", "jaxlib", "flax", "optax", "jax-cuda12-plugin", "jax-cuda13-plugin")
    names += ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
    installed = {each.name.lower(): each.version for each in importlib.metadata.distributions()}
    found = {name: installed[name] for name in names if name in installed}
    return {"jddp": jddp.__version__, **found}


def target_description(device: jax.Device) -> str | None:
    """How XLA describes the device to itself, from which it compiles where there is none."""
    from jax._src.lib import xla_client

    try:
        return str(xla_client.get_topology_for_devices([device]).target_config)
    except Exception as error:  # Of CPUs there is none, and JAX promises nobody this attribute.
        print(one_line(f"no description: {error}"), file=sys.stderr)
        return None


def lower(job: Job, contender: str, mesh: Mesh) -> jax.stages.Lowered:
    """The step of a contender for devices that need not be there, with nothing allocated."""
    rows = job.rows * mesh.size
    shapes = {name: (rows, *x.shape[1:]) for name, x in job.batch(rows=1).items()}
    dtypes = {name: x.dtype for name, x in job.batch(rows=1).items()}
    if contender != "by_hand":
        batch = {k: jax.ShapeDtypeStruct(shapes[k], dtypes[k]) for k in shapes}
        batch_norm = "sync" if "sync" in contender else "local"
        return make_ddp(job, mesh, batch_norm=batch_norm).steps.lower(batch)
    sharding = NamedSharding(mesh, P())
    place = partial(jax.ShapeDtypeStruct, sharding=sharding)
    batch = {k: place(shapes[k], dtypes[k]) for k in shapes}
    state = jax.eval_shape(partial(first_state, job), batch)
    state = jax.tree.map(lambda x: place(x.shape, x.dtype), state)
    return make_step_by_hand(job).lower(state, batch)


if __name__ == "__main__":
    name, chosen, *smoke = sys.argv[1:]
    serve(partial(prepare, (SMOKE_JOBS if smoke else JOBS)[name], chosen))
