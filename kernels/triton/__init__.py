"""Triton kernels, for a GPU: one module per op.

Every launch says `enable_fp_fusion=False`: a product and a sum are rounded each, in whichever
kernel they stand. What Triton does unless told differs between its versions.
"""
