"""The latentd daemon: weights, latent pool, graphs and server; started by `latentd serve`."""
