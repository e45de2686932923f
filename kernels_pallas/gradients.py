"""Gradients of kernels that have none of their own."""

import functools
from collections.abc import Callable
from typing import Any

import jax


def with_gradient_of(reference: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: a function whose gradient in its positional arguments is that of `reference` at the same arguments.

    Options, given by keyword, are those of both.
    """

    def decorate(run):
        @functools.wraps(run)
        def call(*args, **options):
            primal = jax.custom_vjp(functools.partial(run, **options))

            def forward(*args):
                return primal(*args), args

            def backward(args, cotangent):
                return jax.vjp(functools.partial(reference, **options), *args)[1](cotangent)

            primal.defvjp(forward, backward)
            return primal(*args)

        return call

    return decorate
