"""Triton's interpreter without the work that nobody looks at, which is most of its time where coverage is measured.

Kernels and what they compute stay as they are. So does a Triton whose insides have other names, and is slower.
"""

import inspect
from dataclasses import replace
from typing import Any

from tests.tracing import untraced


def quicken() -> None:
    """For a process that interprets; before its first launch."""
    try:
        from triton.runtime import interpreter

        # Without ``debug``, what this check computes again in int64, sum by sum and product by product, is dropped.
        options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
        patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
        nothing = interpreter._LangPatchScope
    except (ImportError, AttributeError, TypeError):
        return

    patched: set[int] = set()
    traced: set[str] = set()

    def patch_once(function: Any) -> Any:
        """Every call of a device function patches triton.language; for the rest of a launch, the first will do."""
        module = id(function.__globals__)
        if module in patched:
            return nothing()
        patched.add(module)
        return patch(function)

    def launch_traced_once(self: Any, *args: Any, **kwargs: Any) -> None:
        """Coverage's tracer, which is called for each line of the interpreter too, sees a variant's first launch."""
        given = {name: value for name, value in kwargs.items() if name in self.arg_names}
        arguments = inspect.signature(self.fn).bind_partial(*args, **given).arguments
        variant = repr((self.fn, [arguments.get(name) for name in self.constexprs]))
        is_known = variant in traced
        traced.add(variant)
        patched.clear()
        try:
            with untraced(is_known):
                launch(self, *args, **kwargs)
        finally:
            patched.clear()

    interpreter.interpreter_builder.options = options
    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_traced_once
