"""Kernels for Hopper alone, in Gluon: warp specialised, pages by the copy engine.

A module with the stem of one in :mod:`..triton` is its twin, with the same functions. Gluon must
not be compiled for another GPU (it ends the process), so :mod:`.support` is asked first.
"""
