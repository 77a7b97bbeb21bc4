// Batches are plain C memory. What a batch owns hangs on n_seq_id: only BatchInit sets it, to the
// start of the one block that holds every array.
#include "llaisys/models/model.h"

#include <cstdlib>

namespace {

constexpr int64_t kMaxTokens = int64_t(1) << 24;
constexpr int64_t kMaxEntries = int64_t(1) << 31;

// Cuts typed arrays off one block, each aligned to 8 bytes.
class Cutter {
public:
    explicit Cutter(char *block) : block_(block) {}
    template <typename T> T *cut(int64_t n) {
        T *array = block_ != nullptr ? reinterpret_cast<T *>(block_ + used_) : nullptr;
        used_ += (n * int64_t(sizeof(T)) + 7) / 8 * 8;
        return array;
    }
    int64_t used() const { return used_; }

private:
    char *block_;
    int64_t used_ = 0;
};

// The arrays of a batch inside `block`, or their total size alone when it is null.
int64_t lay_out(char *block, int32_t n_tokens, int32_t embd, int32_t n_seq_max,
                LlaisysBatch *batch) {
    Cutter cutter(block);
    batch->n_seq_id = cutter.cut<int32_t>(n_tokens);
    if (embd > 0) {
        batch->embd = cutter.cut<float>(int64_t(n_tokens) * embd);
    } else {
        batch->token = cutter.cut<int64_t>(n_tokens);
    }
    batch->pos = cutter.cut<int64_t>(n_tokens);
    batch->logits = cutter.cut<int8_t>(n_tokens);
    batch->seq_id = cutter.cut<int64_t *>(n_tokens);
    int64_t *ids = cutter.cut<int64_t>(int64_t(n_tokens) * n_seq_max);
    for (int32_t i = 0; block != nullptr && i < n_tokens; ++i) {
        batch->seq_id[i] = ids + int64_t(i) * n_seq_max;
        batch->n_seq_id[i] = 1;
    }
    return cutter.used();
}

} // namespace

LlaisysBatch llaisysBatchInit(int32_t n_tokens, int32_t embd, int32_t n_seq_max) {
    LlaisysBatch batch{};
    const bool is_sane = n_tokens >= 1 && n_tokens <= kMaxTokens && embd >= 0 && n_seq_max >= 1 &&
                         int64_t(n_tokens) * n_seq_max <= kMaxEntries &&
                         int64_t(n_tokens) * embd <= kMaxEntries;
    if (!is_sane) {
        return batch;
    }
    const int64_t bytes = lay_out(nullptr, n_tokens, embd, n_seq_max, &batch);
    batch = {};
    char *block = static_cast<char *>(std::calloc(1, size_t(bytes)));
    if (block != nullptr) {
        lay_out(block, n_tokens, embd, n_seq_max, &batch);
        batch.n_tokens = n_tokens;
    }
    return batch;
}

LlaisysBatch llaisysBatchGetOne(int64_t *token, int32_t n_tokens) {
    LlaisysBatch batch{};
    batch.n_tokens = token != nullptr && n_tokens > 0 ? n_tokens : 0;
    batch.token = token;
    return batch;
}

void llaisysBatchFree(LlaisysBatch batch) { std::free(batch.n_seq_id); }
