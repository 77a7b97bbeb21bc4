/* Hyper-parameters and weight slots of the decoder family: Qwen2, Llama (the same without q/k/v
 * biases) and Qwen3 (with norms of q and k). The mock model uses the same hyper-parameters and only
 * in_embed. */
#ifndef LLAISYS_MODELS_DECODER_H
#define LLAISYS_MODELS_DECODER_H

#include "llaisys/tensor.h"

/* How the rotary frequencies are changed for long contexts. */
typedef enum LLAISYS_INT32_ENUM {
    LLAISYS_ROPE_PLAIN = 0,
    LLAISYS_ROPE_LINEAR = 1, /* every frequency divided by rope_factor */
    LLAISYS_ROPE_LLAMA3 = 2  /* low frequencies divided, high ones kept, a ramp between */
} LlaisysRopeScaling;

typedef struct LlaisysDecoderMeta {
    llaisysDataType_t
        dtype;              /* of the weights, and of KV unless asked otherwise: f32, f16 or bf16 */
    size_t nlayer;          /* decoder layers */
    size_t hs;              /* hidden size */
    size_t nh;              /* attention heads */
    size_t nkvh;            /* key/value heads; nh is a multiple of it */
    size_t dh;              /* head size, even */
    size_t di;              /* intermediate size of the MLP */
    size_t maxseq;          /* longest position + 1 */
    size_t voc;             /* vocabulary */
    float epsilon;          /* of the RMS norms */
    float theta;            /* rotary base */
    int64_t end_token;      /* kept for the seeds' form; the engine decides when to stop */
    int64_t sliding_window; /* a token sees this many positions, itself included; 0: all */
    int32_t rope_scaling;   /* LlaisysRopeScaling */
    float rope_factor;
    float rope_low_freq_factor;
    float rope_high_freq_factor;
    int64_t rope_original_maxseq;
    const int64_t *layer_windows; /* [nlayer]: the window of each layer; NULL: sliding_window */
} LlaisysDecoderMeta;

/* Slots. A handle put into a slot belongs to the model; one handle may stand in several slots (tied
 * embeddings) and is freed once. The per-layer arrays have nlayer entries. Shapes are [out, in]. */
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
    llaisysTensor_t *attn_q_norm_w; /* [dh], over each head of q before the rotation; optional */
    llaisysTensor_t *attn_k_norm_w; /* [dh], the same for k; both are needed by QWEN3 */
} LlaisysDecoderWeights;

#endif
