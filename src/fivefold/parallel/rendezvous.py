"""Where the ranks of one machine meet: a file, named by an environment variable. Imports no torch.

Our own launcher sets it, `mesh.connect` reads it. A file needs no free port and no address; each start has a new one.
"""

RENDEZVOUS = "FIVEFOLD_RENDEZVOUS"
"""The variable that holds the file's path."""
