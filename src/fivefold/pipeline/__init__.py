"""Pipeline parallelism: which layers a stage has. Imports no torch."""
