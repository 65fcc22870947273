"""Saving and loading the state of a run: asynchronous, checksummed, whole or not there at all."""
