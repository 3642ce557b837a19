"""Functions of losses.

>>> import torch
>>> from weince import dcl_loss
>>> dcl_loss(torch.randn(4, 8), torch.randn(4, 8), temperature=0.2).ndim
0
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weince.losses.base import ContrastiveLoss
from weince.losses.options import Roles, check_roles

_modules: dict[Any, ContrastiveLoss] = {}
"""Modules by class and options, as far as they hold no state."""

MOST_MODULES = 64


def functional(
    loss: type[ContrastiveLoss], name: str, example: str = "torch.randn(4, 8), torch.randn(4, 8)"
) -> Callable[..., Any]:
    """Make a function of a loss; it takes the options of the class and those of its call.

    Args:
        loss: The class.
        name: Name of the function.
        example: Arguments of the example in its docstring.
    """

    def function(
        z_i: Tensor, z_j: Tensor | None = None, *, return_stats: bool = False, **options: Any
    ) -> Any:
        roles = {name: options.pop(name) for name in Roles.__annotations__ if name in options}
        module = _module(loss, options)
        check_roles(module, roles, len(z_i) if isinstance(z_i, Tensor) else 0)
        batch = {"z_i": z_i, "z_j": z_j, **roles}
        # Not the module's own call, which looks at its first batch: a new module would do so every time.
        return module.computed(
            {name: value for name, value in batch.items() if value is not None}, return_stats
        )

    about = (loss.__doc__ or "").splitlines()[0]
    function.__doc__ = f"""{about} A function with the options of :class:`{loss.__name__}` and of its call.

    If your loss learns or remembers something, such as a scale or WEINCE's running slope, use the class: the
    function starts anew with each call.

    Examples:
        >>> import torch
        >>> from weince import {name}
        >>> {name}({example}).shape
        torch.Size([])
    """
    function.__name__ = function.__qualname__ = name
    function.__module__ = loss.__module__  # where pickle looks for the name
    return function


def _module(loss: type[ContrastiveLoss], options: dict[str, Any]) -> ContrastiveLoss:
    """A module with these options: that of an earlier call if it has no state and its options are plain values."""
    plain = all(value is None or isinstance(value, int | float | str) for value in options.values())
    # As text: 1 and True would be the same key.
    key = (loss, repr(options)) if plain and not torch.compiler.is_compiling() else None
    if key in _modules:
        return _modules[key]
    module = loss(**{"graph": False, **options})
    if key is not None and not module.state_dict():
        if len(_modules) >= MOST_MODULES:
            _modules.clear()
        _modules[key] = module
    return module
