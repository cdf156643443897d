"""From live tensors to a committed version: detect, encode, pack, commit."""
