"""From a lineage to live tensors: chain, plan, fetch, decode, fold, apply."""
