"""Compiled modules inside a pipeline: their code must not see the frontier, which the compiler would try to trace."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.overrides import _get_current_function_mode_stack, _pop_mode_temporarily

from ramtorch_core.engine.pipeline.frontier import Frontier

__all__ = ["Arrive", "shield"]

Arrive = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def shield(module: nn.Module, arrive: Arrive) -> Callable[[], None] | None:
    """Let the compiled code of `module` run without frontier, on arguments that `arrive` has brought to its stage.

    Covers `module.compile()` and `torch.compile(module)`. Returns what undoes it, or None for other modules.
    """
    place = _compiled_call(module)
    if place is None:
        return None
    compiled = vars(module)[place]

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = arrive(args, kwargs)
        with _hidden():
            return compiled(*args, **kwargs)

    vars(module)[place] = call

    def undo() -> None:
        vars(module)[place] = compiled

    return undo


def _compiled_call(module: nn.Module) -> str | None:
    """The attribute through which `module` runs compiled code."""
    if vars(module).get("_compiled_call_impl") is not None:
        return "_compiled_call_impl"
    return "forward" if type(module).__name__ == "OptimizedModule" and "forward" in vars(module) else None


@contextlib.contextmanager
def _hidden() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        while any(isinstance(mode, Frontier) for mode in _get_current_function_mode_stack()):
            stack.enter_context(_pop_mode_temporarily())
        yield
