"""The flags of SGLang 0.5.23, for the lab's stand-in. Written by lab/sglang/update_flags.

Facts of the released wheel in the form of argparse calls: names, types, choices and defaults.
The source does not tell the choices of these, so any value is taken:
    --cuda-graph-backend-decode
    --cuda-graph-backend-prefill
    --kv-canary-real-data
    --sampling-backend
"""

from __future__ import annotations

import argparse
import json

from sglang.standin.argtypes import (
    DeprecatedStoreConstAction,
    DeprecatedStoreTrueAction,
    LoRAPathAction,
    human_readable_int,
    json_list_type,
    nullable_str,
    parse_cuda_graph_backend_arg,
    parse_cuda_graph_config_arg,
)


class ServerArgs:
    """The command line of SGLang 0.5.23."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:  # noqa: PLR0915
        """Register every flag that SGLang 0.5.23 accepts, sorted by name."""
        parser.add_argument("--abort-on-priority-when-disabled", action="store_true")
        parser.add_argument("--admin-api-key")
        parser.add_argument("--allow-auto-truncate", action="store_true")
        parser.add_argument("--allowed-media-domains", nargs="+")
        parser.add_argument("--api-key")
        parser.add_argument("--asr-max-buffer-seconds", type=int, default=60)
        parser.add_argument("--asr-max-concurrent-sessions", type=int, default=32)
        parser.add_argument(
            "--attention-backend",
            choices=[
                "triton",
                "torch_native",
                "flex_attention",
                "dsa",
                "nsa",
                "qsa",
                "dsv4",
                "compressed",
                "fa3",
                "fa4",
                "flashinfer",
                "llada2_cfg_flashinfer",
                "flashmla",
                "trtllm_mla",
                "cutedsl_mla",
                "tokenspeed_mla",
                "trtllm_mha",
                "hpc_ops",
                "minicpm_flashattn",
                "minicpm_flashinfer",
                "aiter",
                "wave",
                "intel_amx",
                "ascend",
                "intel_xpu",
            ],
        )
        parser.add_argument(
            "--attn-cp-size", "--attention-context-parallel-size", type=int, default=1
        )
        parser.add_argument("--attn-dp-size", "--attention-data-parallel-size", type=int, default=1)
        parser.add_argument("--base-gpu-id", type=int, default=0)
        parser.add_argument("--batch-notify-size", type=int, default=16)
        parser.add_argument(
            "--bf16-gemm-backend", choices=["auto", "cutedsl", "gemv", "torch"], default="auto"
        )
        parser.add_argument(
            "--boundary-reduction", choices=["auto", "ar", "rs", "rsv", "rs+rsv"], default="auto"
        )
        parser.add_argument("--bucket-e2e-request-latency", type=float, nargs="+")
        parser.add_argument("--bucket-inter-token-latency", type=float, nargs="+")
        parser.add_argument("--bucket-time-to-first-token", type=float, nargs="+")
        parser.add_argument("--c128-page-size", type=int, default=16)
        parser.add_argument("--chat-template")
        parser.add_argument("--checkpoint-engine-wait-weights-before-ready", action="store_true")
        parser.add_argument("--chunked-prefill-size", type=int)
        parser.add_argument("--completion-template")
        parser.add_argument("--config")
        parser.add_argument("--constrained-json-disable-any-whitespace", action="store_true")
        parser.add_argument("--constrained-json-max-whitespace-cnt", type=int)
        parser.add_argument("--constrained-json-whitespace-pattern")
        parser.add_argument("--context-length", type=human_readable_int)
        parser.add_argument("--cp-strategy", choices=["zigzag", "interleave"])
        parser.add_argument("--cpu-offload-gb", type=int, default=0)
        parser.add_argument("--crash-dump-folder")
        parser.add_argument("--cuda-graph-backend-decode", type=parse_cuda_graph_backend_arg)
        parser.add_argument("--cuda-graph-backend-prefill", type=parse_cuda_graph_backend_arg)
        parser.add_argument("--cuda-graph-bs-decode", type=int, nargs="+")
        parser.add_argument("--cuda-graph-bs-prefill", type=int, nargs="+")
        parser.add_argument("--cuda-graph-config", type=parse_cuda_graph_config_arg)
        parser.add_argument("--cuda-graph-max-bs-decode", type=int)
        parser.add_argument("--cuda-graph-max-bs-prefill", type=int)
        parser.add_argument("--cuda-graph-max-seq-len-prefill", type=int)
        parser.add_argument(
            "--cuda-graph-prefill-max-context", "--context-bucket", type=human_readable_int
        )
        parser.add_argument("--custom-weight-loader", nargs="*")
        parser.add_argument("--dcp-comm-backend", choices=["ag_rs", "a2a", "fi_a2a"])
        parser.add_argument("--dcp-replicate-q-proj", action=argparse.BooleanOptionalAction)
        parser.add_argument("--dcp-size", "--decode-context-parallel-size", type=int, default=1)
        parser.add_argument("--debug-cuda-graph", action="store_true")
        parser.add_argument("--debug-tensor-dump-input-file")
        parser.add_argument("--debug-tensor-dump-layers", type=int, nargs="+")
        parser.add_argument("--debug-tensor-dump-output-folder")
        parser.add_argument(
            "--decode-attention-backend",
            choices=[
                "triton",
                "torch_native",
                "flex_attention",
                "dsa",
                "nsa",
                "qsa",
                "dsv4",
                "compressed",
                "fa3",
                "fa4",
                "flashinfer",
                "llada2_cfg_flashinfer",
                "flashmla",
                "trtllm_mla",
                "cutedsl_mla",
                "tokenspeed_mla",
                "trtllm_mha",
                "hpc_ops",
                "minicpm_flashattn",
                "minicpm_flashinfer",
                "aiter",
                "wave",
                "intel_amx",
                "ascend",
                "intel_xpu",
            ],
        )
        parser.add_argument("--decode-log-interval", type=int, default=40)
        parser.add_argument("--decoupled-spec-bind-endpoint")
        parser.add_argument("--decoupled-spec-connect-endpoints", type=json_list_type)
        parser.add_argument("--decoupled-spec-rank", type=int)
        parser.add_argument(
            "--decoupled-spec-role", choices=["null", "verifier", "drafter"], default="null"
        )
        parser.add_argument("--decrypted-config-file")
        parser.add_argument("--decrypted-draft-config-file")
        parser.add_argument("--deepep-config")
        parser.add_argument(
            "--deepep-dispatcher-output-dtype",
            choices=["auto", "bf16", "fp8", "int8", "nvfp4"],
            default="auto",
        )
        parser.add_argument(
            "--deepep-mode", choices=["auto", "normal", "low_latency"], default="auto"
        )
        parser.add_argument("--deepep-v2-mode", choices=["direct", "hybrid"], default="direct")
        parser.add_argument("--default-chat-template-kwargs", type=json.loads)
        parser.add_argument("--default-priority-value", type=int)
        parser.add_argument("--delete-ckpt-after-loading", action="store_true")
        parser.add_argument("--detokenizer-worker-num", type=int, default=1)
        parser.add_argument("--device")
        parser.add_argument("--disable-aiter-allreduce-fusion-in-decode", action="store_true")
        parser.add_argument("--disable-aiter-allreduce-fusion-in-prefill", action="store_true")
        parser.add_argument("--disable-attn-tp-gather", action="store_true")
        parser.add_argument("--disable-chunked-prefix-cache", action="store_true")
        parser.add_argument(
            "--disable-cuda-graph",
            action=DeprecatedStoreTrueAction,
            new_flag="--cuda-graph-backend-{decode,prefill}=disabled",
            default=None,
        )
        parser.add_argument("--disable-cuda-graph-padding", action="store_true")
        parser.add_argument("--disable-custom-all-reduce", action="store_true")
        parser.add_argument("--disable-decode-cuda-graph", action="store_true")
        parser.add_argument("--disable-fast-image-processor", action="store_true")
        parser.add_argument("--disable-flashinfer-autotune", action="store_true")
        parser.add_argument("--disable-flashinfer-cutlass-moe-fp4-allgather", action="store_true")
        parser.add_argument("--disable-hybrid-swa-memory", action="store_true")
        parser.add_argument("--disable-outlines-disk-cache", action="store_true")
        parser.add_argument("--disable-overlap-schedule", action="store_true")
        parser.add_argument("--disable-prefill-cuda-graph", action="store_true")
        parser.add_argument("--disable-priority-preemption", action="store_true")
        parser.add_argument("--disable-radix-cache", action="store_true")
        parser.add_argument("--disable-shared-experts-fusion", action="store_true")
        parser.add_argument("--disable-tokenizer-batch-decode", action="store_true")
        parser.add_argument("--disaggregation-bootstrap-port", type=int, default=8998)
        parser.add_argument(
            "--disaggregation-decode-allocation-policy",
            choices=["early", "prefill_complete"],
            default="early",
        )
        parser.add_argument("--disaggregation-decode-enable-offload-kvcache", action="store_true")
        parser.add_argument("--disaggregation-decode-enable-radix-cache", action="store_true")
        parser.add_argument("--disaggregation-decode-extra-slots", type=int)
        parser.add_argument(
            "--disaggregation-decode-host-receive-threshold", type=float, default=1.0
        )
        parser.add_argument("--disaggregation-decode-polling-interval", type=int, default=1)
        parser.add_argument(
            "--disaggregation-decode-retraction-backup", choices=["cpu_tensor", "host_pool", "none"]
        )
        parser.add_argument("--disaggregation-enable-kv-checksum", action="store_true")
        parser.add_argument("--disaggregation-ib-device")
        parser.add_argument(
            "--disaggregation-mode", choices=["null", "prefill", "decode"], default="null"
        )
        parser.add_argument(
            "--disaggregation-transfer-backend",
            choices=["mooncake", "nixl", "ascend", "fake", "mori", "mooncake_tcp"],
            default="mooncake",
        )
        parser.add_argument("--dist-init-addr", "--nccl-init-addr")
        parser.add_argument("--dist-timeout", type=int)
        parser.add_argument("--dllm-algorithm")
        parser.add_argument("--dllm-algorithm-config")
        parser.add_argument("--dllm-fdfo", action=argparse.BooleanOptionalAction, default=True)
        parser.add_argument("--download-dir")
        parser.add_argument("--dp-size", "--data-parallel-size", type=int, default=1)
        parser.add_argument(
            "--dsa-decode-backend",
            choices=[
                "flashmla_sparse",
                "flashmla_sparse_q8",
                "flashmla_kv",
                "flashmla_auto",
                "flashinfer_sparse_mla",
                "fa3",
                "tilelang",
                "triton",
                "aiter",
                "trtllm",
                "intel_xpu",
            ],
        )
        parser.add_argument(
            "--dsa-paged-mqa-logits-backend",
            choices=["auto", "deepgemm", "cutedsl", "aiter"],
            default="auto",
        )
        parser.add_argument(
            "--dsa-prefill-backend",
            choices=[
                "flashmla_sparse",
                "flashmla_sparse_q8",
                "flashmla_kv",
                "flashmla_auto",
                "flashinfer_sparse_mla",
                "triton_sparse_mla",
                "fa3",
                "tilelang",
                "triton",
                "aiter",
                "trtllm",
                "intel_xpu",
            ],
        )
        parser.add_argument(
            "--dsa-topk-backend",
            choices=["sgl-kernel", "torch", "flashinfer"],
            default="sgl-kernel",
        )
        parser.add_argument("--dsa-triton-union", type=int, choices=[0, 2, 4], default=0)
        parser.add_argument(
            "--dsv4-attn-backend",
            choices=["auto", "flashmla", "flashmla_mega", "trtllm"],
            default="auto",
        )
        parser.add_argument(
            "--dsv4-prefill-backend",
            choices=["auto", "flashmla_sparse", "flashmla_sparse_q8"],
            default="auto",
        )
        parser.add_argument(
            "--dtype",
            choices=["auto", "half", "float16", "bfloat16", "float", "float32"],
            default="auto",
        )
        parser.add_argument("--dwdp-size", type=int, default=1)
        parser.add_argument("--dynamic-batch-tokenizer-batch-size", type=int, default=32)
        parser.add_argument("--dynamic-batch-tokenizer-batch-timeout", type=float, default=0.002)
        parser.add_argument("--elastic-ep-backend", choices=["none", "mooncake", "nixl"])
        parser.add_argument("--elastic-ep-initial-size", type=int)
        parser.add_argument(
            "--elastic-ep-join-mode", dest="ep_join_mode", choices=["scale", "recover"]
        )
        parser.add_argument(
            "--elastic-ep-join-rank-offset", dest="ep_join_rank_offset", type=int, default=0
        )
        parser.add_argument("--elastic-ep-scale-timeout", type=float, default=600)
        parser.add_argument("--enable-adaptive-dispatch-to-encoder", action="store_true")
        parser.add_argument("--enable-aiter-allreduce-fusion", action="store_true")
        parser.add_argument("--enable-amd-monokernel", action="store_true")
        parser.add_argument("--enable-attn-tp-input-scattered", action="store_true")
        parser.add_argument("--enable-broadcast-mm-inputs-process", action="store_true")
        parser.add_argument("--enable-cache-report", action="store_true")
        parser.add_argument("--enable-cp-decode-attn-tp", action="store_true")
        parser.add_argument("--enable-cudagraph-gc", action="store_true")
        parser.add_argument("--enable-custom-logit-processor", action="store_true")
        parser.add_argument(
            "--enable-decoder-swa-bounded-replay", action=argparse.BooleanOptionalAction
        )
        parser.add_argument("--enable-deepseek-v4-fp4-indexer", action="store_true")
        parser.add_argument("--enable-dense-mlp-attn-tp", action="store_true")
        parser.add_argument("--enable-deterministic-inference", action="store_true")
        parser.add_argument(
            "--enable-dp-attention",
            action=DeprecatedStoreTrueAction,
            new_flag="--attn-dp-size <dp-size>",
            default=None,
        )
        parser.add_argument("--enable-dp-attention-local-control-broadcast", action="store_true")
        parser.add_argument("--enable-dp-lm-head", action="store_true")
        parser.add_argument("--enable-draft-weights-cpu-backup", action="store_true")
        parser.add_argument("--enable-dsa-cache-layer-split", action="store_true")
        parser.add_argument("--enable-dsa-fused-indexer", action=argparse.BooleanOptionalAction)
        parser.add_argument("--enable-dynamic-batch-tokenizer", action="store_true")
        parser.add_argument("--enable-dynamic-chunking", action="store_true")
        parser.add_argument("--enable-elastic-expert-backup", action="store_true")
        parser.add_argument("--enable-encoder-swa-bounded-replay", action="store_true")
        parser.add_argument("--enable-eplb", action="store_true")
        parser.add_argument("--enable-flashinfer-allreduce-fusion", action="store_true")
        parser.add_argument("--enable-flexkv", action="store_true")
        parser.add_argument("--enable-forward-pass-metrics", action="store_true")
        parser.add_argument("--enable-fp32-lm-head", action="store_true")
        parser.add_argument("--enable-fused-moe-sum-all-reduce", action="store_true")
        parser.add_argument("--enable-fused-qk-norm-rope", action=argparse.BooleanOptionalAction)
        parser.add_argument("--enable-hierarchical-cache", "--enable-hicache", action="store_true")
        parser.add_argument("--enable-hisparse", action="store_true")
        parser.add_argument("--enable-http-worker-reuseport", action="store_true")
        parser.add_argument("--enable-http2", action="store_true")
        parser.add_argument("--enable-int8-mamba-checkpoint", action="store_true")
        parser.add_argument("--enable-kv-cache-sharding", action="store_true")
        parser.add_argument("--enable-layernorm-sp", action="store_true")
        parser.add_argument("--enable-layerwise-nvtx-marker", action="store_true")
        parser.add_argument("--enable-lean-attention", action="store_true", default=None)
        parser.add_argument("--enable-linear-replayssm", action="store_true")
        parser.add_argument("--enable-linear-replayssm-spec", action="store_true")
        parser.add_argument("--enable-linker-mla-dedup", action="store_true")
        parser.add_argument("--enable-lmcache", action="store_true")
        parser.add_argument("--enable-lora", action="store_true", default=None)
        parser.add_argument("--enable-lora-overlap-loading", action="store_true", default=None)
        parser.add_argument("--enable-mamba-cache-stochastic-rounding", action="store_true")
        parser.add_argument("--enable-megamoe-for-layernorm-sp", action="store_true")
        parser.add_argument("--enable-memory-saver", action="store_true")
        parser.add_argument("--enable-metrics", action="store_true")
        parser.add_argument("--enable-metrics-for-all-schedulers", action="store_true")
        parser.add_argument("--enable-mfu-metrics", action="store_true")
        parser.add_argument("--enable-mis", action="store_true")
        parser.add_argument("--enable-mixed-chunk", action="store_true")
        parser.add_argument("--enable-mm-global-cache", action="store_true")
        parser.add_argument("--enable-mscclpp", action="store_true")
        parser.add_argument("--enable-multi-layer-eagle", action="store_true")
        parser.add_argument("--enable-multimodal", action="store_true", default=None)
        parser.add_argument("--enable-nccl-nvls", action="store_true")
        parser.add_argument("--enable-nvidia-megakernel", action="store_true")
        parser.add_argument("--enable-p2p-check", action="store_true")
        parser.add_argument("--enable-page-major-kv-layout", action="store_true")
        parser.add_argument("--enable-paged-experts", action="store_true")
        parser.add_argument("--enable-pd-role-switch", action="store_true")
        parser.add_argument("--enable-pdmux", action="store_true")
        parser.add_argument("--enable-precise-embedding-interpolation", action="store_true")
        parser.add_argument("--enable-prefill-cp", action="store_true")
        parser.add_argument("--enable-prefill-delayer", action="store_true")
        parser.add_argument("--enable-prefix-mm-cache", action="store_true")
        parser.add_argument("--enable-priority-scheduling", action="store_true")
        parser.add_argument("--enable-profile-cuda-graph", action="store_true")
        parser.add_argument("--enable-quant-communications", action="store_true")
        parser.add_argument("--enable-request-time-stats-logging", action="store_true")
        parser.add_argument("--enable-response-store", action="store_true")
        parser.add_argument("--enable-return-aux-hidden-states", action="store_true")
        parser.add_argument("--enable-return-hidden-states", action="store_true")
        parser.add_argument("--enable-return-indexer-topk", action="store_true")
        parser.add_argument("--enable-return-routed-experts", action="store_true")
        parser.add_argument("--enable-scattered-sconv", action="store_true")
        parser.add_argument("--enable-session-radix-cache", action="store_true")
        parser.add_argument("--enable-shared-experts-attn-tp", action="store_true")
        parser.add_argument("--enable-single-batch-overlap", action="store_true")
        parser.add_argument("--enable-ssl-refresh", action="store_true")
        parser.add_argument("--enable-streaming-session", action="store_true")
        parser.add_argument("--enable-strict-thinking", action="store_true")
        parser.add_argument("--enable-symm-mem", action="store_true")
        parser.add_argument("--enable-tf32-matmul", action=argparse.BooleanOptionalAction)
        parser.add_argument("--enable-tokenizer-batch-encode", action="store_true")
        parser.add_argument("--enable-torch-compile", action="store_true")
        parser.add_argument("--enable-torch-compile-debug-mode", action="store_true")
        parser.add_argument("--enable-torch-symm-mem", action="store_true")
        parser.add_argument("--enable-tp-lm-head-all-to-all", action=argparse.BooleanOptionalAction)
        parser.add_argument("--enable-trace", action="store_true")
        parser.add_argument("--enable-two-batch-overlap", action="store_true")
        parser.add_argument("--enable-unified-cache-external-linker", action="store_true")
        parser.add_argument("--enable-unified-memory", action="store_true")
        parser.add_argument("--enable-w4a4-mxfp4-megamoe", action="store_true")
        parser.add_argument("--enable-waterfill", action="store_true")
        parser.add_argument("--enable-watermark", action="store_true")
        parser.add_argument("--enable-weights-cpu-backup", action="store_true")
        parser.add_argument("--encoder-bootstrap-port", type=int, default=8997)
        parser.add_argument("--encoder-only", action="store_true")
        parser.add_argument("--encoder-register-urls", nargs="+")
        parser.add_argument(
            "--encoder-transfer-backend",
            choices=["auto", "zmq_to_scheduler", "zmq_to_tokenizer", "mooncake"],
            default="auto",
        )
        parser.add_argument("--encoder-urls", nargs="+")
        parser.add_argument("--enforce-disable-flashinfer-allreduce-fusion", action="store_true")
        parser.add_argument("--enforce-shared-experts-fusion", action="store_true")
        parser.add_argument("--engine-info-bootstrap-port", type=int, default=6789)
        parser.add_argument("--ep-dispatch-algorithm", choices=["static", "dynamic", "fake", "lp"])
        parser.add_argument("--ep-num-redundant-experts", type=int, default=0)
        parser.add_argument("--ep-size", "--expert-parallel-size", "--ep", type=int, default=1)
        parser.add_argument("--eplb-algorithm", default="auto")
        parser.add_argument("--eplb-min-rebalancing-utilization-threshold", type=float, default=1.0)
        parser.add_argument("--eplb-rebalance-layers-per-chunk", type=int)
        parser.add_argument("--eplb-rebalance-num-iterations", type=int, default=1000)
        parser.add_argument(
            "--expert-balancedness-report-mode",
            choices=["off", "server_log", "prometheus", "both"],
            default="off",
        )
        parser.add_argument("--expert-distribution-recorder-buffer-size", type=int)
        parser.add_argument(
            "--expert-distribution-recorder-mode",
            choices=["stat", "stat_approx", "per_pass", "per_token"],
        )
        parser.add_argument("--experts-shared-outer-loras", action=argparse.BooleanOptionalAction)
        parser.add_argument("--export-metrics-to-file", action="store_true")
        parser.add_argument("--export-metrics-to-file-dir")
        parser.add_argument("--extra-metric-labels", type=json.loads)
        parser.add_argument("--fastapi-root-path", default="")
        parser.add_argument("--file-storage-path")
        parser.add_argument(
            "--flashinfer-a2a-dispatch-type", choices=["auto", "bf16", "nvfp4", "mxfp8"]
        )
        parser.add_argument(
            "--flashinfer-allreduce-fusion-backend", choices=["auto", "trtllm", "mnnvl", "cutedsl"]
        )
        parser.add_argument("--flashinfer-autotune-skip-ops", nargs="+")
        parser.add_argument("--flashinfer-mla-disable-ragged", action="store_true")
        parser.add_argument(
            "--flashinfer-mxfp4-moe-precision",
            choices=["default", "bf16", "fp8"],
            default="default",
        )
        parser.add_argument("--flexkv-config-file")
        parser.add_argument("--forward-hooks", type=json_list_type)
        parser.add_argument("--forward-pass-metrics-ipc-name")
        parser.add_argument("--forward-pass-metrics-worker-id", default="")
        parser.add_argument(
            "--fp4-gemm-backend",
            dest="fp4_gemm_runner_backend",
            choices=[
                "auto",
                "flashinfer_cudnn",
                "flashinfer_cutedsl",
                "flashinfer_cutlass",
                "flashinfer_trtllm",
                "marlin",
            ],
            default="auto",
        )
        parser.add_argument(
            "--fp8-gemm-backend",
            dest="fp8_gemm_runner_backend",
            choices=[
                "auto",
                "deep_gemm",
                "flashinfer_trtllm",
                "flashinfer_cutlass",
                "flashinfer_deepgemm",
                "flashinfer_cutedsl",
                "cutlass",
                "triton",
                "aiter",
            ],
            default="auto",
        )
        parser.add_argument("--fuseep-mode", type=int, choices=[1, 2], default=2)
        parser.add_argument("--gated-launch-port", type=int)
        parser.add_argument("--gc-threshold", type=int, nargs="+")
        parser.add_argument("--gc-warning-threshold-secs", type=float, default=0.0)
        parser.add_argument("--generation-tokens-buckets", nargs="+")
        parser.add_argument("--gpu-id-step", type=int, default=1)
        parser.add_argument(
            "--grammar-backend", choices=["xgrammar", "outlines", "llguidance", "none"]
        )
        parser.add_argument("--grpc-mode", action="store_true")
        parser.add_argument("--grpc-port", type=int)
        parser.add_argument("--grpc-response-timeout-secs", type=int, default=300)
        parser.add_argument("--hf-chat-template-name")
        parser.add_argument("--hicache-host-memory-fraction", type=float, default=0.8)
        parser.add_argument(
            "--hicache-host-memory-mode", choices=["cache", "buffer_only"], default="cache"
        )
        parser.add_argument(
            "--hicache-io-backend", choices=["direct", "kernel", "kernel_ascend"], default="kernel"
        )
        parser.add_argument(
            "--hicache-mem-layout",
            choices=[
                "layer_first",
                "page_first",
                "page_first_direct",
                "page_first_kv_split",
                "page_head",
            ],
            default="page_first",
        )
        parser.add_argument("--hicache-ratio", type=float)
        parser.add_argument("--hicache-size", type=int, default=0)
        parser.add_argument(
            "--hicache-storage-backend",
            choices=[
                "file",
                "sim",
                "mooncake",
                "npu_memcache",
                "hf3fs",
                "nixl",
                "aibrix",
                "dynamic",
                "eic",
                "simm",
                "mori",
                "shm",
                "tensorcast",
                "seaweedfs",
            ],
        )
        parser.add_argument("--hicache-storage-backend-extra-config")
        parser.add_argument(
            "--hicache-storage-prefetch-policy",
            choices=["best_effort", "wait_complete", "timeout"],
            default="timeout",
        )
        parser.add_argument("--hicache-storage-prefetch-retry-max-attempts", type=int, default=8)
        parser.add_argument("--hicache-storage-prefetch-retry-poll-interval", type=int, default=8)
        parser.add_argument(
            "--hicache-write-policy",
            choices=["write_back", "write_through", "write_through_selective"],
            default="write_through",
        )
        parser.add_argument("--hisparse-config", "--hierarchical-sparse-attention-extra-config")
        parser.add_argument("--host", default="127.0.0.1")
        parser.add_argument("--http2-initial-connection-window-size", type=int, default=1048576)
        parser.add_argument("--http2-max-concurrent-streams", type=int, default=200)
        parser.add_argument(
            "--image-processor-backend", choices=["auto", "torchvision", "pil"], default="auto"
        )
        parser.add_argument("--incremental-streaming-output", action="store_true")
        parser.add_argument("--init-expert-location", default="trivial")
        parser.add_argument("--int8-mamba-ckpt-size", type=int)
        parser.add_argument("--is-embedding", action="store_true")
        parser.add_argument("--json-model-override-args", default="{}")
        parser.add_argument("--kt-cpuinfer", type=int)
        parser.add_argument("--kt-max-deferred-experts-per-token", type=int)
        parser.add_argument("--kt-method", default="AMXINT4")
        parser.add_argument("--kt-num-gpu-experts", type=int)
        parser.add_argument("--kt-threadpool-count", type=int, default=2)
        parser.add_argument("--kt-weight-path")
        parser.add_argument(
            "--kv-cache-dtype",
            choices=[
                "auto",
                "fp8_e5m2",
                "fp8_e4m3",
                "mxfp8",
                "bf16",
                "bfloat16",
                "nvfp4",
                "fp4_mx_block16",
            ],
            default="auto",
        )
        parser.add_argument("--kv-canary", choices=["none", "log", "raise"], default="none")
        parser.add_argument("--kv-canary-real-data", default="none")
        parser.add_argument("--kv-canary-sweep-interval", type=int, default=0)
        parser.add_argument("--kv-events-config")
        parser.add_argument("--language-model-only", action="store_true")
        parser.add_argument("--language-only", action="store_true")
        parser.add_argument("--limit-mm-data-per-request", type=json.loads)
        parser.add_argument(
            "--linear-attn-backend",
            choices=[
                "triton",
                "cutedsl",
                "flashinfer",
                "flashkda",
                "nvidia_kda",
                "ptx_kda",
                "helion",
                "intel_xpu",
            ],
            default="triton",
        )
        parser.add_argument(
            "--linear-attn-decode-backend",
            choices=[
                "triton",
                "cutedsl",
                "flashinfer",
                "flashkda",
                "nvidia_kda",
                "ptx_kda",
                "helion",
                "intel_xpu",
            ],
        )
        parser.add_argument(
            "--linear-attn-prefill-backend",
            choices=[
                "triton",
                "cutedsl",
                "flashinfer",
                "flashkda",
                "nvidia_kda",
                "ptx_kda",
                "helion",
                "intel_xpu",
            ],
        )
        parser.add_argument(
            "--linear-attn-verify-backend",
            choices=[
                "triton",
                "cutedsl",
                "flashinfer",
                "flashkda",
                "nvidia_kda",
                "ptx_kda",
                "helion",
                "intel_xpu",
                "nv_cutedsl",
            ],
        )
        parser.add_argument("--linear-replayssm-cache-len", type=int, default=16)
        parser.add_argument("--lmcache-config-file")
        parser.add_argument(
            "--load-balance-method",
            choices=[
                "auto",
                "round_robin",
                "follow_bootstrap_room",
                "total_requests",
                "total_tokens",
            ],
            default="auto",
        )
        parser.add_argument(
            "--load-format",
            choices=[
                "auto",
                "pt",
                "safetensors",
                "instanttensor",
                "npcache",
                "dummy",
                "sharded_state",
                "presharded",
                "gguf",
                "expert_pack",
                "bitsandbytes",
                "mistral",
                "layered",
                "flash_rl",
                "remote",
                "remote_instance",
                "fastsafetensors",
                "private",
                "runai_streamer",
            ],
            default="auto",
        )
        parser.add_argument("--load-publish-endpoint")
        parser.add_argument("--load-snapshot-publish-interval", type=int, default=15)
        parser.add_argument("--log-level", default="info")
        parser.add_argument("--log-level-http")
        parser.add_argument("--log-requests", action="store_true")
        parser.add_argument("--log-requests-format", choices=["text", "json"], default="text")
        parser.add_argument("--log-requests-level", type=int, choices=[0, 1, 2, 3], default=2)
        parser.add_argument("--log-requests-target", nargs="+")
        parser.add_argument(
            "--lora-backend",
            choices=["triton", "csgmv", "ascend", "torch_native", "triton_v2"],
            default="csgmv",
        )
        parser.add_argument("--lora-drain-wait-threshold", type=float, default=0.0)
        parser.add_argument("--lora-eviction-policy", choices=["lru", "fifo"], default="lru")
        parser.add_argument("--lora-paths", action=LoRAPathAction, nargs="*")
        parser.add_argument(
            "--lora-strict-loading", action=argparse.BooleanOptionalAction, default=False
        )
        parser.add_argument(
            "--lora-target-modules",
            nargs="*",
            choices=[
                "q_proj",
                "k_proj",
                "v_proj",
                "o_proj",
                "q_a_proj",
                "kv_a_proj_with_mqa",
                "q_b_proj",
                "kv_b_proj",
                "wq_b",
                "wk",
                "weights_proj",
                "gate_proj",
                "up_proj",
                "down_proj",
                "qkv_proj",
                "gate_up_proj",
                "embed_tokens",
                "lm_head",
                "qkvr",
                "wo_ud",
                "all",
            ],
        )
        parser.add_argument("--lora-use-virtual-experts", action="store_true")
        parser.add_argument("--mamba-backend", choices=["triton", "flashinfer"], default="triton")
        parser.add_argument("--mamba-cache-philox-rounds", type=int, default=0)
        parser.add_argument("--mamba-full-memory-ratio", type=float)
        parser.add_argument("--mamba-max-states-per-path", type=int, default=-1)
        parser.add_argument(
            "--mamba-radix-cache-strategy",
            choices=["auto", "no_buffer", "extra_buffer", "extra_buffer_lazy"],
            default="auto",
        )
        parser.add_argument("--mamba-ssm-dtype", choices=["float32", "bfloat16", "float16"])
        parser.add_argument("--mamba-track-interval", type=int, default=256)
        parser.add_argument("--max-ep-size", type=int)
        parser.add_argument("--max-loaded-loras", type=int)
        parser.add_argument(
            "--max-lora-chunk-size", type=int, choices=[16, 32, 64, 128], default=16
        )
        parser.add_argument("--max-lora-rank", type=int)
        parser.add_argument("--max-loras-per-batch", type=int, default=8)
        parser.add_argument("--max-mamba-cache-size", type=int)
        parser.add_argument("--max-prefill-tokens", type=human_readable_int, default=16384)
        parser.add_argument("--max-queued-requests", type=int)
        parser.add_argument("--max-running-requests", type=int)
        parser.add_argument("--max-total-tokens", type=human_readable_int)
        parser.add_argument("--media-url-max-file-size-mb", type=int, default=64)
        parser.add_argument("--mem-fraction-static", type=float)
        parser.add_argument("--min-free-slots-delay", type=int)
        parser.add_argument("--mlx-enable-sampling", action="store_true")
        parser.add_argument(
            "--mm-attention-backend",
            choices=[
                "sdpa",
                "fa3",
                "fa4",
                "triton_attn",
                "ascend_attn",
                "aiter_attn",
                "flashinfer_cudnn",
                "amx_attn",
                "xpu_attn",
            ],
        )
        parser.add_argument("--mm-enable-dp-encoder", action=argparse.BooleanOptionalAction)
        parser.add_argument("--mm-feature-transport", choices=["cpu", "cuda_ipc", "cuda_vmm"])
        parser.add_argument("--mm-global-cache-backend", choices=["mooncake"], default="mooncake")
        parser.add_argument("--mm-io-worker-num", type=int, default=0)
        parser.add_argument("--mm-preprocess-cache-size-mb", type=int)
        parser.add_argument("--mm-process-config", type=json.loads)
        parser.add_argument("--mm-processor-worker-num", type=int, default=0)
        parser.add_argument("--model-checksum", nargs="?")
        parser.add_argument("--model-config-parser", default="auto")
        parser.add_argument("--model-impl", default="auto")
        parser.add_argument("--model-loader-extra-config", default="{}")
        parser.add_argument("--model-path", "--model", required=True)
        parser.add_argument("--modelexpress-config")
        parser.add_argument("--modelopt-checkpoint-restore-path")
        parser.add_argument("--modelopt-checkpoint-save-path")
        parser.add_argument("--modelopt-export-path")
        parser.add_argument("--modelopt-quant")
        parser.add_argument(
            "--moe-a2a-backend",
            choices=[
                "none",
                "deepep",
                "mooncake",
                "nixl",
                "mori",
                "ascend_fuseep",
                "flashinfer",
                "megamoe",
                "deepep_v2",
                "pplx",
                "ascend_tp",
                "flashinfer_megamoe",
            ],
            default="none",
        )
        parser.add_argument("--moe-dense-tp-size", type=int)
        parser.add_argument("--moe-dp-size", "--moe-data-parallel-size", type=int, default=1)
        parser.add_argument(
            "--moe-runner-backend",
            choices=[
                "auto",
                "deep_gemm",
                "triton",
                "triton_kernel",
                "flashinfer_trtllm",
                "experimental_sgl_trtllm",
                "flashinfer_trtllm_routed",
                "flashinfer_cutlass",
                "flashinfer_mxfp4",
                "flashinfer_cutedsl",
                "flashinfer_megamoe",
                "cutlass",
                "aiter",
                "marlin",
                "humming",
                "experimental_sgl_marlin",
                "lora_cutedsl",
                "lora_triton",
                "lora_marlin",
                "hpc_ops",
                "megamoe",
                "intel_xpu",
            ],
            default="auto",
        )
        parser.add_argument(
            "--monokernel-backend",
            dest="enable_amd_monokernel",
            action=DeprecatedStoreConstAction,
            nargs=None,
            choices=["amd"],
            new_flag="--enable-amd-monokernel",
            default=False,
        )
        parser.add_argument("--mooncake-ib-device")
        parser.add_argument("--msprobe-dump-config")
        parser.add_argument("--nccl-port", type=int)
        parser.add_argument("--nnodes", type=int, default=1)
        parser.add_argument("--node-rank", type=int, default=0)
        parser.add_argument("--num-continuous-decode-steps", type=int, default=1)
        parser.add_argument("--num-reserved-decode-tokens", type=int, default=512)
        parser.add_argument("--numa-node", type=int, nargs="+")
        parser.add_argument("--offload-group-size", type=int, default=-1)
        parser.add_argument("--offload-mode", default="cpu")
        parser.add_argument("--offload-num-in-group", type=int, default=1)
        parser.add_argument("--offload-prefetch-step", type=int, default=1)
        parser.add_argument("--optimistic-prefill-attempts", type=int, default=0)
        parser.add_argument("--otlp-service-name")
        parser.add_argument("--otlp-traces-endpoint", default="localhost:4317")
        parser.add_argument("--page-size", type=int)
        parser.add_argument("--paged-experts-num-resident", type=int)
        parser.add_argument("--pdmux-config-path")
        parser.add_argument("--ple-offload-backend", choices=["pinned", "file"], default="pinned")
        parser.add_argument("--ple-offload-dir")
        parser.add_argument("--ple-offload-embedding", action=argparse.BooleanOptionalAction)
        parser.add_argument("--port", type=int, default=30000)
        parser.add_argument("--pp-async-batch-depth", type=int, default=0)
        parser.add_argument("--pp-max-micro-batch-size", type=int)
        parser.add_argument("--pp-size", "--pipeline-parallel-size", type=int, default=1)
        parser.add_argument("--pre-warm-nccl", action="store_true")
        parser.add_argument("--preferred-sampling-params", type=json.loads)
        parser.add_argument(
            "--prefill-attention-backend",
            choices=[
                "triton",
                "torch_native",
                "flex_attention",
                "dsa",
                "nsa",
                "qsa",
                "dsv4",
                "compressed",
                "fa3",
                "fa4",
                "flashinfer",
                "llada2_cfg_flashinfer",
                "flashmla",
                "trtllm_mla",
                "cutedsl_mla",
                "tokenspeed_mla",
                "trtllm_mha",
                "hpc_ops",
                "minicpm_flashattn",
                "minicpm_flashinfer",
                "aiter",
                "wave",
                "intel_amx",
                "ascend",
                "intel_xpu",
            ],
        )
        parser.add_argument("--prefill-decode-interval", type=int)
        parser.add_argument("--prefill-decode-interval-min-bs", type=int, default=0)
        parser.add_argument("--prefill-delayer-forward-passes-buckets", type=float, nargs="+")
        parser.add_argument("--prefill-delayer-max-delay-ms", type=float)
        parser.add_argument("--prefill-delayer-max-delay-passes", type=int, default=30)
        parser.add_argument("--prefill-delayer-queue-min-ratio", type=float)
        parser.add_argument("--prefill-delayer-token-usage-low-watermark", type=float)
        parser.add_argument("--prefill-delayer-wait-seconds-buckets", type=float, nargs="+")
        parser.add_argument(
            "--prefill-kv-cache-dequant-dtype",
            choices=["auto", "nvfp4", "fp8_e4m3"],
            default="auto",
        )
        parser.add_argument("--prefill-max-requests", type=int)
        parser.add_argument("--prefill-only-disable-kv-cache", action="store_true")
        parser.add_argument("--priority-scheduling-preemption-threshold", type=int, default=10)
        parser.add_argument("--prompt-tokens-buckets", nargs="+")
        parser.add_argument(
            "--qsa-indexer-dtype", choices=["auto", "bfloat16", "fp8_e4m3"], default="auto"
        )
        parser.add_argument(
            "--quantization",
            choices=[
                "awq",
                "fp8",
                "mxfp8",
                "gptq",
                "gptq_marlin",
                "awq_marlin",
                "bitsandbytes",
                "gguf",
                "modelopt",
                "modelopt_fp8",
                "modelopt_fp4",
                "nvfp4_online",
                "modelopt_mixed",
                "petit_nvfp4",
                "w8a8_int8",
                "w8a8_fp8",
                "moe_wna16",
                "w4afp8",
                "mxfp4",
                "auto-round",
                "auto-round-int8",
                "compressed-tensors",
                "modelslim",
                "mxfp_w4a8",
                "quark",
                "quark_int4fp8_moe",
                "quark_mxfp4",
                "mlx_q4",
                "mlx_q8",
                "unquant",
                "humming",
            ],
        )
        parser.add_argument("--quantization-param-path", type=nullable_str)
        parser.add_argument("--quantize-and-serve", action="store_true")
        parser.add_argument("--radix-cache-backend")
        parser.add_argument(
            "--radix-eviction-policy",
            choices=["lru", "lfu", "slru", "priority", "tlru"],
            default="lru",
        )
        parser.add_argument("--radix-eviction-policy-config", type=json.loads)
        parser.add_argument("--random-seed", type=int)
        parser.add_argument(
            "--reasoning-parser",
            choices=[
                "auto",
                "apertus2509",
                "beam",
                "deepseek-r1",
                "deepseek-v3",
                "deepseek-v4",
                "deepseek-v41",
                "dots",
                "glm45",
                "ling3",
                "hunyuan",
                "gpt-oss",
                "k2_horizon",
                "kimi",
                "kimi_k2",
                "kimi_k3",
                "mimo",
                "muse",
                "poolside_v1",
                "qwen3",
                "qwen3-thinking",
                "minimax",
                "minimax-append-think",
                "minimax-m3",
                "nanbeige",
                "step3",
                "step3p5",
                "mistral",
                "nemotron_3",
                "granite_thinking_parser",
                "interns1",
                "gemma4",
                "inkling",
                "iquest_q1",
                "cohere_command4",
                "gigachat35",
                "response_template",
            ],
        )
        parser.add_argument(
            "--remote-instance-weight-loader-backend",
            choices=["transfer_engine", "nccl", "modelexpress"],
            default="nccl",
        )
        parser.add_argument("--remote-instance-weight-loader-seed-instance-ip")
        parser.add_argument("--remote-instance-weight-loader-seed-instance-service-port", type=int)
        parser.add_argument(
            "--remote-instance-weight-loader-send-weights-group-ports", type=json_list_type
        )
        parser.add_argument(
            "--remote-instance-weight-loader-start-seed-via-transfer-engine", action="store_true"
        )
        parser.add_argument("--retraction-policy", choices=["length", "priority"], default="length")
        parser.add_argument("--return-aux-hidden-state-layer-ids", type=int, nargs="+")
        parser.add_argument("--return-hidden-states-mode", choices=["last", "full"])
        parser.add_argument("--return-input-ids", action="store_true")
        parser.add_argument("--return-output-ids", action="store_true")
        parser.add_argument("--revision")
        parser.add_argument("--rl-on-policy-target", choices=["fsdp"])
        parser.add_argument("--rl-quant-profile")
        parser.add_argument("--sampling-backend")
        parser.add_argument("--sampling-defaults", choices=["openai", "model"], default="model")
        parser.add_argument("--sampling-mask-max-tokens", type=int, default=4096)
        parser.add_argument("--schedule-conservativeness", type=float, default=1.0)
        parser.add_argument("--schedule-low-priority-values-first", action="store_true")
        parser.add_argument(
            "--schedule-policy",
            choices=[
                "lpm",
                "random",
                "fcfs",
                "dfs-weight",
                "lof",
                "priority",
                "routing-key",
                "hrrn",
                "shortest-prefill-first",
            ],
            default="fcfs",
        )
        parser.add_argument("--scheduler-recv-interval", type=int, default=1)
        parser.add_argument("--served-model-name")
        parser.add_argument("--shared-experts-tp-size", type=int)
        parser.add_argument("--show-time-cost", action="store_true")
        parser.add_argument("--sidecar")
        parser.add_argument("--sidecar-args", type=json_list_type)
        parser.add_argument("--skip-server-warmup", action="store_true")
        parser.add_argument("--skip-tokenizer-init", action="store_true")
        parser.add_argument("--sleep-on-idle", action="store_true")
        parser.add_argument("--sm-group-num", type=int, default=8)
        parser.add_argument("--smg-grpc-mode", action="store_true")
        parser.add_argument("--smg-http-sidecar-port", "--grpc-http-sidecar-port", type=int)
        parser.add_argument("--soft-watchdog-timeout", type=float)
        parser.add_argument("--spec-trace-dir")
        parser.add_argument("--speculative-accept-threshold-acc", type=float, default=1.0)
        parser.add_argument("--speculative-accept-threshold-single", type=float, default=1.0)
        parser.add_argument("--speculative-adaptive", action="store_true")
        parser.add_argument("--speculative-adaptive-config")
        parser.add_argument("--speculative-algorithm")
        parser.add_argument(
            "--speculative-attention-mode", choices=["prefill", "decode"], default="prefill"
        )
        parser.add_argument("--speculative-dflash-block-size", type=int)
        parser.add_argument("--speculative-domino-candidate-pool-size", type=int, default=2048)
        parser.add_argument("--speculative-draft-attention-backend")
        parser.add_argument(
            "--speculative-draft-kv-cache-dtype",
            choices=["auto", "fp8_e5m2", "fp8_e4m3", "bf16", "bfloat16"],
        )
        parser.add_argument(
            "--speculative-draft-load-format",
            choices=[
                "auto",
                "pt",
                "safetensors",
                "instanttensor",
                "npcache",
                "dummy",
                "sharded_state",
                "presharded",
                "gguf",
                "expert_pack",
                "bitsandbytes",
                "mistral",
                "layered",
                "flash_rl",
                "remote",
                "remote_instance",
                "fastsafetensors",
                "private",
                "runai_streamer",
            ],
        )
        parser.add_argument("--speculative-draft-model-path", "--speculative-draft-model")
        parser.add_argument(
            "--speculative-draft-model-quantization",
            choices=[
                "awq",
                "fp8",
                "mxfp8",
                "gptq",
                "gptq_marlin",
                "awq_marlin",
                "bitsandbytes",
                "gguf",
                "modelopt",
                "modelopt_fp8",
                "modelopt_fp4",
                "nvfp4_online",
                "modelopt_mixed",
                "petit_nvfp4",
                "w8a8_int8",
                "w8a8_fp8",
                "moe_wna16",
                "w4afp8",
                "mxfp4",
                "auto-round",
                "auto-round-int8",
                "compressed-tensors",
                "modelslim",
                "mxfp_w4a8",
                "quark",
                "quark_int4fp8_moe",
                "quark_mxfp4",
                "mlx_q4",
                "mlx_q8",
                "unquant",
                "humming",
            ],
        )
        parser.add_argument("--speculative-draft-model-revision")
        parser.add_argument("--speculative-draft-sink-size", type=int)
        parser.add_argument("--speculative-draft-window-size", type=int)
        parser.add_argument(
            "--speculative-dsa-topk-backend",
            choices=["sgl-kernel", "torch", "flashinfer"],
            default="sgl-kernel",
        )
        parser.add_argument(
            "--speculative-dspark-align-verify-tokens-to-graph-tier", action="store_true"
        )
        parser.add_argument("--speculative-dspark-block-size", type=int)
        parser.add_argument("--speculative-dspark-confidence-sts-path")
        parser.add_argument("--speculative-dspark-sps-table-path")
        parser.add_argument("--speculative-eagle-topk", type=int)
        parser.add_argument(
            "--speculative-enable-w4a4-mxfp4-megamoe", action=argparse.BooleanOptionalAction
        )
        parser.add_argument(
            "--speculative-moe-a2a-backend",
            choices=[
                "none",
                "deepep",
                "mooncake",
                "nixl",
                "mori",
                "ascend_fuseep",
                "flashinfer",
                "megamoe",
                "deepep_v2",
                "pplx",
                "ascend_tp",
            ],
        )
        parser.add_argument(
            "--speculative-moe-runner-backend",
            choices=[
                "auto",
                "deep_gemm",
                "triton",
                "triton_kernel",
                "flashinfer_trtllm",
                "experimental_sgl_trtllm",
                "flashinfer_trtllm_routed",
                "flashinfer_cutlass",
                "flashinfer_mxfp4",
                "flashinfer_cutedsl",
                "flashinfer_megamoe",
                "cutlass",
                "aiter",
                "marlin",
                "humming",
                "experimental_sgl_marlin",
                "lora_cutedsl",
                "lora_triton",
                "lora_marlin",
                "hpc_ops",
                "megamoe",
                "intel_xpu",
            ],
        )
        parser.add_argument("--speculative-ngram-capacity", type=int, default=10000000)
        parser.add_argument(
            "--speculative-ngram-external-corpus-max-tokens", type=int, default=10000000
        )
        parser.add_argument("--speculative-ngram-external-corpus-path")
        parser.add_argument("--speculative-ngram-external-sam-budget", type=int, default=0)
        parser.add_argument(
            "--speculative-ngram-match-type", choices=["BFS", "PROB"], default="BFS"
        )
        parser.add_argument("--speculative-ngram-max-bfs-breadth", type=int, default=10)
        parser.add_argument("--speculative-ngram-max-trie-depth", type=int, default=18)
        parser.add_argument("--speculative-ngram-min-bfs-breadth", type=int, default=1)
        parser.add_argument("--speculative-num-draft-tokens", type=int)
        parser.add_argument("--speculative-num-steps", type=int)
        parser.add_argument("--speculative-token-map")
        parser.add_argument("--speculative-use-block-verification", action="store_true")
        parser.add_argument("--speculative-use-rejection-sampling", action="store_true")
        parser.add_argument("--ssl-ca-certs")
        parser.add_argument("--ssl-certfile")
        parser.add_argument("--ssl-keyfile")
        parser.add_argument("--ssl-keyfile-password")
        parser.add_argument(
            "--startup-weight-load-mode", choices=["serial", "overlap"], default="serial"
        )
        parser.add_argument("--stream-interval", type=int, default=1)
        parser.add_argument("--stream-response-default-include-usage", action="store_true")
        parser.add_argument("--strip-thinking-cache", action="store_true")
        parser.add_argument("--swa-full-tokens-ratio", type=float)
        parser.add_argument("--swa-prefix-tails", type=int)
        parser.add_argument("--tbo-token-distribution-threshold", type=float, default=0.48)
        parser.add_argument(
            "--tokenizer-backend", choices=["huggingface", "fastokens"], default="huggingface"
        )
        parser.add_argument("--tokenizer-metrics-allowed-custom-labels", nargs="+")
        parser.add_argument("--tokenizer-metrics-custom-labels-header", default="x-custom-labels")
        parser.add_argument("--tokenizer-mode", choices=["auto", "slow"], default="auto")
        parser.add_argument("--tokenizer-path")
        parser.add_argument("--tokenizer-worker-num", type=int, default=1)
        parser.add_argument(
            "--tool-call-parser",
            choices=[
                "auto",
                "apertus2509",
                "beam",
                "cohere_command4",
                "deepseekv3",
                "deepseekv31",
                "deepseekv32",
                "deepseekv4",
                "deepseekv41",
                "dots",
                "glm",
                "glm45",
                "glm47",
                "gpt-oss",
                "k2_horizon",
                "kimi_k2",
                "kimi_k3",
                "lfm2",
                "ling3",
                "llama3",
                "mimo",
                "minicpm5",
                "mistral",
                "muse",
                "poolside_v1",
                "pythonic",
                "qwen",
                "qwen25",
                "qwen3_coder",
                "spark25",
                "step3",
                "step3p5",
                "minimax-m2",
                "minimax-m3",
                "nanbeige",
                "trinity",
                "interns1",
                "hermes",
                "hunyuan",
                "gigachat3",
                "gigachat35",
                "gemma4",
                "inkling",
                "iquest_q1",
                "response_template",
            ],
        )
        parser.add_argument("--tool-server")
        parser.add_argument("--torch-compile-max-bs", type=int, default=32)
        parser.add_argument("--tp-size", "--tensor-parallel-size", type=int, default=1)
        parser.add_argument("--trace-modules", default="request")
        parser.add_argument("--triton-attention-num-kv-splits", type=int, default=8)
        parser.add_argument("--triton-attention-reduce-in-fp32", action="store_true")
        parser.add_argument("--triton-attention-split-tile-size", type=int)
        parser.add_argument("--trust-mm-content-hashes", action="store_true")
        parser.add_argument("--trust-remote-code", action="store_true")
        parser.add_argument("--trust-request-chat-template", action="store_true")
        parser.add_argument(
            "--unified-cache-external-linker-backend",
            choices=["mooncake", "mori", "dynamic"],
            default="mooncake",
        )
        parser.add_argument("--unified-cache-external-linker-config", type=json.loads)
        parser.add_argument("--uno-lora-path")
        parser.add_argument("--use-ray", action="store_true")
        parser.add_argument("--uvicorn-access-log-exclude-prefixes", nargs="*")
        parser.add_argument("--warmups")
        parser.add_argument("--watchdog-timeout", type=float, default=300)
        parser.add_argument("--watermark-config")
        parser.add_argument(
            "--weight-cache-mode", choices=["off", "daemon", "client"], default="off"
        )
        parser.add_argument("--weight-cache-socket")
        parser.add_argument("--weight-cache-timeout", type=int, default=1800)
        parser.add_argument("--weight-loader-disable-mmap", action="store_true")
        parser.add_argument("--weight-loader-drop-cache-after-load", action="store_true")
        parser.add_argument("--weight-loader-prefetch-checkpoints", action="store_true")
        parser.add_argument("--weight-loader-prefetch-num-threads", type=int, default=4)
        parser.add_argument("--weight-version", default="default")
