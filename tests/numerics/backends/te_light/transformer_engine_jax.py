"""Stands in for Transformer Engine's compiled module `transformer_engine_jax` 2.20.2.

Its Python files, `pip install --no-deps transformer_engine==2.20.2`, import with it without CUDA:
to trace, to lower and to compile for GPUs that are not there, and to compute on a CPU with
NVTE_JAX_CUSTOM_CALLS=false. Nothing of it runs on a GPU.

Names and numbers were read from the real module's enumerations; the StableHLO of a dense layer is
the same, byte for byte, with both.
"""

from enum import IntEnum

from jaxlib import lapack

ENUMERATIONS = {
    "DType": {
        "kByte": 0, "kInt32": 2, "kInt64": 3, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6,
        "kFloat8E4M3": 7, "kFloat8E5M2": 8, "kFloat8E8M0": 9, "kFloat4E2M1": 10,
    },
    "JAXX_Collective_Op": {"NONE": 0, "ALL_GATHER": 1, "REDUCE_SCATTER": 2},
    "JAXX_Quantize_Layout": {"ROWWISE": 0, "COLWISE": 1, "ROWWISE_COLWISE": 2},
    "JAXX_Routing_Map_Format": {"BYTEMAP": 0, "BITMAP_U8": 1},
    "JAXX_Scaling_Mode": {
        "NO_SCALING": 0, "DELAYED_TENSOR_SCALING": 1, "MXFP8_1D_SCALING": 2,
        "CURRENT_TENSOR_SCALING": 3, "NVFP4_1D_SCALING": 4, "NVFP4_2D_SCALING": 5,
    },
    "JAXX_Score_Function": {"SIGMOID": 0, "SOFTMAX": 1, "SQRTSOFTPLUS": 2},
    "NVTE_Activation_Type": {
        "GELU": 0, "GEGLU": 1, "GLU": 2, "SILU": 3, "SWIGLU": 4, "RELU": 5, "REGLU": 6, "QGELU": 7,
        "QGEGLU": 8, "SRELU": 9, "SREGLU": 10, "CLAMPED_SWIGLU": 11,
    },
    "NVTE_Bias_Type": {"NVTE_NO_BIAS": 0, "NVTE_PRE_SCALE_BIAS": 1, "NVTE_POST_SCALE_BIAS": 2},
    "NVTE_Fused_Attn_Backend": {
        "NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2,
    },
    "NVTE_Mask_Type": {
        "NVTE_NO_MASK": 0, "NVTE_PADDING_MASK": 1, "NVTE_CAUSAL_MASK": 2,
        "NVTE_PADDING_CAUSAL_MASK": 3, "NVTE_CAUSAL_BOTTOM_RIGHT_MASK": 4,
        "NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK": 5,
    },
    "NVTE_Norm_Type": {"LayerNorm": 0, "RMSNorm": 1},
    "NVTE_QKV_Format": {
        "NVTE_SBHD": 0, "NVTE_BSHD": 1, "NVTE_THD": 2, "NVTE_QKV_Format_NOT_SET": 8,
    },
    "NVTE_QKV_Layout": {
        "NVTE_BS3HD": 5, "NVTE_BSHD_BS2HD": 7, "NVTE_BSHD_BSHD_BSHD": 9, "NVTE_T3HD": 10,
        "NVTE_THD_T2HD": 12, "NVTE_THD_THD_THD": 14, "NVTE_QKV_Layout_NOT_SET": 26,
    },
    "NVTE_Softmax_Type": {
        "NVTE_VANILLA_SOFTMAX": 0, "NVTE_OFF_BY_ONE_SOFTMAX": 1, "NVTE_LEARNABLE_SOFTMAX": 2,
    },
}  # fmt: skip
# Those whose members the real module exports as well.
_EXPORTED = (
    "JAXX_Collective_Op", "JAXX_Quantize_Layout", "JAXX_Routing_Map_Format", "JAXX_Scaling_Mode",
    "JAXX_Score_Function", "NVTE_Activation_Type", "NVTE_Norm_Type",
)  # fmt: skip
for _name, _members in ENUMERATIONS.items():
    globals()[_name] = IntEnum(_name, _members)
    if _name in _EXPORTED:
        globals().update(globals()[_name].__members__)

_TARGETS = ("te_rht_amax_ffi", "te_dbias_quantize_ffi", "te_gemm_v2_ffi")


def registrations() -> dict[str, object]:
    """A handler for each custom call of a dense layer: XLA compiles no call without one.

    Any will do that answers what XLA asks while it compiles; this one is LAPACK's.
    """
    handler = lapack.registrations()["cpu"][0][1]
    return dict.fromkeys(_TARGETS, handler)


def get_device_compute_capability(gpu_id: int = 0) -> int:
    return 100


def get_cuda_version() -> int:
    return 13050


def get_cudnn_version() -> int:
    return 92801


def get_cublasLt_version() -> int:
    return 131000


def get_cudnn_frontend_version() -> int:
    return 13200


def get_num_compute_streams() -> int:
    return 4


def is_non_nt_fp8_gemm_supported() -> bool:
    return True


def nvte_built_with_cublasmp() -> bool:
    return False


def is_collective_gemm_with_cublasmp() -> bool:
    return False


def get_grouped_gemm_setup_workspace_size(num_tensors: int) -> int:
    return 624


def __getattr__(name: str):
    if name.startswith(("__", "get_ep_instance")):
        raise AttributeError(name)

    def absent(*arguments, **options):
        raise RuntimeError(f"the stand-in of transformer_engine_jax has no {name}")

    return absent
