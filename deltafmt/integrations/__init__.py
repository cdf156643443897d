"""Callbacks and plug-ins for trainers and inference engines; each needs the package that it is named after."""
