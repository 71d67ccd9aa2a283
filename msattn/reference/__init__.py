"""Every stage in eager torch: the CPU path, the semantics in code, the yardstick of the kernels.

Inputs have been checked by the stage's public function; everything is summed in fp32, scores in
fp64. Work is cut into chunks, so that the extra memory is bounded whatever the batch.
"""
