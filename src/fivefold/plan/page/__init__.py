"""A plan as one HTML page. Begin with `document.py`. Imports no torch."""
