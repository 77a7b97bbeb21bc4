/* Draft heads for speculative decoding (EAGLE, EAGLE-3, MTP): one decoder layer over the
 * embedding of a token and a feature. A feature is a hidden state of the target model
 * (llaisysModelKeepHidden) or of the head itself.
 *
 * A step has both token_ids and embd: token i + 1 with the feature of token i.
 * llaisysModelGetHidden always returns its hidden states, [n_tokens, hs], the features of further
 * draft tokens. */
#ifndef LLAISYS_MODELS_DRAFT_HEAD_H
#define LLAISYS_MODELS_DRAFT_HEAD_H

#include "llaisys/models/decoder.h"

/* x: token embedding, f: feature, both [hs]. */
typedef enum LLAISYS_INT32_ENUM {
    /* layer(fuse(x, f)), the layer without its first norm; no norm before the logits. */
    LLAISYS_DRAFT_HEAD_EAGLE = 1,
    /* q, k, v of norm(x) and norm(f); the residual stream starts with f. The target's feature is
     * n_features hidden states, projected to one by feature_w. */
    LLAISYS_DRAFT_HEAD_EAGLE3 = 2,
    /* norm(layer(fuse(norm(x), norm(f)))) is the hidden state. */
    LLAISYS_DRAFT_HEAD_MTP = 3
} LlaisysDraftHeadKind;

typedef struct LlaisysDraftHeadMeta {
    LlaisysDecoderMeta decoder; /* nlayer is 1; voc: rows of out_embed */
    size_t in_voc;              /* rows of in_embed */
    size_t n_features;          /* target hidden states per feature; 1 except for EAGLE3 */
    int32_t kind;               /* LlaisysDraftHeadKind */
    int32_t reserved;           /* 0 */
} LlaisysDraftHeadMeta;

/* Slots, like those of LlaisysDecoderWeights. The required ones depend on the kind. */
typedef struct LlaisysDraftHeadWeights {
    llaisysTensor_t in_embed;       /* [in_voc, hs] */
    llaisysTensor_t out_embed;      /* [voc, hs] */
    llaisysTensor_t out_norm_w;     /* [hs]; not EAGLE */
    llaisysTensor_t token_norm_w;   /* [hs]; not EAGLE */
    llaisysTensor_t hidden_norm_w;  /* [hs]; not EAGLE */
    llaisysTensor_t feature_w;      /* [hs, n_features * hs]; EAGLE3 */
    llaisysTensor_t fuse_token_w;   /* [hs, hs]; not EAGLE3 */
    llaisysTensor_t fuse_hidden_w;  /* [hs, hs]; not EAGLE3 */
    llaisysTensor_t fuse_b;         /* [hs], optional */
    llaisysTensor_t attn_norm_w;    /* [hs]; MTP */
    llaisysTensor_t attn_q_w;       /* [nh * dh, hs], of the feature in EAGLE3 */
    llaisysTensor_t attn_q_b;       /* [nh * dh], optional */
    llaisysTensor_t attn_k_w;       /* [nkvh * dh, hs] */
    llaisysTensor_t attn_k_b;       /* [nkvh * dh], optional */
    llaisysTensor_t attn_v_w;       /* [nkvh * dh, hs] */
    llaisysTensor_t attn_v_b;       /* [nkvh * dh], optional */
    llaisysTensor_t attn_q_token_w; /* [nh * dh, hs], of the token; EAGLE3, like the next two */
    llaisysTensor_t attn_k_token_w; /* [nkvh * dh, hs] */
    llaisysTensor_t attn_v_token_w; /* [nkvh * dh, hs] */
    llaisysTensor_t attn_o_w;       /* [hs, nh * dh] */
    llaisysTensor_t mlp_norm_w;     /* [hs] */
    llaisysTensor_t mlp_gate_w;     /* [di, hs] */
    llaisysTensor_t mlp_up_w;       /* [di, hs] */
    llaisysTensor_t mlp_down_w;     /* [hs, di] */
} LlaisysDraftHeadWeights;

#endif
