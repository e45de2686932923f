"""TRACE in JAX: FP4 reinforcement learning of MoE language models with rollout-guided quantization.

The system above the arithmetic of `kernels_pallas`: models, quantization sites, guidance records, rollout,
RL, alignment metrics, tasks, data, meshes and run folders. Scripts that wire them are in `experiments`.
"""
