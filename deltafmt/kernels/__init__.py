"""Hot loops: what changed, positions, steps, digests, writes into live memory.

Functions take and return plain arrays and know nothing of objects, storage or versions. The CPU back end
is compiled by numba, once on a machine; `torch_backend` does the same for tensors on any device.
"""

from deltafmt.kernels.compiling import prepare

prepare()
