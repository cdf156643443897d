"""What people with a back end, a kernel or a reader of their own need to hold it to deltafmt's promises.

`store_suite` is a test class to subclass, `faulty` a store that goes wrong on command, `fsspec_stores` runs
fsspec's own file systems under the adapter, `strategies` makes hypothesis draw schemas, tensors and layouts.
"""

from __future__ import annotations
