"""The latentd daemon: weights, latent pool, graphs and the server; start it with `latentd serve`."""
