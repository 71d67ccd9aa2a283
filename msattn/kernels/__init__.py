"""Device kernels: one folder for each technology, the stages' stems inside."""
