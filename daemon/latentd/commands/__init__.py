"""The commands of `latentd`, one module each: `add` declares the flags, `run` does the work."""
