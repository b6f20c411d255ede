"""Finds what a jitted function returns as it was given: XLA copies that at each call, unless it is donated."""

import jax
from jax.extend.core import Var

SAME = {"jgg_barrier", "optimization_barrier", "sharding_constraint"}  # the results are the operands


def returned_arguments(jitted, *args, **kwargs):
    """The names of the arguments that a jitted function returns unchanged and that are not donated to it."""
    traced = jitted.trace(*args, **kwargs)
    donated = [argument.donated for argument in jax.tree.leaves(traced.args_info)]
    names = traced.jaxpr.jaxpr.debug_info.arg_names
    return [names[source] for source in sources_of(traced.jaxpr) if source is not None and not donated[source]]


def sources_of(program):
    """For each result of a program the number of the argument that it is, or None; JAX itself looks into loops."""
    jaxpr = getattr(program, "jaxpr", program)
    source = {variable: number for number, variable in enumerate(jaxpr.invars)}
    for equation in jaxpr.eqns:
        operands = range(len(equation.outvars)) if equation.primitive.name in SAME else ()
        if equation.primitive.name in ("jit", "pjit"):
            operands = sources_of(equation.params["jaxpr"])
        for result, operand in zip(equation.outvars, operands, strict=False):
            given = None if operand is None else equation.invars[operand]
            if isinstance(given, Var) and given in source:
                source[result] = source[given]
    return [source.get(result) if isinstance(result, Var) else None for result in jaxpr.outvars]
