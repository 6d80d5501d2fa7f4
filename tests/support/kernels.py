"""In the processes of the tests themselves BF16 is computed by torch's own kernels, whose bits they compare with.

A program that a test starts is a user's, and chooses for itself: a CPU without BF16 instructions runs it many times
faster.
"""

from hmpx.ops.computing import kernels

kernels.has_instructions = lambda dtype: True
