/* Hyper-parameters and weight slots of the decoder families: Qwen2, Llama (without q/k/v biases),
 * Qwen3 (with norms of q and k), Gemma (norms before and after a block), DeepSeek (latent attention)
 * and others. The mock model
 * uses the same hyper-parameters and only in_embed. */
#ifndef LLAISYS_MODELS_DECODER_H
#define LLAISYS_MODELS_DECODER_H

#include "llaisys/tensor.h"

/* Norm of the residual stream. */
enum { LLAISYS_NORM_RMS = 0, LLAISYS_NORM_LAYER = 1 };
/* Position of the norms: before attention and MLP, after them, both, or of the residual stream after
 * their outputs are added (BERT; no out_norm_w). */
enum {
    LLAISYS_NORM_BEFORE = 0,
    LLAISYS_NORM_AFTER = 1,
    LLAISYS_NORM_BOTH = 2,
    LLAISYS_NORM_RESIDUAL = 3
};
/* MLP: down(silu(gate) * up), down(gelu(gate) * up), down(gelu(up)) with the tanh approximation of
 * gelu, or down(gelu(up)) with erf. */
enum {
    LLAISYS_MLP_SWIGLU = 0,
    LLAISYS_MLP_GEGLU = 1,
    LLAISYS_MLP_GELU = 2,
    LLAISYS_MLP_GELU_ERF = 3
};

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
    /* Fields from here on: 0 or NULL is the behaviour of Llama. */
    float rope_factor;            /* sines and cosines are multiplied by it; 0: 1 */
    const float *layer_inv_freqs; /* [nlayer, dh / 2]: rotary frequencies, instead of theta and
                           * rope_divisors; a pair with frequency 0 is not rotated; NULL: none */
    float attention_scale;        /* of q * k; 0: dh^-0.5 */
    float attention_soft_cap;     /* a score s becomes cap * tanh(s / cap); 0: none */
    float logit_scale;            /* logits are multiplied by it; 0: 1 */
    float logit_soft_cap;         /* after logit_scale; 0: none */
    float embedding_scale;        /* embedding rows are multiplied by it; 0: 1 */
    float residual_scale;         /* of what attention and MLP add to the residual stream; 0: 1 */
    int32_t norm_kind;            /* LLAISYS_NORM_RMS or LLAISYS_NORM_LAYER */
    int32_t norm_position;        /* LLAISYS_NORM_BEFORE, _AFTER or _BOTH */
    int32_t mlp_kind;             /* LLAISYS_MLP_SWIGLU, _GEGLU or _GELU */
    int32_t is_parallel;          /* attention and MLP have the same input; no mlp_norm_w */
    int32_t has_row_norms;        /* attn_q_norm_w and attn_k_norm_w span all heads of a token */
    /* Mixture of experts (llaisysMoeRoute, llaisysMoeMlp). n_experts 0: none. */
    size_t n_experts;            /* routed experts of a layer */
    size_t n_experts_used;       /* routed experts of a token */
    size_t moe_di;               /* intermediate size of a routed expert */
    size_t shared_di;            /* intermediate size of the shared experts together; 0: none */
    const int64_t *moe_layers;   /* [nlayer]: 0: a dense MLP instead; NULL: no dense layer */
    int32_t moe_is_sigmoid;      /* scores of the router: sigmoid; otherwise softmax */
    int32_t moe_is_renormalised; /* the weights of a token's experts are divided by their sum */
    int32_t moe_groups;          /* groups of experts; 0: 1 */
    int32_t moe_top_groups;      /* groups that a token selects from; 0: all */
    int32_t moe_has_score_bias;  /* the model has moe_score_b */
    int32_t moe_has_bias;        /* the router and the routed experts have biases */
    int32_t moe_has_shared_gate; /* the model has shared_scale_w */
    float moe_scale;             /* of the weights of a token's experts; 0: 1 */
    float moe_limit;             /* limit of llaisysMoeMlp; 0: plain SwiGLU */
    float moe_alpha;             /* alpha of llaisysMoeMlp */
    int32_t has_sinks;           /* the model has attn_sinks_w */
    /* Encoders. */
    int32_t is_bidirectional; /* a token sees every token of its sequence; a step has the whole
                               * sequence, in adjacent tokens, at most max_batch_tokens */
    int32_t has_no_head;      /* no out_embed, and no logits */
    int32_t has_positions;    /* the model has pos_embed */
    int32_t has_embed_norm;   /* the model has embed_norm_w */
    size_t n_token_types;     /* rows of type_embed; 0: none */
    /* Latent attention (DeepSeek). kv_rank 0: none. Otherwise nkvh is 1, the KV cache has kv_rank +
     * rope_dim values per token and layer, and rope_divisors has rope_dim / 2 entries. */
    size_t kv_rank;       /* latent values of a token */
    size_t q_rank;        /* of the queries' down-projection; 0: queries are one product */
    size_t rope_dim;      /* last values of a query head that are rotated, below dh */
    size_t v_dim;         /* value head size */
    float latent_epsilon; /* of attn_q_a_norm_w and attn_kv_a_norm_w */
} LlaisysDecoderMeta;

/* Slots. The model owns a handle in a slot; one handle may be in several slots (tied embeddings)
 * and is freed once. Per-layer arrays have nlayer entries. Shapes are [out, in]. */
typedef struct LlaisysDecoderWeights {
    llaisysTensor_t in_embed;          /* [voc, hs] */
    llaisysTensor_t out_embed;         /* [voc, hs] */
    llaisysTensor_t out_norm_w;        /* [hs] */
    llaisysTensor_t *attn_norm_w;      /* [hs] */
    llaisysTensor_t *attn_q_w;         /* [nh * dh, hs] */
    llaisysTensor_t *attn_q_b;         /* [nh * dh], optional */
    llaisysTensor_t *attn_k_w;         /* [nkvh * dh, hs] */
    llaisysTensor_t *attn_k_b;         /* [nkvh * dh], optional */
    llaisysTensor_t *attn_v_w;         /* [nkvh * dh, hs] */
    llaisysTensor_t *attn_v_b;         /* [nkvh * dh], optional */
    llaisysTensor_t *attn_o_w;         /* [hs, nh * dh] */
    llaisysTensor_t *mlp_norm_w;       /* [hs] */
    llaisysTensor_t *mlp_gate_w;       /* [di, hs] */
    llaisysTensor_t *mlp_up_w;         /* [di, hs] */
    llaisysTensor_t *mlp_down_w;       /* [hs, di] */
    llaisysTensor_t *attn_o_b;         /* [hs], optional */
    llaisysTensor_t *attn_q_norm_w;    /* [dh], per head of q before RoPE; optional; with
                                     * has_row_norms [nh * dh] */
    llaisysTensor_t *attn_k_norm_w;    /* [dh], per head of k; both required for QWEN3; with
                                     * has_row_norms [nkvh * dh] */
    llaisysTensor_t *attn_post_norm_w; /* [hs], of the output of attention */
    llaisysTensor_t *mlp_post_norm_w;  /* [hs], of the output of the MLP */
    llaisysTensor_t *attn_norm_b;      /* [hs], of a layer norm; optional */
    llaisysTensor_t *mlp_norm_b;       /* [hs], of a layer norm; optional */
    llaisysTensor_t out_norm_b;        /* [hs], of a layer norm; optional */
    llaisysTensor_t *mlp_up_b;         /* [di], optional */
    llaisysTensor_t *mlp_down_b;       /* [hs], optional */
    /* Layers with a mixture of experts have these instead of mlp_gate_w, mlp_up_w and mlp_down_w. The
     * rows of the routed experts are adjacent, expert by expert. */
    llaisysTensor_t *moe_router_w;   /* [n_experts, hs] */
    llaisysTensor_t *moe_router_b;   /* [n_experts], with moe_has_bias */
    llaisysTensor_t *moe_score_b;    /* [n_experts], with moe_has_score_bias */
    llaisysTensor_t *moe_gate_w;     /* [n_experts * moe_di, hs] */
    llaisysTensor_t *moe_up_w;       /* [n_experts * moe_di, hs] */
    llaisysTensor_t *moe_down_w;     /* [n_experts * hs, moe_di] */
    llaisysTensor_t *moe_gate_b;     /* [n_experts * moe_di], with moe_has_bias */
    llaisysTensor_t *moe_up_b;       /* [n_experts * moe_di], with moe_has_bias */
    llaisysTensor_t *moe_down_b;     /* [n_experts * hs], with moe_has_bias */
    llaisysTensor_t *shared_gate_w;  /* [shared_di, hs], with shared_di */
    llaisysTensor_t *shared_up_w;    /* [shared_di, hs], with shared_di */
    llaisysTensor_t *shared_down_w;  /* [hs, shared_di], with shared_di */
    llaisysTensor_t *shared_scale_w; /* [1, hs]: the shared experts are multiplied by the sigmoid of
                                      * its product; with moe_has_shared_gate */
    llaisysTensor_t *attn_sinks_w;   /* f32 [nh]: sinks of llaisysAttention, with has_sinks */
    llaisysTensor_t pos_embed;       /* [maxseq, hs], added to the embedding of a token; with
                                      * has_positions */
    llaisysTensor_t type_embed;      /* [n_token_types, hs], likewise */
    llaisysTensor_t embed_norm_w; /* [hs], norm of the sum of the embeddings; with has_embed_norm */
    llaisysTensor_t embed_norm_b; /* [hs], optional */
    llaisysTensor_t *attn_post_norm_b; /* [hs], of a layer norm; optional */
    llaisysTensor_t *mlp_post_norm_b;  /* [hs], of a layer norm; optional */
    /* With kv_rank, instead of attn_k_w and attn_v_w. attn_q_w is then [nh * dh, q_rank] if there is
     * a q_rank, and attn_o_w is [hs, nh * v_dim]. */
    llaisysTensor_t *attn_q_a_w;       /* [q_rank, hs], with q_rank */
    llaisysTensor_t *attn_q_a_norm_w;  /* [q_rank], with q_rank */
    llaisysTensor_t *attn_kv_a_w;      /* [kv_rank + rope_dim, hs] */
    llaisysTensor_t *attn_kv_a_norm_w; /* [kv_rank] */
    llaisysTensor_t *attn_k_b_w;       /* [nh * kv_rank, dh - rope_dim]: latent to keys, transposed
                                        * for each head */
    llaisysTensor_t *attn_v_b_w;       /* [nh * v_dim, kv_rank]: latent to values */
} LlaisysDecoderWeights;

#endif
