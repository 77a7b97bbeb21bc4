/* Inputs of a step and of the sampler. Views: the library copies what it stores. */
#ifndef LLAISYS_RUNTIME_INFER_TYPES_H
#define LLAISYS_RUNTIME_INFER_TYPES_H

#include "llaisys/types.h"

/* A step in the SLOT layout: arrays with one entry per token. */
typedef struct LlaisysBatch {
    int32_t n_tokens;
    int64_t *token;    /* [n_tokens]; used when embd == NULL */
    float *embd;       /* [n_tokens, hidden size] or NULL */
    int64_t *pos;      /* [n_tokens]; NULL: after the last position of the sequence */
    int32_t *n_seq_id; /* [n_tokens], each >= 1; NULL: 1 */
    int64_t **seq_id;  /* [n_tokens][n_seq_id]; NULL: sequence 0 */
    int8_t *logits;    /* [n_tokens], non-zero: output the token's logits; NULL: the last token */
} LlaisysBatch;

/* Pooling of a token's hidden state (after the last norm) into the embedding of its sequence: see
 * llaisysModelPooled. */
typedef enum LLAISYS_INT32_ENUM {
    LLAISYS_POOLING_NONE = 0,
    LLAISYS_POOLING_LAST = 1, /* replaces the embedding */
    LLAISYS_POOLING_MEAN = 2  /* adds to the mean */
} LlaisysPooling;

/* One step of the engine. Token i belongs to the sequences
 * seq_ids[s .. s + n_seq_id[i]), s = the sum of n_seq_id before i. */
typedef struct LlaisysStepInput {
    uint32_t struct_size;
    int32_t n_tokens;         /* 1 .. INT32_MAX */
    const int64_t *token_ids; /* [n_tokens], 0 <= id < vocabulary; llaisysModelLaunch also accepts
                                 -1-j, the j-th id sampled by the previous step */
    const float *embd;        /* [n_tokens, embd_size], used instead of token_ids when not NULL; a
                                 draft head needs both */
    const int64_t *positions; /* [n_tokens], >= 0. SLOT only: NULL derives them */
    const int32_t *n_seq_id;  /* [n_tokens], each >= 1; NULL: 1. BLOCK needs 1 */
    const int64_t *seq_ids;   /* [n_seq_ids]; NULL: sequence 0 */
    int32_t n_seq_ids;        /* the sum of n_seq_id */
    int32_t n_seq;            /* BLOCK: rows of the tables below; 0 in SLOT */
    const int8_t *logits;     /* [n_tokens], non-zero: output the token's logits; NULL: the last */

    /* BLOCK layout only; NULL and 0 in SLOT. */
    const int32_t *slot_mapping;  /* [n_tokens]: slot for the keys and values of token i */
    const int32_t *context_lens;  /* [n_seq]: tokens of the sequence, including this step */
    const int64_t *batch_seq_ids; /* [n_seq]: the sequence of each row, distinct */
    const int32_t *block_tables;  /* [n_seq, block_table_width]: block numbers, then -1 */
    int32_t block_table_width;
    int32_t embd_size; /* 0: the hidden size. Draft head: also the feature size */

    const uint8_t *pooling;     /* [n_tokens]: LlaisysPooling; NULL: NONE. A pooled token has one
                               sequence */
    const int32_t *lora_slots;  /* [n_tokens]: LoRA slot, -1: no adapter; NULL: -1. See
                                  llaisysModelReserveLora */
    const uint8_t *token_types; /* [n_tokens]: row of type_embed; NULL: 0 */
} LlaisysStepInput;

/* The tokens and block tables of an engine's sequences, one row each, and the arrays of a step that
 * llaisysFillStepTokens and llaisysFillStepSlots write. */
typedef struct LlaisysStepBuffers {
    uint32_t struct_size;
    int32_t n_rows;
    int32_t max_tokens;            /* of a row */
    int32_t max_blocks;            /* of a row */
    int32_t block_size;            /* tokens */
    int32_t max_step_tokens;       /* capacity of the arrays of a step */
    const int64_t *row_tokens;     /* [n_rows, max_tokens] */
    const int32_t *row_blocks;     /* [n_rows, max_blocks], negative: no block */
    const int64_t *row_seq_ids;    /* [n_rows] */
    const int32_t *row_lora_slots; /* [n_rows] */

    /* [n_rows] each: the sequences of a step. */
    const int64_t *rows;
    const int64_t *starts;   /* position of the first token */
    const int64_t *n_tokens; /* each >= 1 */
    const int64_t *n_logits; /* 0 .. n_tokens: tokens whose logits are computed, the last ones */

    /* [max_step_tokens] each: as in LlaisysStepInput. */
    int64_t *token_ids;
    int64_t *positions;
    int64_t *seq_ids;
    int8_t *logits;
    int32_t *lora_slots;
    int32_t *slot_mapping;
} LlaisysStepBuffers;

/* A logits processor of the sampler chain. */
typedef enum LLAISYS_INT32_ENUM {
    LLAISYS_SAMPLER_PENALTIES = 0, /* repetition, then frequency, then presence */
    LLAISYS_SAMPLER_TEMPERATURE = 1,
    LLAISYS_SAMPLER_TOP_K = 2,
    LLAISYS_SAMPLER_TOP_P = 3,
    LLAISYS_SAMPLER_MIN_P = 4,
    LLAISYS_SAMPLER_TYPICAL_P = 5,
    LLAISYS_SAMPLER_XTC = 6, /* exclude top choices, with xtc_probability */
    LLAISYS_SAMPLER_TOP_N_SIGMA = 7,
    LLAISYS_SAMPLER_MIROSTAT = 8, /* not in the default chain */
    LLAISYS_SAMPLER_COUNT = 9
} LlaisysSamplerKind;

/* A numeric parameter, one value per row. Name, neutral value and limits:
 *
 *   temperature          1.0  finite, >= 0          xtc_probability     0.0  in [0, 1]
 *   top_k                0    >= 0; 0 = all         xtc_threshold       0.1  in [0, 1]; above 0.5 neutral
 *   top_p                1.0  in (0, 1]             repetition_penalty  1.0  finite, > 0
 *   min_p                0.0  in [0, 1]             presence_penalty    0.0  finite
 *   typical_p            1.0  in (0, 1]             frequency_penalty   0.0  finite
 *   top_n_sigma          0.0  finite, >= 0; 0 = all dynatemp_range      0.0  finite, >= 0
 *   dynatemp_exponent    1.0  finite, > 0           mirostat            0    0, 1 or 2: version; 0 = off
 *   mirostat_mu          10.0 finite: maximum surprise in bits; the caller updates it
 *   n_logprobs           -1   -1 .. vocabulary; -1 = none, 0 = the sampled token's, n = and the n best
 *   post_sampling_probs  0    0 or 1: logprobs are those after mask, bias and chain
 *
 * Other names are rejected. A new name does not change a struct layout or the ABI version. */
typedef struct LlaisysSamplingNumber {
    const char *name;
    const double *values; /* [n_rows] */
} LlaisysSamplingNumber;

/* Sampling parameters. Entry r of each array belongs to row r of the call; a NULL array or a
 * missing number means the neutral value for every row. The allowed-token mask, then the bias,
 * are applied before the chain; temperature 0 is greedy, the lowest id first on a tie. A row
 * without a finite logit is an error: LLAISYS_ERROR_INVALID when mask and bias ban every token,
 * LLAISYS_ERROR_INTERNAL when all logits are NaN (the handle stays usable). The sampled token is
 * a function of (seed, choice, position) and the row's logits. */
typedef struct LlaisysSamplingMetadata {
    uint32_t struct_size;
    int32_t n_rows;         /* rows to sample */
    const int32_t *rows;    /* [n_rows]: output row (0 .. NOutputs-1); NULL: 0, 1, .. */
    const int64_t *seq_ids; /* [n_rows]: sequence whose history penalties use; NULL: none */
    const LlaisysSamplingNumber *numbers; /* [n_numbers], distinct names */
    const uint64_t *seeds;                /* 0 */
    const int64_t *positions;             /* 0: position of the token being sampled */
    const int32_t *choices;               /* 0: index of the choice (n > 1) */
    const int32_t *chain_offsets;         /* [n_rows + 1] into chain; NULL: penalties, temperature,
                                             top_n_sigma, top_k, typical_p, top_p, min_p, xtc for
                                             every row */
    const uint8_t *chain;                 /* LlaisysSamplerKind, distinct within a row */
    const int32_t *bias_offsets;          /* [n_rows + 1] into bias_*; NULL: none */
    const int32_t *bias_ids;              /* token ids */
    const float *bias_values;             /* added to the logit; -INFINITY bans the token */
    const int32_t *mask_rows;             /* [n_rows]: row of masks, -1 = no mask; NULL: -1 */
    const uint32_t *masks;                /* [n_masks, (vocabulary + 31) / 32]: bit set = allowed */
    int32_t n_masks;
    int32_t n_numbers;
} LlaisysSamplingMetadata;

/* Log-probabilities of one sampled row, before mask, bias and chain, or after them with
 * post_sampling_probs. Owned by the model, valid until its next Sample, Step, Decode or Destroy. */
typedef struct LlaisysLogprobs {
    int32_t n;             /* 0: not requested; else 1 + the number of best tokens */
    int32_t sampled_rank;  /* 1 = the sampled token is the most likely one */
    const int32_t *ids;    /* [n]: the sampled token, then the best in descending order */
    const float *logprobs; /* [n] */
} LlaisysLogprobs;

#endif
