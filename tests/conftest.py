"""Makes implicit promotion of dtypes and ranks an error in every test."""

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
