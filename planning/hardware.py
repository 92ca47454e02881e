"""What a GPU can do at best, from its makers' data sheets; all that the time model knows of it.

Peaks are dense (without structured sparsity), per GPU. Links are per GPU and direction.

| GPU | source |
|---|---|
| A100 SXM 80 GB | NVIDIA A100 data sheet: BF16 312, NVLink 600 GB/s both ways |
| H100, H200 SXM | NVIDIA H100 and H200 data sheets: BF16 989, FP8 1979; NVLink 900 GB/s both ways |
| B200 | NVIDIA HGX B200 (8 GPUs: 72 PF dense FP4, 36 FP8, 18 BF16); NVLink 1.8 TB/s both ways |
| GB200 | NVIDIA GB200 NVL72 (72 GPUs: 720 PF dense FP4, 360 FP8, 180 BF16) |
| B300 | NVIDIA HGX B300 (8 GPUs: 108 PF dense FP4, 36 FP8, 18 BF16) |
| GB300 | NVIDIA GB300 NVL72 (72 GPUs: 1,080 PF dense FP4, 360 FP8, 180 BF16) |
| VR NVL72 | NVIDIA Vera Rubin NVL72, as announced: 35 PF FP4 for training, 17.5 FP8, 4 BF16 |
| RTX PRO 6000 | NVIDIA RTX PRO 6000 data sheet: 2 PF dense FP4, 1 FP8, 0.5 BF16; PCIe 5.0 |

FP32 is what products that ask for full float32 run at: without tensor cores, whose TF32 is another
format. Per GPU from the same sheets (HGX B200 and B300: 600 TF for 8, NVL72: 5,760 TF for 72).

Between hosts: one InfiniBand or Ethernet port per GPU, 200, 400 or 800 Gbit/s (ConnectX-6, 7, 8).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU, with its links.

    Attributes:
      peaks: FLOP/s by precision of the operands. A precision that is missing runs as bf16.
      nvlink: bytes per second to the others of its NVLink domain, one direction.
      nvlink_domain: GPUs that NVLink connects. 72 are taken to be used as 64.
      network: bytes per second to all others, one direction.
      efficiency: share of the peaks that whole training steps reach: fitted to `PUBLISHED` for
        GB200 and GB300, see docs/planning.md.
      calibrated_on: the GPU whose published steps the efficiency comes from.
    """

    peaks: dict[str, float]
    nvlink: float
    nvlink_domain: int
    network: float
    efficiency: float
    calibrated_on: str


@dataclass(frozen=True)
class PublishedStep:
    """A row of the published table: NVIDIA's blog of June 2026, Megatron-Bridge with Transformer
    Engine; sequences of 8192 tokens.

    Of llama-3-8b the layout is published (FSDP over 4, 4 sequences per GPU), of the 405B runs it is
    not. Here they have one sequence per group of `tensor` GPUs and step, and state over 64 GPUs;
    GB200's memory does not hold what remat=save_quantized keeps of it, GB300's does.

    tflops: model TFLOP/s per GPU in NVFP4.
    """

    model: str
    target: str
    tflops: float
    devices: int
    batch_size: int
    data: int
    fsdp: int
    tensor: int
    remat: str

    def overrides(self) -> list[str]:
        """The run as arguments of plan.py."""
        return [
            f"model={self.model}",
            "precision=nvfp4",
            "sequence_length=8192",
            f"batch_size={self.batch_size}",
            f"mesh.data={self.data}",
            f"mesh.fsdp={self.fsdp}",
            f"mesh.tensor={self.tensor}",
            f"remat={self.remat}",
        ]


PUBLISHED = (
    PublishedStep("llama-3-8b", "gb200", 2017, 4, 16, 1, 4, 1, "save_quantized"),
    PublishedStep("llama-3-8b", "gb300", 2301, 4, 16, 1, 4, 1, "save_quantized"),
    PublishedStep("llama-3.1-405b", "gb200", 2224, 512, 128, 8, 16, 4, "full"),
    PublishedStep("llama-3.1-405b", "gb300", 3633, 512, 128, 8, 16, 4, "save_quantized"),
)

_T, _G = 1e12, 1e9
_GB200_EFFICIENCY = 0.53
_GB300_EFFICIENCY = 0.58

HARDWARE = {
    "a100": Hardware(
        {"bf16": 312 * _T, "fp32": 19.5 * _T},
        300 * _G, 8, 25 * _G, _GB200_EFFICIENCY, "gb200",
    ),
    "h100": Hardware(
        {"bf16": 989 * _T, "fp8": 1979 * _T, "fp32": 67 * _T},
        450 * _G, 8, 50 * _G, _GB200_EFFICIENCY, "gb200",
    ),
    "h200": Hardware(
        {"bf16": 989 * _T, "fp8": 1979 * _T, "fp32": 67 * _T},
        450 * _G, 8, 50 * _G, _GB200_EFFICIENCY, "gb200",
    ),
    "b200": Hardware(
        {"fp4": 9000 * _T, "fp8": 4500 * _T, "bf16": 2250 * _T, "fp32": 75 * _T},
        900 * _G, 8, 50 * _G, _GB200_EFFICIENCY, "gb200",
    ),
    "gb200": Hardware(
        {"fp4": 10000 * _T, "fp8": 5000 * _T, "bf16": 2500 * _T, "fp32": 80 * _T},
        900 * _G, 64, 50 * _G, _GB200_EFFICIENCY, "gb200",
    ),
    "b300": Hardware(
        {"fp4": 13500 * _T, "fp8": 4500 * _T, "bf16": 2250 * _T, "fp32": 75 * _T},
        900 * _G, 8, 100 * _G, _GB300_EFFICIENCY, "gb300",
    ),
    "gb300": Hardware(
        {"fp4": 15000 * _T, "fp8": 5000 * _T, "bf16": 2500 * _T, "fp32": 80 * _T},
        900 * _G, 64, 100 * _G, _GB300_EFFICIENCY, "gb300",
    ),
    "vr-nvl72": Hardware(
        {"fp4": 35000 * _T, "fp8": 17500 * _T, "bf16": 4000 * _T, "fp32": 130 * _T},
        1800 * _G, 64, 200 * _G, _GB300_EFFICIENCY, "gb300",
    ),
    "rtx-pro-6000": Hardware(
        {"fp4": 2000 * _T, "fp8": 1000 * _T, "bf16": 500 * _T, "fp32": 125 * _T},
        50 * _G, 8, 25 * _G, _GB200_EFFICIENCY, "gb200",
    ),
}  # fmt: skip
