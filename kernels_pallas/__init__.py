"""FP4 arithmetic in JAX: the NVFP4 and MXFP4 formats and operations on them. Knows no models and no RL."""
