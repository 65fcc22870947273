"""The catalogue of accelerators: what they can do, with sources. Imports no torch."""
