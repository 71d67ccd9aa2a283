"""Portable Triton kernels: any NVIDIA GPU from sm_80 on, and a CPU through Triton's interpreter.

Each module has the stem and the functions of its stage in :mod:`msattn.reference`, with the same
arguments; a function chooses constants, launches, and does nothing else. Nothing is compiled at
import, and no constant depends on the lengths of a batch.
"""
