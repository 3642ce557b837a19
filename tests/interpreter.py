"""Makes Triton's interpreter fast. Import this before a kernel is run.

- ``tl.topk`` reduces by xor. The interpreter uses NumPy for sums, minima and maxima, but a loop over single numbers
  for xor. On a GPU our kernels sort without ``tl.topk``.
- Every call of a function in a kernel replaced the functions of ``triton.language`` by those of the interpreter anew.
  Once in a launch is enough for each module that calls them.

The tests of the kernels spent most of their time on these two.
"""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_slow = interpreter.ReduceOps.generic_reduce
_launch = interpreter.GridExecutor.__call__
_replace = interpreter._patch_lang
_replaced = set()  # modules of functions that were called since the launch


def _reduce(self, inputs):
    if self.combine_fn != tl.standard._xor_combine:
        return _slow(self, inputs)
    (numbers,) = inputs
    found = np.bitwise_xor.reduce(numbers.handle.data, axis=self.axis, keepdims=self.keep_dims)
    return self.to_tensor(found, numbers.dtype)


def _launch_anew(self, *args, **options):
    _replaced.clear()
    return _launch(self, *args, **options)


def _replace_once(function):
    if function.__module__ in _replaced:
        return None
    _replaced.add(function.__module__)
    return _replace(function)


interpreter.ReduceOps.generic_reduce = _reduce
interpreter.GridExecutor.__call__ = _launch_anew
interpreter._patch_lang = _replace_once
