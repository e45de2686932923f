"""FP4 arithmetic in JAX: NVFP4 and MXFP4 formats and the operations on them. Knows nothing of models or RL."""
