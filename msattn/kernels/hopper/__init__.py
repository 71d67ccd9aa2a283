"""Kernels for Hopper alone, in Gluon: warp specialised, pages by the copy engine.

Each module has the stem, the functions and the arguments of its twin in :mod:`..triton`. Gluon must
not be compiled for another GPU (it ends the process), so :mod:`.support` is asked first.
"""
