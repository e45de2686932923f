"""The decorator of Triton kernels. Imports triton, as do all modules that use it: loaded only where one is called."""

import inspect
from collections.abc import Callable

import triton


def jit(function: Callable) -> triton.JITFunction:
    """`triton.jit` of the function as written.

    Run-time type checkers wrap functions; Triton would then read the source of one and the globals of another.
    """
    return triton.jit(inspect.unwrap(function))
