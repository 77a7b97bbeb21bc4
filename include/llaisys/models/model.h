/* A model handle: weights, KV cache, runner and sampler behind one pointer. Step, Decode and
 * Collect return 0 ok, 1 no KV slot, 2 aborted (Collect), -1 invalid input, < -1 fatal. After any
 * result except 0, NOutputs is 0, and the KV metadata and the bytes of every used cell are
 * unchanged. */
#ifndef LLAISYS_MODELS_MODEL_H
#define LLAISYS_MODELS_MODEL_H

#include "llaisys/runtime/infer_types.h"
#include "llaisys/runtime/kv_cache.h"
#include "llaisys/tensor.h"

typedef enum LlaisysModelType LLAISYS_INT32_ENUM {
    LLAISYS_MODEL_TYPE_UNKNOWN = 0,
    LLAISYS_MODEL_TYPE_QWEN2 = 1,
    LLAISYS_MODEL_TYPE_MOCK = 2,
    LLAISYS_MODEL_TYPE_LLAMA = 3,
    LLAISYS_MODEL_TYPE_QWEN3 = 4,
    LLAISYS_MODEL_TYPE_DECODER = 5, /* any other family */
    LLAISYS_MODEL_TYPE_DRAFT_HEAD = 6
} LlaisysModelType;

typedef enum LLAISYS_INT32_ENUM {
    LLAISYS_DECODE_OK = 0,
    LLAISYS_DECODE_NO_KV_SLOT = 1,
    LLAISYS_DECODE_ABORTED = 2
} LlaisysDecodeStatus;

/* The first 23 fields and their order are fixed; later ones are appended. */
typedef struct LlaisysModelCreateParams {
    LlaisysModelType model_type;
    const void *meta; /* LlaisysDecoderMeta, LlaisysDraftHeadMeta of a DRAFT_HEAD; copied */
    llaisysDeviceType_t device;
    const int32_t *device_ids; /* [ndevice]; NULL with ndevice 0: device 0 */
    int32_t ndevice;
    int32_t kv_cache_layout;          /* LlaisysKvLayout */
    int32_t kv_cache_block_size;      /* slots per block; 0: 16 */
    int64_t max_model_len;            /* longest position + 1; 0: the meta's maxseq */
    int64_t kv_cache_capacity_tokens; /* slots; 0: max_model_len. BLOCK rounds up to whole blocks */
    int32_t tensor_parallel_size;     /* tensor-parallel ranks, at most 64; 0: 1 */
    int32_t pipeline_parallel_size;   /* pipeline stages; 0: 1 */
    int32_t world_size; /* tensor_parallel_size * pipeline_parallel_size, at most 64; 0: 1 */
    int32_t rank;       /* of this handle. The ranks of a stage are adjacent. Rank 0 is in the last
                         * stage, the only one with logits. The meta has the layers of the stage. */
    int32_t local_rank; /* index into device_ids */
    const char *distributed_executor_backend; /* NULL, "uni": ranks are threads; "mp": processes;
                                               * "ray": processes of any machines */
    const char *distributed_backend;
    const char *master_addr;
    int32_t master_port;
    int32_t node_rank;
    int32_t nnodes;
    const char *init_method; /* rendezvous address. uni: any text, unique per model of the process;
                              * mp: fd://N or shm://NAME; ray:
                              * tcp://FD:TOKEN@HOST:PORT,.. (see parallel/process_group_host.hpp).
                              * With tensor and pipeline parallelism two addresses and a space
                              * between them: of the ranks of the stage, and of all ranks */
    const char *tp_group_name;
    int32_t use_single_process_tp;
    /* Extensions of the seeds' struct. */
    uint32_t struct_size;     /* sizeof(LlaisysModelCreateParams) */
    int32_t n_threads;        /* of the handle's pool, including the caller; 0: one per core */
    int32_t max_batch_tokens; /* micro-batch size: larger steps are split; 0: 512 */
    llaisysDataType_t kv_cache_dtype; /* f32, f16, bf16, i8, f8_e4m3 (CUDA); 0: meta's */
    /* Not 0: out_embed is sharded by vocabulary, ceil(voc / ranks) rows per rank; logits are
     * gathered. */
    int32_t vocab_parallel_head;
    /* Not 0: ranks may be a multiple of the key/value heads; each head is replicated. */
    int32_t replicate_kv_heads;
    /* Not 0: batch-invariant results on a GPU too (the CPU is always batch-invariant). */
    int32_t exact;
} LlaisysModelCreateParams;

typedef struct LlaisysModel LlaisysModel;

/* NULL on failure: see llaisysLastError(). Copies params. */
LLAISYS_API LlaisysModel *llaisysModelCreate(const LlaisysModelCreateParams *params);
/* Device bytes of a model with these parameters, computed from its sizes: no device is used and no
 * rank is waited for. Activations of a step of max_batch_tokens tokens with slots for LoRA adapters
 * (llaisysModelReserveLora), and n_outputs rows of logits (at least those that are reserved at
 * creation). */
LLAISYS_API int32_t llaisysModelScratchBytes(const LlaisysModelCreateParams *params,
                                             int32_t n_outputs, int32_t max_loras, int32_t max_rank,
                                             int64_t *bytes);
/* The same of the slots alone, which llaisysModelReserveLora allocates. */
LLAISYS_API int32_t llaisysModelLoraBytes(const LlaisysModelCreateParams *params, int32_t max_loras,
                                          int32_t max_rank, int64_t *bytes);
LLAISYS_API void llaisysModelDestroy(LlaisysModel *model);
LLAISYS_API LlaisysModelType llaisysModelType(const LlaisysModel *model); /* UNKNOWN for NULL */

/* The effective parameters with defaults filled in. Strings are owned by the model. */
LLAISYS_API int32_t llaisysModelParams(const LlaisysModel *model, LlaisysModelCreateParams *params);

/* The slot table: LlaisysDecoderWeights *, or LlaisysDraftHeadWeights *. Owned by the model. The
 * next step checks a slot that was written directly and takes ownership of its handle; the writer
 * must free the previous handle. */
LLAISYS_API void *llaisysModelWeights(LlaisysModel *model);

/* Stores a tensor in the slot `field` ("attn_q_w", ...) of layer `layer` (ignored for global
 * slots) and frees the previous one. On 0 the model owns the handle and may pack its values and
 * release the original: use it only for other slots of the same model. On failure the caller
 * keeps it. Checks name, layer, shape, dtype, and that no other model owns the tensor. */
LLAISYS_API int32_t llaisysModelReplaceWeight(LlaisysModel *model, const char *field, int32_t layer,
                                              llaisysTensor_t tensor);

/* -- LoRA adapters: decoders only ---------------------------------------------------------------
 *
 * A token with a slot s computes y + scale * B (A x) for the products y = W x of q, k, v, o, gate,
 * up and down, before biases. */

/* Replaces the slots by max_loras empty ones for adapters of rank 1 .. max_rank (at most 256); 0:
 * none. Waits for steps in flight. At most 1024 slots. On failure there are none. */
LLAISYS_API int32_t llaisysModelReserveLora(LlaisysModel *model, int32_t max_loras,
                                            int32_t max_rank);
/* Copies A [rank, in] and B [out, rank] of the linear weight `field` ("attn_q_w", ..) of a layer
 * into a slot, converted to the dtype of the meta. Host tensors, f32, f16 or bf16; the caller
 * keeps them. Ranks may differ between weights; a weight that was not set has no adapter. in and
 * out are those of this rank's shard: A of o and down is sharded by columns, B of the others by
 * rows. Waits for steps in flight. On failure the weight has no adapter in this slot. */
LLAISYS_API int32_t llaisysModelSetLora(LlaisysModel *model, int32_t slot, const char *field,
                                        int32_t layer, llaisysTensor_t a, llaisysTensor_t b,
                                        float scale);
/* Empties a slot. */
LLAISYS_API int32_t llaisysModelClearLora(LlaisysModel *model, int32_t slot);

/* -- Running ------------------------------------------------------------------------------------ */

/* May return with work in flight; Sample and GetLogits* wait for it. */
LLAISYS_API int32_t llaisysModelStep(LlaisysModel *model, const LlaisysStepInput *input);

/* Step for a SLOT batch. */
LLAISYS_API int32_t llaisysModelDecode(LlaisysModel *model, LlaisysBatch batch);

/* Asynchronous steps: Launch queues a step and its sampling on a thread of the model and returns
 * at once; Collect waits for it. Steps run in launch order. Every other call of the model waits
 * until no step runs. With several ranks every rank launches the same steps, and a row of logits
 * without a finite value is an internal error that aborts the group.
 *
 * Arrays of input and sampling must stay valid and unchanged until Collect. Token id -1-j is the
 * j-th id sampled by the previously launched step. Sampled ids are appended to existing histories
 * of sampling.seq_ids. n_rows is at most n_tokens. At most 8 steps may be in flight. */
LLAISYS_API int32_t llaisysModelLaunch(LlaisysModel *model, const LlaisysStepInput *input,
                                       const LlaisysSamplingMetadata *sampling, int64_t *ticket);
/* The result of Step and Sample, ids[n_rows]. Invalidates earlier tickets. 2: aborted, because
 * the previous step failed and its failure was not collected when this step was launched; the
 * output rows are then those of the failed step, if its forward ran. */
LLAISYS_API int32_t llaisysModelCollect(LlaisysModel *model, int64_t ticket, int32_t *ids);
/* Logprobs of row i of the last Collect; valid until the next one. */
LLAISYS_API int32_t llaisysModelCollectedLogprobs(LlaisysModel *model, int32_t i,
                                                  LlaisysLogprobs *logprobs);

/* Rows to which a GPU pads a decode step of `rows` rows, or with has_drafts != 0 a step of so many
 * tokens with draft tokens, to replay a captured CUDA graph; 0: it is not captured. */
LLAISYS_API int32_t llaisysGraphRows(int32_t rows, int32_t has_drafts);

/* Output rows of the last step, in token order: one per marked token. */
LLAISYS_API int32_t llaisysModelNOutputs(LlaisysModel *model);         /* -1: NULL */
LLAISYS_API const int32_t *llaisysModelOutputIds(LlaisysModel *model); /* [NOutputs] token index */
LLAISYS_API float *llaisysModelGetLogits(LlaisysModel *model);         /* [NOutputs, voc] */
LLAISYS_API float *llaisysModelGetLogitsIth(LlaisysModel *model, int32_t i); /* NULL: no such row */
/* The pointers are owned by the model and valid until its next Step, Decode or Destroy. */

/* Samples ids[n_rows] from the output rows. Does not change rows or histories. */
LLAISYS_API int32_t llaisysModelSample(LlaisysModel *model, const LlaisysSamplingMetadata *sampling,
                                       int32_t *ids);
/* Logprobs of row i of the last Sample. */
LLAISYS_API int32_t llaisysModelLogprobs(LlaisysModel *model, int32_t i, LlaisysLogprobs *logprobs);

/* Rows sampled since creation: by the device sampler, and by the host sampler from full rows of
 * logits. On a CPU all rows count as host. */
LLAISYS_API int32_t llaisysModelSampleCounts(LlaisysModel *model, int64_t *on_device,
                                             int64_t *on_host);

/* Token history for penalties. Reset starts it with the prompt (repetition counts prompt tokens,
 * frequency and presence do not); Accept appends sampled tokens; Forget frees it. Without Reset
 * it is empty. */
LLAISYS_API int32_t llaisysModelSamplerReset(LlaisysModel *model, int64_t seq_id,
                                             const int64_t *prompt, int32_t n_prompt);
LLAISYS_API int32_t llaisysModelSamplerAccept(LlaisysModel *model, int64_t seq_id,
                                              const int64_t *tokens, int32_t n_tokens);
LLAISYS_API int32_t llaisysModelSamplerForget(LlaisysModel *model, int64_t seq_id);

/* Store auxiliary hidden states of every token from the next step on: layers[i] in [0, nlayer] is
 * the residual stream at the input of that layer (nlayer: output of the last), -1 the output of
 * the last norm. n 0: none. At most 64; decoders only. Allocates memory for the largest step. */
LLAISYS_API int32_t llaisysModelKeepHidden(LlaisysModel *model, const int32_t *layers, int32_t n);
/* Auxiliary hidden states of the last step, [n_tokens, n * hs], f32; of a draft head [n_tokens,
 * hs]. NULL: none, or the step failed. Waits for the step; valid until the next one. */
LLAISYS_API const float *llaisysModelGetHidden(LlaisysModel *model);

/* The pooled embedding of a sequence, [n], n the hidden size: the mean of the hidden states
 * pooled since PoolForget, summed in double in token order, so that it does not depend on the
 * split into steps or on other sequences. LLAISYS_ERROR_INVALID when there is none. A failed step
 * adds nothing. */
LLAISYS_API int32_t llaisysModelPooled(LlaisysModel *model, int64_t seq_id, float *embedding,
                                       int64_t n);
LLAISYS_API int32_t llaisysModelPoolForget(LlaisysModel *model, int64_t seq_id);

/* -- Profile ------------------------------------------------------------------------------------ */

typedef struct LlaisysStageProfile {
    double seconds;
    int64_t count; /* entries into the stage */
} LlaisysStageProfile;

/* Time per stage of Step, Decode, Sample and GetLogits*. Stages do not overlap. */
typedef struct LlaisysProfile {
    uint32_t struct_size; /* sizeof(LlaisysProfile) */
    uint32_t reserved;
    LlaisysStageProfile prepare;   /* checks, KV metadata, micro-batches; counts steps */
    LlaisysStageProfile attn_meta; /* attention metadata; counts micro-batches */
    LlaisysStageProfile forward;   /* counts micro-batches */
    LlaisysStageProfile sample;    /* counts calls of Sample */
    LlaisysStageProfile memcpy;    /* upload of inputs, download of logits, including waits */
    /* Collectives inside forward, including waits for other ranks; counts calls. 0 when only the
     * device's stream waits. Not included in `forward`. */
    LlaisysStageProfile collective;
} LlaisysProfile;

/* Since creation or the last call with reset != 0. */
LLAISYS_API int32_t llaisysModelProfile(LlaisysModel *model, LlaisysProfile *profile,
                                        int32_t reset);

/* -- KV cache, SLOT layout: LlaisysKvStatus; INTERNAL_ERROR in the BLOCK layout ---------------- */

/* Adds dst to the cells of src in [p0, p1). p0 < 0: from 0; p1 < 0: to the end (all calls). */
LLAISYS_API int32_t llaisysModelKvSeqCp(LlaisysModel *model, int64_t dst_seq, int64_t src_seq,
                                        int64_t p0, int64_t p1);
/* Removes seq from its cells in [p0, p1); a cell without sequences becomes free. */
LLAISYS_API int32_t llaisysModelKvSeqRm(LlaisysModel *model, int64_t seq_id, int64_t p0,
                                        int64_t p1);
/* Moves positions in [p0, p1) by delta; the next step rotates the keys first. A shared cell moves
 * for all its sequences. */
LLAISYS_API int32_t llaisysModelKvSeqAdd(LlaisysModel *model, int64_t seq_id, int64_t p0,
                                         int64_t p1, int64_t delta);
/* Removes every other sequence. */
LLAISYS_API int32_t llaisysModelKvSeqKeep(LlaisysModel *model, int64_t seq_id);
/* -1: the sequence has no cell, or the layout is BLOCK. */
LLAISYS_API int64_t llaisysModelKvSeqPosMax(LlaisysModel *model, int64_t seq_id);
LLAISYS_API int64_t llaisysModelKvSeqPosMin(LlaisysModel *model, int64_t seq_id);

LLAISYS_API int32_t llaisysModelKvStats(LlaisysModel *model, LlaisysKvStats *stats);

/* A line "cell[i] = {seq_ids, pos, used}" per used cell, then "token[i] -> cell[j]" of the last
 * step. Writes at most capacity bytes including the final 0; *length is the length of the whole
 * text. text may be NULL when capacity is 0. */
LLAISYS_API int32_t llaisysModelKvDump(LlaisysModel *model, char *text, size_t capacity,
                                       size_t *length);

/* -- KV cache, BLOCK layout: for the block manager -------------------------------------------- */

/* Copies keys and values of all layers, slot src[i] to slot dst[i], as if all were read first. */
LLAISYS_API int32_t llaisysModelKvCopySlots(LlaisysModel *model, const int32_t *src,
                                            const int32_t *dst, int32_t n);
/* Rotates the keys of each slot by delta[i] positions. */
LLAISYS_API int32_t llaisysModelKvShiftSlots(LlaisysModel *model, const int32_t *slots,
                                             const int64_t *delta, int32_t n);
/* Replaces the host memory for offloaded blocks by n_blocks slots, discarding its contents; 0:
 * none. On failure there is none. fd: -1, or a file (memfd) that the slots are placed in, one after
 * the other, so that another process can map it; the caller keeps ownership of fd, and
 * KvToHost and KvFromHost have copied when they return. */
LLAISYS_API int32_t llaisysModelKvReserveHost(LlaisysModel *model, int32_t n_blocks, int32_t fd);
/* Copies keys and values of all layers between block blocks[i] and host slot host_slots[i];
 * ordered with steps. Targets must be distinct. */
LLAISYS_API int32_t llaisysModelKvToHost(LlaisysModel *model, const int32_t *blocks,
                                         const int32_t *host_slots, int32_t n);
LLAISYS_API int32_t llaisysModelKvFromHost(LlaisysModel *model, const int32_t *blocks,
                                           const int32_t *host_slots, int32_t n);

/* -- Batches (SLOT) ---------------------------------------------------------------------------- */

/* Arrays of n_tokens entries, zeroed except n_seq_id, which is 1; with embd > 0, token is NULL
 * and embd is [n_tokens, embd]. Each token has n_seq_max sequence ids. All NULL and n_tokens 0
 * for invalid sizes (n_tokens above 2^24) or without memory. Do not change n_seq_id, the pointer
 * that Free frees. */
LLAISYS_API LlaisysBatch llaisysBatchInit(int32_t n_tokens, int32_t embd, int32_t n_seq_max);
/* A batch that borrows token: sequence 0, derived positions, logits of the last token. Free is
 * allowed and does not free token. */
LLAISYS_API LlaisysBatch llaisysBatchGetOne(int64_t *token, int32_t n_tokens);
LLAISYS_API void llaisysBatchFree(LlaisysBatch batch);

/* Fills the arrays of a step with the tokens of its n_seq sequences, one sequence after the other:
 * token ids, positions, sequence ids, logits and LoRA slots. */
LLAISYS_API int32_t llaisysFillStepTokens(const LlaisysStepBuffers *buffers, int32_t n_seq);
/* Fills slot_mapping. LLAISYS_ERROR_INVALID when a token is outside the blocks of its row. */
LLAISYS_API int32_t llaisysFillStepSlots(const LlaisysStepBuffers *buffers, int32_t n_seq);

#endif
