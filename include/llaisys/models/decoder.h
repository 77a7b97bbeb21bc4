/* Hyper-parameters and weight slots of the decoder family: Qwen2, Llama (without q/k/v biases),
 * Qwen3 (with norms of q and k) and others. The mock model uses the same hyper-parameters and
 * only in_embed. */
#ifndef LLAISYS_MODELS_DECODER_H
#define LLAISYS_MODELS_DECODER_H

#include "llaisys/tensor.h"

typedef struct LlaisysDecoderMeta {
    llaisysDataType_t dtype;      /* of weights, and default of KV: f32, f16 or bf16 */
    size_t nlayer;                /* decoder layers */
    size_t hs;                    /* hidden size */
    size_t nh;                    /* attention heads */
    size_t nkvh;                  /* key/value heads; nh is a multiple of it */
    size_t dh;                    /* head size, even */
    size_t di;                    /* intermediate size of the MLP */
    size_t maxseq;                /* longest position + 1 */
    size_t voc;                   /* vocabulary */
    float epsilon;                /* of the RMS norms */
    float theta;                  /* rotary base */
    int64_t end_token;            /* unused; a field of the seeds' struct */
    int64_t sliding_window;       /* attention window in positions, including the token; 0: none */
    const int64_t *layer_windows; /* [nlayer]: the window of each layer; NULL: sliding_window */
    const float
        *rope_divisors; /* [dh / 2]: frequency i is theta^(-2i / dh) divided by it; NULL: 1 */
    float rope_attention_factor; /* q * k is multiplied by its square; 0: 1 */
} LlaisysDecoderMeta;

/* Slots. The model owns a handle in a slot; one handle may be in several slots (tied embeddings)
 * and is freed once. Per-layer arrays have nlayer entries. Shapes are [out, in]. */
typedef struct LlaisysDecoderWeights {
    llaisysTensor_t in_embed;       /* [voc, hs] */
    llaisysTensor_t out_embed;      /* [voc, hs] */
    llaisysTensor_t out_norm_w;     /* [hs] */
    llaisysTensor_t *attn_norm_w;   /* [hs] */
    llaisysTensor_t *attn_q_w;      /* [nh * dh, hs] */
    llaisysTensor_t *attn_q_b;      /* [nh * dh], optional */
    llaisysTensor_t *attn_k_w;      /* [nkvh * dh, hs] */
    llaisysTensor_t *attn_k_b;      /* [nkvh * dh], optional */
    llaisysTensor_t *attn_v_w;      /* [nkvh * dh, hs] */
    llaisysTensor_t *attn_v_b;      /* [nkvh * dh], optional */
    llaisysTensor_t *attn_o_w;      /* [hs, nh * dh] */
    llaisysTensor_t *mlp_norm_w;    /* [hs] */
    llaisysTensor_t *mlp_gate_w;    /* [di, hs] */
    llaisysTensor_t *mlp_up_w;      /* [di, hs] */
    llaisysTensor_t *mlp_down_w;    /* [hs, di] */
    llaisysTensor_t *attn_o_b;      /* [hs], optional */
    llaisysTensor_t *attn_q_norm_w; /* [dh], per head of q before RoPE; optional */
    llaisysTensor_t *attn_k_norm_w; /* [dh], per head of k; both required for QWEN3 */
} LlaisysDecoderWeights;

#endif
