"""Coverage's tracer, which makes a test half as long again and kernels that are interpreted three times as long."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def untraced(when: bool) -> Iterator[None]:
    """Without coverage's tracer, should there be one, if ``when``. Any other, a debugger's, stays."""
    tracer = sys.gettrace()
    is_off = when and type(tracer).__module__.startswith("coverage")
    if is_off:
        sys.settrace(None)
    try:
        yield
    finally:
        if is_off:
            sys.settrace(tracer)
