"""The cpu backend: every kernel's computation in torch and numpy, one row at a time."""
