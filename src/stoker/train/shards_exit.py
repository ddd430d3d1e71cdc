"""How a `for` loop was left while its generator is being closed: by an exception, or by `break` and `return`.

Python closes the generator of a loop that ends early, but does not tell it why: an exception on its way out is not to
be seen from inside. What is to be seen is where the loop's frame stands: at an instruction that raises, or at one for
which there is a traceback. After `break` or `return` it stands at neither. From Python 3.12 on the exception itself can
be found through its traceback.
"""

from __future__ import annotations

import dis
import gc
import inspect
from types import FrameType, TracebackType

CLOSABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
RAISING = frozenset({dis.opmap["RAISE_VARARGS"], dis.opmap["RERAISE"]})


def exception_leaving(frame: FrameType | None, consumer: int) -> str | None:
    """What leaves the loop, and where; None if no exception does, or if that cannot be told.

    `frame` is what called into the generator while it is being closed, `consumer` the `id` of the frame that runs the
    loop. A loop in a generator or coroutine may have been closed likewise, so nothing is said of it.
    `KeyboardInterrupt` and its like, where they can be told, are nobody's failure.
    """
    if frame is None or id(frame) != consumer or frame.f_code.co_flags & CLOSABLE:
        return None
    traces = [r for r in gc.get_referrers(frame) if isinstance(r, TracebackType) and r.tb_frame is frame]
    here = [trace for trace in traces if trace.tb_lasti == frame.f_lasti]
    if not here and frame.f_code.co_code[frame.f_lasti] not in RAISING:
        return None
    errors = [r for r in gc.get_referrers(*(here or traces)) if isinstance(r, BaseException)]
    if any(not isinstance(error, Exception) for error in errors):
        return None
    what = repr(errors[0]) if len(errors) == 1 else "an exception"
    return f"{what} left the loop at {frame.f_code.co_filename}:{frame.f_lineno}"
