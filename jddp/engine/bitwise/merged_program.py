"""Programs that XLA simplifies the same way on one device and on several: `logical_replicas`.

XLA compiles a program for several partitions by other passes than a program for one device. The
partitioner merges equal operations before the first algebraic simplification: Shardy merges equal
constants and broadcasts of scalars, and the partitioner's clean-up runs a common subexpression
elimination. On one device nothing is merged until later. Some rewrites depend on the number of
users of an operand: `a / broadcast(b)` becomes `a * broadcast(1 / b)` only where the broadcast has
one user. A softmax divides by its sum twice, forward and backward: with merged broadcasts it keeps
the division, with unmerged ones it loses it, and the last bit differs.

    step = MergedProgram(step, options, donated)   # in the place of jax.jit(step, ...)

So equal operations are merged here, before XLA, on any number of devices, and XLA's own pass is
switched off: the partitioner then finds nothing to merge. Calls are inlined first, because XLA
inlines them before it partitions, and operations of two calls may be equal too. On GPUs two more
passes are off (`PASSES`). Passes that `XLA_FLAGS` disables run in such a program: an option
replaces the flag of its name.

This room knows programs in StableHLO, and nothing about the models that they train.
"""

from collections.abc import Hashable
from typing import Any

import jax
from jax.extend.mlir import ir, passmanager

from jddp.engine.calls import checks_for_nan
from jddp.engine.spec import Function, Places, XlaOptions
from jddp.ground.typing import PyTree

Operation = Any  # of MLIR, whose classes a type checker does not know
DISABLED = "xla_disable_hlo_passes"
# They depend on the number of partitions: what is merged before or after other rewrites; on GPUs
# alone, too, what is simplified before the partitioner, where products are not yet in one form, and
# which sums share a kernel, by the order in which they stand.
PASSES = ("cse", "spmd-simplify", "multi_output_fusion")


class MergedProgram:
    """A jitted function, in whose program equal operations are merged before it is compiled.

    Args:
      function: The function.
      options: XlaOptions of XLA.
      donated: Arguments whose memory the program reuses, by their places.
    """

    def __init__(self, function: Function, options: XlaOptions, donated: Places) -> None:
        passes = ",".join(filter(None, [str((options or {}).get(DISABLED, "")), *PASSES]))
        options = {**(options or {}), DISABLED: passes}
        self._jitted = jax.jit(function, compiler_options=options, donate_argnums=donated)
        self.trace = self._jitted.trace
        self._compiled: dict[Hashable, jax.stages.Compiled] = {}

    def lower(self, *args: PyTree) -> jax.stages.Lowered:
        """Lowers the function for arguments, or for their shapes."""
        lowered: jax.stages.Lowered = self._jitted.lower(*args)
        # In place: `lowered.compile()` compiles the module that this returns.
        module: Operation = lowered.compiler_ir("stablehlo")
        with module.context, ir.Location.unknown():
            _inline_calls(module)
            passmanager.PassManager.parse("builtin.module(symbol-dce,cse)").run(module.operation)
        return lowered

    def __call__(self, *args: PyTree) -> PyTree:
        """Calls the function, compiled for arguments of this form."""
        leaves, treedef = jax.tree.flatten(args)
        if any(isinstance(x, jax.core.Tracer) for x in leaves):  # `jax.eval_shape` compiles nothing
            return self._jitted(*args)
        # Only a jitted function runs again, operation by operation, to find where the first NaN is.
        if checks_for_nan():
            return self._jitted(*args)
        # `jax.jit` would compile the unchanged program, so compiled ones are kept here, by the same
        # key: structure, types and shardings.
        form = treedef, tuple((jax.typeof(x), getattr(x, "sharding", None)) for x in leaves)
        if form not in self._compiled:
            self._compiled[form] = self.lower(*args).compile()
        return self._compiled[form](*args)


def _inline_calls(module: Operation) -> None:
    """Puts the body of each called function in the place of its call, nested ones included."""
    functions = {op.operation.attributes["sym_name"].value: op.operation for op in module.body}
    while calls := _calls(functions["main"]):
        for call in calls:
            callee = functions[call.attributes["callee"].value].clone()
            [block] = callee.regions[0].blocks
            for parameter, value in zip(block.arguments, call.operands, strict=True):
                parameter.replace_all_uses_with(value)
            *body, end = block.operations
            for op in body:
                op.operation.move_before(call)
            for result, value in zip(call.results, end.operation.operands, strict=True):
                result.replace_all_uses_with(value)
            call.erase()
            callee.erase()


def _calls(function: Operation) -> list[Operation]:
    found = []

    def note(op: Operation) -> Operation:
        if op.name == "func.call":
            found.append(op)
        return ir.WalkResult.ADVANCE

    function.walk(note)
    return found
