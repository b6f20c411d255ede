"""The architectures of Hugging Face, each as one `Family`: keys of config.json with defaults, and names of tensors."""

from jgg.hf.families.deepseek import DEEPSEEK_V3, GLM4_MOE
from jgg.hf.families.exaone import EXAONE_MOE
from jgg.hf.families.gpt_oss import GPT_OSS
from jgg.hf.families.granite import GRANITEMOE, GRANITEMOEHYBRID, GRANITEMOESHARED
from jgg.hf.families.llama4 import LLAMA4, LLAMA4_TEXT
from jgg.hf.families.mellum import MELLUM
from jgg.hf.families.mixtral import MIXTRAL
from jgg.hf.families.olmoe import OLMOE
from jgg.hf.families.qwen import QWEN3_MOE, QWEN3_NEXT, QWEN3_VL_MOE, QWEN3_VL_MOE_TEXT
from jgg.hf.family import Family

FAMILIES: dict[str, Family] = {
    "deepseek_v3": DEEPSEEK_V3,
    "exaone_moe": EXAONE_MOE,
    "glm4_moe": GLM4_MOE,
    "gpt_oss": GPT_OSS,
    "granitemoe": GRANITEMOE,
    "granitemoehybrid": GRANITEMOEHYBRID,
    "granitemoeshared": GRANITEMOESHARED,
    "kimi_k2": DEEPSEEK_V3,
    "llama4": LLAMA4,
    "llama4_text": LLAMA4_TEXT,
    "mellum": MELLUM,
    "mixtral": MIXTRAL,
    "olmoe": OLMOE,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_vl_moe": QWEN3_VL_MOE,
    "qwen3_vl_moe_text": QWEN3_VL_MOE_TEXT,
}
