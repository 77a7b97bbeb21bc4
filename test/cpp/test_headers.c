/* The public headers as a C11 program sees them: they compile, they link, and a model can be made,
 * filled, stepped, sampled and freed with nothing but them. */
#include "llaisys.h"

#include <stdio.h>
#include <string.h>

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            printf("%s:%d: %s\nlast error: %s\n", __FILE__, __LINE__, #condition,                  \
                   llaisysLastError());                                                            \
            return 1;                                                                              \
        }                                                                                          \
    } while (0)

enum { kVocabulary = 5, kHeads = 2, kHeadSize = 2, kHidden = kHeads * kHeadSize };

static LlaisysModel *create_mock(LlaisysQwen2Meta *meta) {
    LlaisysModelCreateParams params;
    memset(meta, 0, sizeof *meta);
    meta->dtype = LLAISYS_DTYPE_F32;
    meta->nlayer = 1;
    meta->hs = kHidden;
    meta->nh = kHeads;
    meta->nkvh = 1;
    meta->dh = kHeadSize;
    meta->di = 1;
    meta->maxseq = 16;
    meta->voc = kVocabulary;
    meta->epsilon = 1e-6f;
    meta->theta = 10000.0f;
    memset(&params, 0, sizeof params);
    params.model_type = LLAISYS_MODEL_TYPE_MOCK;
    params.meta = meta;
    params.n_threads = 1;
    params.struct_size = sizeof params;
    return llaisysModelCreate(&params);
}

static int test_errors(void) {
    LlaisysModelCreateParams params;
    CHECK(llaisysAbiVersion() == LLAISYS_ABI_VERSION);
    CHECK(llaisysLastError()[0] == '\0');
    CHECK(llaisysModelCreate(NULL) == NULL);
    CHECK(llaisysLastErrorCode() == LLAISYS_ERROR_INVALID);
    CHECK(strstr(llaisysLastError(), "params") != NULL);
    memset(&params, 0, sizeof params);
    CHECK(llaisysModelCreate(&params) == NULL);
    CHECK(strstr(llaisysLastError(), "struct_size") != NULL);
    llaisysModelDestroy(NULL);
    llaisysTensorDestroy(NULL);
    llaisysStreamDestroy(NULL);
    llaisysLinearWeightDestroy(NULL);
    CHECK(llaisysModelType(NULL) == LLAISYS_MODEL_TYPE_UNKNOWN);
    return 0;
}

static int test_life_of_a_model(void) {
    LlaisysQwen2Meta meta;
    LlaisysSamplingMetadata sampling;
    LlaisysBatch batch;
    LlaisysKvStats stats;
    llaisysTensor_t table = NULL;
    const int64_t shape[2] = {kVocabulary, kHidden};
    float values[kVocabulary * kHidden];
    int64_t prompt[3] = {1, 4, 2};
    int32_t id = -1;
    int i;
    LlaisysModel *model = create_mock(&meta);
    CHECK(model != NULL);
    for (i = 0; i < kVocabulary * kHidden; ++i) {
        values[i] = (float)((i * 7) % 11) - 5.0f;
    }
    CHECK(llaisysTensorCreate(shape, 2, LLAISYS_DTYPE_F32, LLAISYS_DEVICE_CPU, 0, &table) == 0);
    CHECK(llaisysTensorLoad(table, values, sizeof values) == 0);
    CHECK(llaisysModelReplaceWeight(model, "in_embed", 0, table) == 0);

    CHECK(llaisysModelDecode(model, llaisysBatchGetOne(prompt, 3)) == LLAISYS_DECODE_OK);
    CHECK(llaisysModelNOutputs(model) == 1);
    CHECK(llaisysModelOutputIds(model)[0] == 2);
    CHECK(llaisysModelGetLogitsIth(model, 0) == llaisysModelGetLogits(model));
    memset(&sampling, 0, sizeof sampling);
    sampling.struct_size = sizeof sampling;
    sampling.n_rows = 1;
    CHECK(llaisysModelSample(model, &sampling, &id) == LLAISYS_OK);
    CHECK(id >= 0 && id < kVocabulary);

    batch = llaisysBatchInit(1, 0, 2);
    CHECK(batch.n_tokens == 1);
    batch.token[0] = id;
    batch.pos[0] = 3;
    batch.n_seq_id[0] = 2;
    batch.seq_id[0][0] = 0;
    batch.seq_id[0][1] = 7;
    batch.logits[0] = 1;
    CHECK(llaisysModelDecode(model, batch) == LLAISYS_DECODE_OK);
    llaisysBatchFree(batch);
    CHECK(llaisysModelKvSeqPosMax(model, 7) == 3);
    stats.struct_size = sizeof stats;
    CHECK(llaisysModelKvStats(model, &stats) == LLAISYS_OK);
    CHECK(stats.used_slots == 4 && stats.n_sequences == 2);
    CHECK(llaisysModelKvSeqRm(model, 0, -1, -1) == LLAISYS_KV_OK);
    CHECK(llaisysModelKvSeqPosMax(model, 0) == -1);
    llaisysModelDestroy(model);
    return 0;
}

int main(void) {
    if (test_errors() != 0 || test_life_of_a_model() != 0) {
        return 1;
    }
    printf("headers: ok\n");
    return 0;
}
