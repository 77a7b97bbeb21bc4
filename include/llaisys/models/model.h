/* A model handle: weights, KV cache, runner and sampler behind one pointer.
 *
 * Step, Decode and Collect return 0 ok, 1 no KV slot, 2 aborted (Collect), -1 invalid input, < -1
 * fatal.
 * After any of them but 0: NOutputs is 0, and the KV metadata and the bytes of every cell that was
 * in use are as they were before the call. */
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
    LLAISYS_MODEL_TYPE_DECODER = 5, /* of any family that has no number of its own */
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
    int32_t kv_cache_block_size;      /* slots a block; 0: 16 */
    int64_t max_model_len;            /* longest position + 1; 0: the meta's maxseq */
    int64_t kv_cache_capacity_tokens; /* slots; 0: max_model_len. BLOCK rounds up to whole blocks */
    int32_t tensor_parallel_size;     /* ranks that share each layer, at most 64; 0: 1 */
    int32_t pipeline_parallel_size;   /* 0 or 1 */
    int32_t world_size;               /* tensor_parallel_size; 0: 1 */
    int32_t rank;                     /* of this handle */
    int32_t local_rank;               /* its place in device_ids */
    const char *distributed_executor_backend; /* NULL, "uni": ranks are threads; "mp": processes;
                                               * "ray": processes of any machines */
    const char *distributed_backend;
    const char *master_addr;
    int32_t master_port;
    int32_t node_rank;
    int32_t nnodes;
    const char *init_method; /* where ranks meet. uni: any text, the same for all ranks and for no
                              * other model of the process; mp: fd://N or shm://NAME; ray:
                              * tcp://FD:TOKEN@HOST:PORT,.. (see parallel/process_group_host.hpp) */
    const char *tp_group_name;
    int32_t use_single_process_tp;
    /* Ours. */
    uint32_t struct_size;     /* sizeof(LlaisysModelCreateParams) */
    int32_t n_threads;        /* of the handle's own pool, the caller included; 0: one a core */
    int32_t max_batch_tokens; /* a larger step is run in pieces of at most this many; 0: 512 */
    llaisysDataType_t kv_cache_dtype; /* f32, f16, bf16, i8 (CPU); 0: the meta's dtype */
    int32_t
        vocab_parallel_head; /* not 0: out_embed holds this rank's rows of the vocabulary, runs of
                                  * ceil(voc / ranks), and the logits are gathered */
    int32_t
        replicate_kv_heads; /* not 0: fewer key/value heads than ranks are allowed when ranks are
                                  * a multiple of them; each is then held by several ranks */
    int32_t
        exact; /* not 0: on a GPU too, the results of a sequence do not depend on what else is in
                    * a step; a CPU's never do */
} LlaisysModelCreateParams;

typedef struct LlaisysModel LlaisysModel;

/* NULL on failure: see llaisysLastError(). Nothing is kept of params. */
LLAISYS_API LlaisysModel *llaisysModelCreate(const LlaisysModelCreateParams *params);
LLAISYS_API void llaisysModelDestroy(LlaisysModel *model);
LLAISYS_API LlaisysModelType llaisysModelType(const LlaisysModel *model); /* UNKNOWN for NULL */

/* The parameters that are in force, defaults filled in (strings: valid as long as the model). */
LLAISYS_API int32_t llaisysModelParams(const LlaisysModel *model, LlaisysModelCreateParams *params);

/* The slot table: LlaisysDecoderWeights *, or LlaisysDraftHeadWeights *. Lives as long as the model. A
 * slot written directly is checked and taken over at the next step; a handle that was in it before
 * is the writer's to free. */
LLAISYS_API void *llaisysModelWeights(LlaisysModel *model);

/* Puts a tensor into the slot `field` ("attn_q_w", ...) of layer `layer` (ignored for global
 * slots) and frees what was there. On 0 the handle belongs to the model, which may lay its values
 * out anew and let the original go: do not use it again except for another slot of the same model.
 * On failure it stays the caller's. Checks name, layer, shape and dtype, and that no other model
 * holds the tensor. */
LLAISYS_API int32_t llaisysModelReplaceWeight(LlaisysModel *model, const char *field, int32_t layer,
                                              llaisysTensor_t tensor);

/* -- Running ------------------------------------------------------------------------------------ */

/* May return with work in flight; Sample and GetLogits* wait for it. */
LLAISYS_API int32_t llaisysModelStep(LlaisysModel *model, const LlaisysStepInput *input);

/* The same for a SLOT batch. */
LLAISYS_API int32_t llaisysModelDecode(LlaisysModel *model, LlaisysBatch batch);

/* Steps ahead: Launch queues a step and the sample of its tokens on a thread of the model's own and
 * returns at once; Collect waits for it. They run in the order of their launches. Every other call of
 * the model waits until none runs. Not for models of several ranks.
 *
 * What input and sampling point to must stay as it is until Collect. A token id -1-j is the j-th id
 * that the step launched before samples. Sampled ids are appended to the histories of sampling.seq_ids
 * that were reset. n_rows is at most n_tokens, and at most 8 steps may be launched and not collected. */
LLAISYS_API int32_t llaisysModelLaunch(LlaisysModel *model, const LlaisysStepInput *input,
                                       const LlaisysSamplingMetadata *sampling, int64_t *ticket);
/* What Step and Sample would have returned, ids[n_rows]. Earlier tickets are good no longer. 2: not
 * run, because the step before it failed and that was not collected yet when this one was launched;
 * after such a failure the output rows are those of the step that failed, if its forward ran. */
LLAISYS_API int32_t llaisysModelCollect(LlaisysModel *model, int64_t ticket, int32_t *ids);
/* Of row i of the last Collect; valid until the next one. */
LLAISYS_API int32_t llaisysModelCollectedLogprobs(LlaisysModel *model, int32_t i,
                                                  LlaisysLogprobs *logprobs);

/* Output rows of the last step, in token order: as many as tokens marked. */
LLAISYS_API int32_t llaisysModelNOutputs(LlaisysModel *model);         /* -1: NULL */
LLAISYS_API const int32_t *llaisysModelOutputIds(LlaisysModel *model); /* [NOutputs] token index */
LLAISYS_API float *llaisysModelGetLogits(LlaisysModel *model);         /* [NOutputs, voc] */
LLAISYS_API float *llaisysModelGetLogitsIth(LlaisysModel *model, int32_t i); /* NULL: no such row */
/* The pointers are the model's and good until its next Step, Decode or Destroy. */

/* Samples ids[n_rows]. Reads the output rows and the histories and changes neither. */
LLAISYS_API int32_t llaisysModelSample(LlaisysModel *model, const LlaisysSamplingMetadata *sampling,
                                       int32_t *ids);
/* Of row i of the last Sample. */
LLAISYS_API int32_t llaisysModelLogprobs(LlaisysModel *model, int32_t i, LlaisysLogprobs *logprobs);

/* Rows that were sampled since the beginning: on the device, from where ids and asked-for logprobs came
 * back, and on the host from whole rows of logits. A CPU samples them all on the host. */
LLAISYS_API int32_t llaisysModelDraws(LlaisysModel *model, int64_t *on_device, int64_t *on_host);

/* The history that penalties look at. Reset starts it from the prompt (repetition counts prompt
 * tokens, frequency and presence do not); Accept appends sampled tokens; Forget frees it. A history
 * that was never reset is empty. */
LLAISYS_API int32_t llaisysModelSamplerReset(LlaisysModel *model, int64_t seq_id,
                                             const int64_t *prompt, int32_t n_prompt);
LLAISYS_API int32_t llaisysModelSamplerAccept(LlaisysModel *model, int64_t seq_id,
                                              const int64_t *tokens, int32_t n_tokens);
LLAISYS_API int32_t llaisysModelSamplerForget(LlaisysModel *model, int64_t seq_id);

/* From the next step on, keep hidden states of every token: layers[i] in [0, nlayer] is the residual
 * stream as that layer gets it (nlayer: as the last one leaves it), -1 the same after the last norm.
 * n 0: keep none. At most 64; decoders only. Costs the memory of the largest step. */
LLAISYS_API int32_t llaisysModelKeepHidden(LlaisysModel *model, const int32_t *layers, int32_t n);
/* Of the last step, [n_tokens, n * hs], f32; NULL: none were kept, or the step failed. A draft head
 * keeps its own, [n_tokens, hs]. Waits for the step; good until the next one. */
LLAISYS_API const float *llaisysModelGetHidden(LlaisysModel *model);

/* The vector of a sequence, [n], n the hidden size: the mean of the hidden states that steps have
 * given it since it was forgotten, summed in double precision in the order of the tokens, so that
 * it depends neither on how they were spread over steps nor on what else was in them.
 * LLAISYS_ERROR_INVALID when there is none. A step that fails adds nothing. */
LLAISYS_API int32_t llaisysModelPooled(LlaisysModel *model, int64_t seq_id, float *vector,
                                       int64_t n);
LLAISYS_API int32_t llaisysModelPoolForget(LlaisysModel *model, int64_t seq_id);

/* -- Profile ------------------------------------------------------------------------------------ */

typedef struct LlaisysStageProfile {
    double seconds;
    int64_t count; /* how often the stage was entered */
} LlaisysStageProfile;

/* Where the time of Step, Decode, Sample and GetLogits* went; no moment is counted in two stages. */
typedef struct LlaisysProfile {
    uint32_t struct_size; /* sizeof(LlaisysProfile) */
    uint32_t reserved;
    LlaisysStageProfile prepare;   /* checks, KV books, micro-batches; counts steps */
    LlaisysStageProfile attn_meta; /* what attention sees; counts micro-batches */
    LlaisysStageProfile forward;   /* counts micro-batches */
    LlaisysStageProfile sample;    /* counts calls of Sample */
    LlaisysStageProfile memcpy;    /* inputs in, logits out, the wait for the device included */
    LlaisysStageProfile
        collective; /* of forward, where ranks met, the wait for them included; counts
                                     * calls. 0 where the device's stream waits and not the host */
} LlaisysProfile;

/* Since the beginning or the last call with reset != 0. */
LLAISYS_API int32_t llaisysModelProfile(LlaisysModel *model, LlaisysProfile *profile,
                                        int32_t reset);

/* -- KV cache, SLOT layout: LlaisysKvStatus; INTERNAL_ERROR in the BLOCK layout ---------------- */

/* Cells of src in [p0, p1) belong to dst as well. p0 < 0: from 0; p1 < 0: to the end (all calls). */
LLAISYS_API int32_t llaisysModelKvSeqCp(LlaisysModel *model, int64_t dst_seq, int64_t src_seq,
                                        int64_t p0, int64_t p1);
/* seq leaves its cells in [p0, p1); a cell that no sequence holds is free. */
LLAISYS_API int32_t llaisysModelKvSeqRm(LlaisysModel *model, int64_t seq_id, int64_t p0,
                                        int64_t p1);
/* Positions in [p0, p1) move by delta, keys are rotated accordingly before the next step. A cell
 * that other sequences hold too moves for them as well. */
LLAISYS_API int32_t llaisysModelKvSeqAdd(LlaisysModel *model, int64_t seq_id, int64_t p0,
                                         int64_t p1, int64_t delta);
/* Every other sequence leaves all its cells. */
LLAISYS_API int32_t llaisysModelKvSeqKeep(LlaisysModel *model, int64_t seq_id);
/* -1: the sequence holds no cell, or the layout is BLOCK. */
LLAISYS_API int64_t llaisysModelKvSeqPosMax(LlaisysModel *model, int64_t seq_id);
LLAISYS_API int64_t llaisysModelKvSeqPosMin(LlaisysModel *model, int64_t seq_id);

LLAISYS_API int32_t llaisysModelKvStats(LlaisysModel *model, LlaisysKvStats *stats);

/* "cell[i] = {seq_ids, pos, used}" a line for the cells in use, then "token[i] -> cell[j]" for the
 * last step. Writes at most capacity bytes with the final 0; *length is what the whole text needs,
 * without the 0. text may be NULL when capacity is 0. */
LLAISYS_API int32_t llaisysModelKvDump(LlaisysModel *model, char *text, size_t capacity,
                                       size_t *length);

/* -- KV cache, BLOCK layout: for the block manager -------------------------------------------- */

/* Copies keys and values of all layers, slot src[i] to slot dst[i], as if all were read first. */
LLAISYS_API int32_t llaisysModelKvCopySlots(LlaisysModel *model, const int32_t *src,
                                            const int32_t *dst, int32_t n);
/* Rotates the keys of each slot by delta[i] positions. */
LLAISYS_API int32_t llaisysModelKvShiftSlots(LlaisysModel *model, const int32_t *slots,
                                             const int64_t *delta, int32_t n);
/* Host memory for n_blocks blocks beside the cache, which the device copies to and from; 0: none. What
 * it held is gone; on failure there is none. */
LLAISYS_API int32_t llaisysModelKvReserveHost(LlaisysModel *model, int32_t n_blocks);
/* Copies keys and values of all layers, block blocks[i] to place places[i] of that memory, or back;
 * steps that follow see it. What is written must not be named twice. */
LLAISYS_API int32_t llaisysModelKvToHost(LlaisysModel *model, const int32_t *blocks,
                                         const int32_t *places, int32_t n);
LLAISYS_API int32_t llaisysModelKvFromHost(LlaisysModel *model, const int32_t *blocks,
                                           const int32_t *places, int32_t n);

/* -- Batches (SLOT) ---------------------------------------------------------------------------- */

/* Arrays of n_tokens entries, zeroed but n_seq_id, which is 1; token is NULL and embd
 * [n_tokens, embd] when embd > 0. Each token has room for n_seq_max sequence ids. All NULL and
 * n_tokens 0 on bad sizes (n_tokens above 2^24) or no memory. Keep n_seq_id: it is what Free frees. */
LLAISYS_API LlaisysBatch llaisysBatchInit(int32_t n_tokens, int32_t embd, int32_t n_seq_max);
/* A batch that borrows token: sequence 0, positions derived, logits of the last token. Free is
 * allowed and leaves token alone. */
LLAISYS_API LlaisysBatch llaisysBatchGetOne(int64_t *token, int32_t n_tokens);
LLAISYS_API void llaisysBatchFree(LlaisysBatch batch);

#endif
