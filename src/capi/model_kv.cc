// KV cache calls of a model handle: runtime/kv_cache.h.
#include "capi/model_handle.hpp"

#include <string>

using namespace llaisys;
using namespace llaisys::capi;

namespace {

// Error text of a rejected KV call.
const char *text_of(int32_t kv_status) {
    switch (kv_status) {
    case LLAISYS_KV_OOM_SLOT:
        return "the KV cache has no free cell";
    case LLAISYS_KV_INVALID_SEQ:
        return "the sequence id is negative or has no cell";
    case LLAISYS_KV_INVALID_POS:
        return "a position would leave [0, max_model_len)";
    case LLAISYS_KV_EMPTY_RANGE:
        return "p0 >= p1, or no cell of the sequence is in [p0, p1)";
    default:
        return "the KV cache is inconsistent";
    }
}

// A KV call of the SLOT layout; body(cells) returns the code.
template <typename Body> int32_t kv_call(LlaisysModel *model, const Body &body) {
    int32_t code = LLAISYS_KV_INTERNAL_ERROR;
    const int32_t status = guard([&] {
        runtime::KvCache *cells = not_null(model, "model")->runner().cells();
        require(cells != nullptr,
                "the KV cache has the BLOCK layout: the caller assigns its slots");
        code = body(*cells);
        if (code != LLAISYS_KV_OK) {
            set_last_error(LLAISYS_ERROR_INVALID, text_of(code));
        }
    });
    return status == LLAISYS_OK ? code : LLAISYS_KV_INTERNAL_ERROR;
}

void move_blocks(LlaisysModel *model, ops::KvDirection direction, const int32_t *blocks,
                 const int32_t *host_slots, int32_t n) {
    runtime::KvHostPool *pool = not_null(model, "model")->runner().host_pool();
    require(n >= 0, "n must not be negative, got ", n);
    require(n == 0 || (blocks != nullptr && host_slots != nullptr), "blocks or host_slots is NULL");
    require(pool != nullptr || n == 0, "no host memory is reserved: call KvReserveHost");
    if (n > 0) {
        pool->move(direction, blocks, host_slots, n);
    }
}

} // namespace

int32_t llaisysModelKvSeqCp(LlaisysModel *model, int64_t dst_seq, int64_t src_seq, int64_t p0,
                            int64_t p1) {
    return kv_call(model, [&](auto &cells) { return cells.seq_cp(dst_seq, src_seq, p0, p1); });
}

int32_t llaisysModelKvSeqRm(LlaisysModel *model, int64_t seq_id, int64_t p0, int64_t p1) {
    return kv_call(model, [&](auto &cells) { return cells.seq_rm(seq_id, p0, p1); });
}

int32_t llaisysModelKvSeqAdd(LlaisysModel *model, int64_t seq_id, int64_t p0, int64_t p1,
                             int64_t delta) {
    return kv_call(model, [&](auto &cells) { return cells.seq_add(seq_id, p0, p1, delta); });
}

int32_t llaisysModelKvSeqKeep(LlaisysModel *model, int64_t seq_id) {
    return kv_call(model, [&](auto &cells) { return cells.seq_keep(seq_id); });
}

int64_t llaisysModelKvSeqPosMax(LlaisysModel *model, int64_t seq_id) {
    int64_t position = -1;
    kv_call(model,
            [&](auto &cells) { return position = cells.seq_pos_max(seq_id), LLAISYS_KV_OK; });
    return position;
}

int64_t llaisysModelKvSeqPosMin(LlaisysModel *model, int64_t seq_id) {
    int64_t position = -1;
    kv_call(model,
            [&](auto &cells) { return position = cells.seq_pos_min(seq_id), LLAISYS_KV_OK; });
    return position;
}

int32_t llaisysModelKvStats(LlaisysModel *model, LlaisysKvStats *stats) {
    return guard([&] { sized(stats, "stats") = not_null(model, "model")->runner().kv_stats(); });
}

int32_t llaisysModelKvDump(LlaisysModel *model, char *text, size_t capacity, size_t *length) {
    return guard([&] {
        require(text != nullptr || capacity == 0, "text is NULL");
        const std::string dump = not_null(model, "model")->runner().kv_dump();
        *not_null(length, "length") = dump.size();
        write_text(dump, text, capacity);
    });
}

int32_t llaisysModelKvCopySlots(LlaisysModel *model, const int32_t *src, const int32_t *dst,
                                int32_t n) {
    return guard([&] {
        not_null(model, "model");
        require(model->runner().cells() == nullptr,
                "the KV cache has the SLOT layout: use KvSeqCp");
        require(n >= 0, "n must not be negative, got ", n);
        require(n == 0 || (src != nullptr && dst != nullptr), "src or dst is NULL");
        model->runner().copy_slots(src, dst, n);
    });
}

int32_t llaisysModelKvShiftSlots(LlaisysModel *model, const int32_t *slots, const int64_t *delta,
                                 int32_t n) {
    return guard([&] {
        not_null(model, "model");
        require(model->runner().cells() == nullptr,
                "the KV cache has the SLOT layout: use KvSeqAdd");
        require(n >= 0, "n must not be negative, got ", n);
        require(n == 0 || (slots != nullptr && delta != nullptr), "slots or delta is NULL");
        model->runner().shift_slots(slots, delta, n);
    });
}

int32_t llaisysModelKvReserveHost(LlaisysModel *model, int32_t n_blocks, int32_t fd) {
    return guard([&] {
        not_null(model, "model");
        require(model->runner().cells() == nullptr,
                "the KV cache has the SLOT layout: it has no blocks");
        require(n_blocks >= 0, "n_blocks must not be negative, got ", n_blocks);
        require(fd >= -1, "fd must be a file descriptor or -1, got ", fd);
        model->runner().reserve_host(n_blocks, fd);
    });
}

int32_t llaisysModelKvToHost(LlaisysModel *model, const int32_t *blocks, const int32_t *host_slots,
                             int32_t n) {
    return guard([&] { move_blocks(model, ops::KvDirection::to_host, blocks, host_slots, n); });
}

int32_t llaisysModelKvFromHost(LlaisysModel *model, const int32_t *blocks,
                               const int32_t *host_slots, int32_t n) {
    return guard([&] { move_blocks(model, ops::KvDirection::from_host, blocks, host_slots, n); });
}
