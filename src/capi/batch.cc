// Batches are plain C memory. BatchInit allocates all arrays as one block, which starts at
// n_seq_id.
#include "llaisys/models/model.h"

#include <cstdlib>

namespace {

constexpr int64_t kMaxTokens = int64_t(1) << 24;
constexpr int64_t kMaxEntries = int64_t(1) << 31;

// Allocates typed arrays from one block, each aligned to 8 bytes.
class BumpAllocator {
public:
    explicit BumpAllocator(char *block) : block_(block) {}
    template <typename T> T *allocate(int64_t n) {
        T *array = block_ != nullptr ? reinterpret_cast<T *>(block_ + used_) : nullptr;
        used_ += (n * int64_t(sizeof(T)) + 7) / 8 * 8;
        return array;
    }
    int64_t used() const { return used_; }

private:
    char *block_;
    int64_t used_ = 0;
};

// Sets the arrays of a batch inside `block` and returns their total size; null: the size only.
int64_t lay_out(char *block, int32_t n_tokens, int32_t embd, int32_t n_seq_max,
                LlaisysBatch *batch) {
    BumpAllocator allocator(block);
    batch->n_seq_id = allocator.allocate<int32_t>(n_tokens);
    if (embd > 0) {
        batch->embd = allocator.allocate<float>(int64_t(n_tokens) * embd);
    } else {
        batch->token = allocator.allocate<int64_t>(n_tokens);
    }
    batch->pos = allocator.allocate<int64_t>(n_tokens);
    batch->logits = allocator.allocate<int8_t>(n_tokens);
    batch->seq_id = allocator.allocate<int64_t *>(n_tokens);
    int64_t *ids = allocator.allocate<int64_t>(int64_t(n_tokens) * n_seq_max);
    for (int32_t i = 0; block != nullptr && i < n_tokens; ++i) {
        batch->seq_id[i] = ids + int64_t(i) * n_seq_max;
        batch->n_seq_id[i] = 1;
    }
    return allocator.used();
}

} // namespace

LlaisysBatch llaisysBatchInit(int32_t n_tokens, int32_t embd, int32_t n_seq_max) {
    LlaisysBatch batch{};
    const bool is_valid = n_tokens >= 1 && n_tokens <= kMaxTokens && embd >= 0 && n_seq_max >= 1 &&
                          int64_t(n_tokens) * n_seq_max <= kMaxEntries &&
                          int64_t(n_tokens) * embd <= kMaxEntries;
    if (!is_valid) {
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
