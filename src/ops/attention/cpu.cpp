// Cuts attention into items: some tokens of one list x one KV head. When there are few items and
// long lists, the spans of an item are shared out too and merged in order afterwards, which gives
// the same bits.
#include "ops/attention/cpu.hpp"

#include "ops/cpu/rows.hpp"

#include <limits>
#include <vector>

namespace llaisys::ops {

namespace {

using cpu::AttentionState;
using cpu::AttentionTask;
using cpu::kSpan;

constexpr int64_t kRows = 128; // query rows that share a loaded tile, about

// Consecutive query tokens of one list and the entries that any of them sees.
struct Block {
    int64_t first_token;
    int64_t n_tokens;
    int32_t list;
    int64_t begin;
    int64_t end;
    int64_t first_span() const { return begin / kSpan; }
    int64_t n_spans() const { return begin >= end ? 0 : (end - 1) / kSpan + 1 - first_span(); }
};

// One call: shapes, the blocks and where the threads find their memory.
struct Call {
    const Tensor &out;
    const Tensor &q;
    const Tensor &k_cache;
    const Tensor &v_cache;
    const AttentionLists &lists;
    float scale;
    int64_t kv_heads;
    int64_t group; // query heads of one KV head
    int64_t d;
    int64_t ldo;      // d in whole panels
    int64_t max_rows; // of a block
};

void check_block(const Call &call, const Block &block) {
    const int64_t size = call.lists.block_size;
    const int64_t n_slots = call.k_cache.size(0);
    const int64_t width = call.lists.tables.size(1);
    const int32_t *table = call.lists.tables.as<int32_t>() + block.list * width;
    for (int64_t b = block.begin / size; b * size < block.end; ++b) {
        const int64_t last = int64_t(table[b]) * size + std::min(size, block.end - b * size);
        if (table[b] < 0 || last > n_slots) {
            fail(LLAISYS_ERROR_INVALID, "attention: tables: got block ", table[b], " at [",
                 block.list, ", ", b, "], expected one within the ", n_slots, " slots of k_cache");
        }
    }
}

// Groups the tokens and checks what they see.
void make_blocks(const Call &call, std::vector<Block> &blocks) {
    const int32_t *rows = call.lists.q_rows.as<int32_t>();
    const int32_t *begin = call.lists.begin.as<int32_t>();
    const int32_t *end = call.lists.end.as<int32_t>();
    const int64_t n = call.q.size(0);
    const int64_t limit = call.lists.tables.size(1) * call.lists.block_size;
    const int64_t max_tokens = call.max_rows / call.group;
    blocks.clear();
    for (int64_t i = 0; i < n; ++i) {
        if (begin[i] < 0) {
            fail(LLAISYS_ERROR_INVALID, "attention: begin: got ", begin[i], " at ", i,
                 ", expected at least 0");
        }
        if (end[i] > limit) {
            fail(LLAISYS_ERROR_INVALID, "attention: end: got ", end[i], " at ", i,
                 ", expected at most the ", limit, " entries of a table row");
        }
        if (blocks.empty() || blocks.back().list != rows[i] ||
            blocks.back().n_tokens == max_tokens) {
            blocks.push_back({i, 0, rows[i], limit, 0});
        }
        Block &block = blocks.back();
        ++block.n_tokens;
        if (begin[i] < end[i]) {
            block.begin = std::min<int64_t>(block.begin, begin[i]);
            block.end = std::max<int64_t>(block.end, end[i]);
        }
    }
    for (const Block &block : blocks) {
        check_block(call, block);
    }
}

// Memory of one thread, in floats: q, the kernel's scratch, and two states. All sizes are multiples
// of 16, so that every part is aligned to a cache line.
int64_t state_floats(const Call &call) {
    return call.max_rows * call.ldo + 2 * cpu::round_up(call.max_rows, 16);
}
int64_t q_stride(const Call &call) {
    return call.d <= cpu::kQueryStride ? cpu::kQueryStride : cpu::round_up(call.d, 16) + 16;
}
int64_t q_floats(const Call &call) { return call.max_rows * q_stride(call); }
int64_t thread_floats(const Call &call) {
    return q_floats(call) + cpu::attention_scratch(call.max_rows, call.d) + 2 * state_floats(call);
}

AttentionState state_at(const Call &call, float *memory) {
    float *o = memory;
    float *m = o + call.max_rows * call.ldo;
    return {m, m + cpu::round_up(call.max_rows, 16), o};
}

// Widens and scales the queries of a block into `q` and describes the work on it.
AttentionTask make_task(const cpu::Kernels &kernels, const Call &call, const Block &block,
                        int64_t head, float *q, float *scratch) {
    for (int64_t t = 0; t < block.n_tokens; ++t) {
        for (int64_t g = 0; g < call.group; ++g) {
            float *row = q + (t * call.group + g) * q_stride(call);
            cpu::convert(kernels, reinterpret_cast<std::byte *>(row), LLAISYS_DTYPE_F32,
                         cpu::row_of(call.q, block.first_token + t, head * call.group + g),
                         call.q.dtype(), call.d);
            kernels.scale_in_place(row, call.scale, call.d);
        }
    }
    AttentionTask task;
    task.q = q;
    task.ldq = q_stride(call);
    task.n_tokens = block.n_tokens;
    task.group = call.group;
    task.d = call.d;
    task.ldo = call.ldo;
    task.begin = call.lists.begin.as<int32_t>() + block.first_token;
    task.end = call.lists.end.as<int32_t>() + block.first_token;
    task.k_cache = cpu::at(call.k_cache.data(), call.k_cache.dtype(), head * call.d);
    task.v_cache = cpu::at(call.v_cache.data(), call.v_cache.dtype(), head * call.d);
    task.k_dtype = call.k_cache.dtype();
    task.v_dtype = call.v_cache.dtype();
    task.slot_stride = call.kv_heads * call.d;
    task.table = call.lists.tables.as<int32_t>() + block.list * call.lists.tables.size(1);
    task.limit = block.end;
    task.block_size = call.lists.block_size;
    task.scratch = scratch;
    return task;
}

void span_of(const cpu::Kernels &kernels, const AttentionTask &task, const Block &block,
             int64_t span, const AttentionState &state) {
    kernels.attention_span(task, state, std::max(block.begin, span * kSpan),
                           std::min(block.end, (span + 1) * kSpan));
}

void write_out(const cpu::Kernels &kernels, const Call &call, const Block &block, int64_t head,
               const AttentionState &total) {
    for (int64_t t = 0; t < block.n_tokens; ++t) {
        for (int64_t g = 0; g < call.group; ++g) {
            const int64_t r = t * call.group + g;
            float *row = total.o + r * call.ldo;
            const float sum = total.l[r];
            kernels.scale_in_place(row, sum == 0.0f ? 0.0f : 1.0f / sum, call.d);
            cpu::finish(kernels,
                        cpu::row_of(call.out, block.first_token + t, head * call.group + g),
                        call.out.dtype(), row, call.d);
        }
    }
}

void clear_state(const Call &call, const AttentionState &state) {
    std::fill(state.m, state.m + cpu::round_up(call.max_rows, 16),
              -std::numeric_limits<float>::infinity());
    std::fill(state.l, state.l + call.max_rows, 0.0f);
    std::fill(state.o, state.o + call.max_rows * call.ldo, 0.0f);
}

// A whole item on one thread; memory [thread_floats].
void run_item(const cpu::Kernels &kernels, const Call &call, const Block &block, int64_t head,
              float *memory) {
    const AttentionState total = state_at(call, memory);
    const AttentionState part = state_at(call, memory + state_floats(call));
    float *q = memory + 2 * state_floats(call);
    const AttentionTask task = make_task(kernels, call, block, head, q, q + q_floats(call));
    clear_state(call, total);
    for (int64_t s = 0; s < block.n_spans(); ++s) {
        span_of(kernels, task, block, block.first_span() + s, part);
        kernels.attention_merge(total, part, block.n_tokens * call.group, call.ldo);
    }
    write_out(kernels, call, block, head, total);
}

// Every span of every item is a chunk of its own; a second region merges them.
void run_spans(const device::Stream &stream, const Call &call, const std::vector<Block> &blocks,
               int64_t n_spans, cpu::Scratch &scratch) {
    const cpu::Kernels &kernels = cpu::kernels();
    device::ThreadPool &pool = device::pool_of(stream);
    const int64_t items = int64_t(blocks.size()) * call.kv_heads;
    const int64_t per_thread = thread_floats(call);
    const int64_t state = state_floats(call);
    float *memory = scratch.floats(per_thread * pool.size() + items * (n_spans + 1) * state);
    float *totals = memory + per_thread * pool.size(); // [items]
    float *states = totals + items * state;            // [items, n_spans]
    pool.run(items * n_spans, [&](int64_t chunk, int thread) {
        const int64_t item = chunk / n_spans;
        const Block &block = blocks[size_t(item / call.kv_heads)];
        const int64_t head = item % call.kv_heads;
        const int64_t span = chunk % n_spans;
        if (span >= block.n_spans()) {
            return;
        }
        float *q = memory + thread * per_thread;
        const AttentionTask task = make_task(kernels, call, block, head, q, q + q_floats(call));
        span_of(kernels, task, block, block.first_span() + span,
                state_at(call, states + chunk * state));
    });
    cpu::for_rows(stream, items, n_spans * call.max_rows * call.ldo,
                  [&](int64_t first, int64_t last) {
                      for (int64_t item = first; item < last; ++item) {
                          const Block &block = blocks[size_t(item / call.kv_heads)];
                          float *of_item = states + item * n_spans * state;
                          const AttentionState total = state_at(call, totals + item * state);
                          clear_state(call, total);
                          for (int64_t s = 0; s < block.n_spans(); ++s) {
                              kernels.attention_merge(total, state_at(call, of_item + s * state),
                                                      block.n_tokens * call.group, call.ldo);
                          }
                          write_out(kernels, call, block, item % call.kv_heads, total);
                      }
                  });
}

} // namespace

void attention_cpu(const device::Stream &stream, const Tensor &out, const Tensor &q,
                   const Tensor &k_cache, const Tensor &v_cache, const AttentionLists &lists,
                   float scale) {
    static thread_local cpu::Scratch scratch;
    static thread_local std::vector<Block> own_blocks;
    std::vector<Block> &blocks = own_blocks; // a lambda would name the vector of its own thread
    const int64_t kv_heads = k_cache.size(1);
    const int64_t group = q.size(1) / kv_heads;
    if (q.elements() == 0) {
        return;
    }
    const int64_t tokens = std::min(q.size(0), std::max<int64_t>(1, kRows / group));
    const Call call = {
        out,           q,        k_cache, v_cache,   lists,
        scale,         kv_heads, group,   q.size(2), cpu::round_up(q.size(2), cpu::kPanel),
        tokens * group};
    make_blocks(call, blocks);

    device::ThreadPool &pool = device::pool_of(stream);
    const int64_t items = int64_t(blocks.size()) * kv_heads;
    int64_t n_spans = 1;
    for (const Block &block : blocks) {
        n_spans = std::max(n_spans, block.n_spans());
    }
    if (pool.size() > 1 && n_spans > 1 && items < 4 * pool.size()) {
        run_spans(stream, call, blocks, n_spans, scratch);
        return;
    }
    const cpu::Kernels &kernels = cpu::kernels();
    const int64_t per_thread = thread_floats(call);
    float *memory = scratch.floats(per_thread * pool.size());
    pool.run(items, [&](int64_t chunk, int thread) {
        const int64_t item = items - 1 - chunk; // the longest lists of a prompt first
        run_item(kernels, call, blocks[size_t(item / kv_heads)], item % kv_heads,
                 memory + thread * per_thread);
    });
}

} // namespace llaisys::ops
