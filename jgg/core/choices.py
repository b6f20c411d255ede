"""The choices of options, by name, for the whole library: importable without JAX, so that --help is fast."""

DTYPE_NAMES = "float32", "float16", "bfloat16"
W_LAYOUTS = "enk", "ekn"
IMPLEMENTATIONS = "triton", "xla", "interpret"

# of a measured product: its operations, how its rows are spread, and the name of a dtype: x and w are quantized to it
OPS = "forward", "dx", "dw"
GROUPS = "uneven", "even", "one", "some-empty"
FP8 = "fp8"

FSDP_SPLITS = "experts", "features"
EXCHANGES = "all_gather", "ragged_all_to_all"
REMAT = "none", "attention", "names", "all", "offload"
REWARD_SCALES = "group", "batch", "none"
AGGREGATIONS = "token", "sequence", "constant"  # of the losses of tokens
IMPORTANCES = "token", "sequence"
KL_ESTIMATORS = "k1", "k2", "k3"
MXFP4 = "mxfp4"
EXPERTS = "bfloat16", "as-stored", FP8, MXFP4  # how commands load them
CACHE_DTYPES = ("float8_e4m3fn",)  # in addition to that of the computation
TRACKERS = {"tensorboard": "tensorboardX", "wandb": "wandb"}  # and the package that each needs

# matrices that may have adapters
OF_ATTENTION = "w_q", "w_k", "w_v", "w_o"
OF_LATENT = "w_q_a", "w_q_b", "w_kv_a", "w_kv_b"
OF_DELTA = "w_qkvz", "w_qkv", "w_z", "w_out"
OF_GATES = "w_ba", "w_b", "w_a"  # of the same layers, with a column or two for each head
OF_MIXERS = *OF_ATTENTION, *OF_LATENT, *OF_DELTA, *OF_GATES
OF_EXPERTS = "w_gate_up", "w_down"
OF_MOE = "w_shared_gate_up", "w_shared_down", "w_router"  # and not of their experts
OF_DENSE = "w_dense_gate_up", "w_dense_down"
TARGETS = *OF_ATTENTION, *OF_LATENT, *OF_DELTA, *OF_EXPERTS, *OF_DENSE  # by default
ALL_TARGETS = *TARGETS, *OF_GATES, *OF_MOE
