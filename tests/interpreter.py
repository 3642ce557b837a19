"""Makes Triton's interpreter fast at sorting. Import this before a kernel is run.

``tl.topk`` reduces by xor. The interpreter uses NumPy for sums, minima and maxima, but a loop over single numbers for
xor, in which the tests of the kernels spent most of their time. On a GPU our kernels sort without ``tl.topk``.
"""

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import ReduceOps

_slow = ReduceOps.generic_reduce


def _reduce(self, inputs):
    if self.combine_fn != tl.standard._xor_combine:
        return _slow(self, inputs)
    (numbers,) = inputs
    found = np.bitwise_xor.reduce(numbers.handle.data, axis=self.axis, keepdims=self.keep_dims)
    return self.to_tensor(found, numbers.dtype)


ReduceOps.generic_reduce = _reduce
