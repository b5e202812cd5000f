"""A door to the daemon for programs that speak OpenAI's HTTP interface: a process of its own, and a
client of the daemon like any other. `latentd-openai --help`."""
