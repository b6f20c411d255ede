"""The keys of config.json that every family of `jgg.models` has, with the defaults of transformers.

The rows of a family's defaults hold the keys of the model, of attention and of experts, in this order.
"""

# keys of all families that `jgg.models` has
OF_MODELS = {
    "eos_token_id": None,
    "head_dim": None,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "num_nextn_predict_layers": 0,
    "original_max_position_embeddings": None,
    "partial_rotary_factor": None,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
