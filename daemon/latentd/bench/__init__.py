"""Benchmarks of the kernels and of the step on this machine's GPU, without a daemon."""
