"""The architectures of Hugging Face, each as one `Family`: keys of config.json with defaults, and names of tensors."""

from jgg.hf.families.deepseek import DEEPSEEK_V3, GLM4_MOE, GLM4_MOE_LITE
from jgg.hf.families.dots import DOTS1
from jgg.hf.families.ernie import ERNIE4_5_MOE
from jgg.hf.families.exaone import EXAONE_MOE
from jgg.hf.families.gemma import GEMMA4, GEMMA4_TEXT
from jgg.hf.families.gpt_oss import GPT_OSS
from jgg.hf.families.granite import GRANITEMOE
from jgg.hf.families.hunyuan import HY_V3
from jgg.hf.families.llama4 import LLAMA4
from jgg.hf.families.mellum import MELLUM
from jgg.hf.families.minimax import MINIMAX_M2
from jgg.hf.families.mixtral import MIXTRAL
from jgg.hf.families.olmoe import OLMOE
from jgg.hf.families.qwen import QWEN2_MOE, QWEN3_MOE, QWEN3_VL_MOE, QWEN3_VL_MOE_TEXT
from jgg.hf.families.qwen3_next import QWEN3_5_MOE, QWEN3_5_MOE_TEXT, QWEN3_NEXT
from jgg.hf.families.solar import SOLAR_OPEN
from jgg.hf.family import Family

FAMILIES: dict[str, Family] = {
    "deepseek_v3": DEEPSEEK_V3,
    "dots1": DOTS1,
    "ernie4_5_moe": ERNIE4_5_MOE,
    "exaone_moe": EXAONE_MOE,
    "gemma4": GEMMA4,
    "gemma4_text": GEMMA4_TEXT,
    "glm4_moe": GLM4_MOE,
    "glm4_moe_lite": GLM4_MOE_LITE,
    "gpt_oss": GPT_OSS,
    "granitemoe": GRANITEMOE,
    "hy_v3": HY_V3,
    "kimi_k2": DEEPSEEK_V3,
    "llama4": LLAMA4,
    "mellum": MELLUM,
    "minimax_m2": MINIMAX_M2,
    "mixtral": MIXTRAL,
    "olmoe": OLMOE,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_5_moe": QWEN3_5_MOE,
    "qwen3_5_moe_text": QWEN3_5_MOE_TEXT,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_vl_moe": QWEN3_VL_MOE,
    "qwen3_vl_moe_text": QWEN3_VL_MOE_TEXT,
    "solar_open": SOLAR_OPEN,
}
