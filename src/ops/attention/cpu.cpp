// Divides attention into work items: some tokens of one sequence x one KV head, or several adjacent
// KV heads when there are few tokens. With few items and long sequences the spans of an item are
// distributed too and merged in order, with bitwise identical results.
#include "ops/attention/op.hpp"

#include "ops/cpu/prepared_attention.hpp"
#include "ops/cpu/rows.hpp"

#include <cmath>
#include <limits>
#include <vector>

namespace llaisys::ops {

namespace {

using cpu::AttentionState;
using cpu::AttentionTask;
using cpu::kSpan;

constexpr int64_t kRows = 128; // approximate query rows of an item, at least
static_assert(kMaxQuantisedHead <= cpu::kMaxByteHead);

// Consecutive query tokens of one sequence and the union of their visible entries.
struct Block {
    int64_t first_token;
    int64_t n_tokens;
    int32_t list;
    int64_t begin;
    int64_t end;
    int64_t first_span() const { return begin / kSpan; }
    int64_t n_spans() const { return begin >= end ? 0 : (end - 1) / kSpan + 1 - first_span(); }
};

// One call: shapes, work blocks and scratch of the threads.
struct Call {
    const Tensor &out;
    const Tensor &q;
    const Tensor &k_cache;
    const Tensor &v_cache;
    const AttentionLists &lists;
    float scale;
    float soft_cap;     // 0: none
    const float *sinks; // [heads]; null: none
    int64_t kv_heads;
    int64_t group; // query heads of one KV head
    int64_t d;
    int64_t value_dim;
    int64_t ldo;                            // value_dim rounded up to whole panels
    int64_t max_rows;                       // of one KV head in a block
    int64_t heads;                          // largest number of KV heads of an item
    int64_t head_stride;                    // cache elements from one KV head to the next
    int64_t slot_stride;                    // from one slot to the next
    const cpu::PreparedAttention *prepared; // null: keys are widened
    int64_t head_groups() const { return (kv_heads + heads - 1) / heads; }
    int64_t heads_of(int64_t item) const {
        return std::min(heads, kv_heads - item % head_groups() * heads);
    }
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

// Groups the tokens and checks their ranges.
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

// Scratch of one thread, in floats: q, the kernel's scratch, and two states of an item. All sizes
// are multiples of 16, so that every part is aligned to a cache line.
int64_t head_floats(const Call &call) {
    return call.max_rows * call.ldo + 2 * cpu::round_up(call.max_rows, 16);
}
int64_t state_floats(const Call &call) { return call.heads * head_floats(call); }
int64_t q_stride(const Call &call) {
    return call.d <= cpu::kQueryStride ? cpu::kQueryStride : cpu::round_up(call.d, 16) + 16;
}
int64_t q_floats(const Call &call) { return call.heads * call.max_rows * q_stride(call); }
int64_t thread_floats(const Call &call) {
    return q_floats(call) + cpu::attention_scratch(call.heads * call.max_rows, call.d) +
           2 * state_floats(call);
}

AttentionState state_at(const Call &call, float *memory) {
    float *o = memory;
    float *m = o + call.max_rows * call.ldo;
    return {m, m + cpu::round_up(call.max_rows, 16), o};
}

// Row t * group + g of KV head h, in a tensor of query heads.
cpu::Values head_row(const Call &call, const Tensor &tensor, const Block &block, int64_t t,
                     int64_t h, int64_t g) {
    return cpu::row_of(tensor, block.first_token + t, h * call.group + g);
}

// Widens and scales the queries of an item into `q` and fills its task.
AttentionTask make_task(const cpu::Kernels &kernels, const Call &call, const Block &block,
                        int64_t item, float *q, float *scratch) {
    const int64_t first_head = item % call.head_groups() * call.heads;
    const int64_t n_heads = call.heads_of(item);
    float *row = q;
    for (int64_t h = first_head; h < first_head + n_heads; ++h) {
        for (int64_t t = 0; t < block.n_tokens; ++t) {
            for (int64_t g = 0; g < call.group; ++g, row += q_stride(call)) {
                cpu::convert(kernels, cpu::values_of(row), head_row(call, call.q, block, t, h, g),
                             call.d);
                kernels.scale_in_place(row, call.scale, call.d);
            }
        }
        if (call.prepared != nullptr) {
            const int64_t n = block.n_tokens * call.group;
            call.prepared->prepare(row - n * q_stride(call), n, q_stride(call), call.d);
        }
    }
    AttentionTask task;
    task.q = q;
    task.ldq = q_stride(call);
    task.n_heads = n_heads;
    task.n_tokens = block.n_tokens;
    task.group = call.group;
    task.d = call.d;
    task.value_dim = call.value_dim;
    task.ldo = call.ldo;
    task.state_stride = head_floats(call);
    task.begin = call.lists.begin.as<int32_t>() + block.first_token;
    task.end = call.lists.end.as<int32_t>() + block.first_token;
    task.head_stride = call.head_stride;
    const int64_t skipped = first_head * call.head_stride;
    task.k_cache = cpu::values_of(call.k_cache, skipped).data;
    task.v_cache = cpu::values_of(call.v_cache, skipped).data;
    task.k_dtype = call.k_cache.dtype();
    task.v_dtype = call.v_cache.dtype();
    task.slot_stride = call.slot_stride;
    task.table = call.lists.tables.as<int32_t>() + block.list * call.lists.tables.size(1);
    task.limit = block.end;
    task.block_size = call.lists.block_size;
    task.soft_cap = call.soft_cap;
    task.scratch = scratch;
    task.next = {};
    return task;
}

cpu::AttentionStart start_of(const Call &call, const Block &block, int64_t item) {
    const int64_t skipped = item % call.head_groups() * call.heads * call.head_stride;
    return {call.lists.tables.as<int32_t>() + block.list * call.lists.tables.size(1), block.begin,
            block.end, cpu::values_of(call.k_cache, skipped).data,
            cpu::values_of(call.v_cache, skipped).data};
}

void span_of(const cpu::Kernels &kernels, const Call &call, const AttentionTask &task,
             const Block &block, int64_t span, const AttentionState &state) {
    const auto run =
        call.prepared != nullptr ? call.prepared->attention_span : kernels.attention_span;
    run(task, state, std::max(block.begin, span * kSpan), std::min(block.end, (span + 1) * kSpan));
}

void merge(const cpu::Kernels &kernels, const Call &call, const Block &block, int64_t item,
           const AttentionState &total, const AttentionState &part) {
    for (int64_t h = 0; h < call.heads_of(item); ++h) {
        const int64_t offset = h * head_floats(call);
        kernels.attention_merge(total.after(offset), part.after(offset),
                                block.n_tokens * call.group, call.ldo);
    }
}

// Writes row r of KV head `head` of the call: its sum o [value_dim] over l, with maximum m.
void write_row(const cpu::Kernels &kernels, const Call &call, const Block &block, int64_t head,
               int64_t r, float m, float l, float *o) {
    if (call.sinks != nullptr && l != 0.0f) {
        l += std::exp(call.sinks[head * call.group + r % call.group] - m);
    }
    kernels.scale_in_place(o, l == 0.0f ? 0.0f : 1.0f / l, call.value_dim);
    cpu::finish(kernels, head_row(call, call.out, block, r / call.group, head, r % call.group), o,
                call.value_dim);
}

void write_out(const cpu::Kernels &kernels, const Call &call, const Block &block, int64_t item,
               const AttentionState &total) {
    const int64_t first_head = item % call.head_groups() * call.heads;
    for (int64_t h = 0; h < call.heads_of(item); ++h) {
        const AttentionState state = total.after(h * head_floats(call));
        for (int64_t r = 0; r < block.n_tokens * call.group; ++r) {
            write_row(kernels, call, block, first_head + h, r, state.m[r], state.l[r],
                      state.o + r * call.ldo);
        }
    }
}

void clear_state(const Call &call, const AttentionState &first) {
    for (int64_t h = 0; h < call.heads; ++h) {
        const AttentionState state = first.after(h * head_floats(call));
        std::fill(state.m, state.m + cpu::round_up(call.max_rows, 16),
                  -std::numeric_limits<float>::infinity());
        std::fill(state.l, state.l + call.max_rows, 0.0f);
        std::fill(state.o, state.o + call.max_rows * call.ldo, 0.0f);
    }
}

// A whole item on one thread, which item - 1 follows; memory [thread_floats].
void run_item(const cpu::Kernels &kernels, const Call &call, const std::vector<Block> &blocks,
              int64_t item, float *memory) {
    const Block &block = blocks[size_t(item / call.head_groups())];
    const AttentionState total = state_at(call, memory);
    const AttentionState part = state_at(call, memory + state_floats(call));
    float *q = memory + 2 * state_floats(call);
    AttentionTask task = make_task(kernels, call, block, item, q, q + q_floats(call));
    if (item > 0) {
        task.next = start_of(call, blocks[size_t((item - 1) / call.head_groups())], item - 1);
    }
    clear_state(call, total);
    for (int64_t s = 0; s < block.n_spans(); ++s) {
        span_of(kernels, call, task, block, block.first_span() + s, part);
        merge(kernels, call, block, item, total, part);
    }
    write_out(kernels, call, block, item, total);
}

// Merges the spans of row r of head h of an item and writes it; states [n_spans of the item], o
// [ldo].
void merge_row(const cpu::Kernels &kernels, const Call &call, const Block &block, int64_t item,
               int64_t h, int64_t r, float *states, float *o) {
    alignas(64) float m[16]; // the kernel merges whole vectors of rows; only the first is used
    float l = 0.0f;
    std::fill(m, m + 16, -std::numeric_limits<float>::infinity());
    std::fill(o, o + call.ldo, 0.0f);
    for (int64_t s = 0; s < block.n_spans(); ++s) {
        const AttentionState part =
            state_at(call, states + s * state_floats(call)).after(h * head_floats(call));
        kernels.attention_merge({m, &l, o}, {part.m + r, part.l + r, part.o + r * call.ldo}, 1,
                                call.ldo);
    }
    write_row(kernels, call, block, item % call.head_groups() * call.heads + h, r, m[0], l, o);
}

// Every span of every item is a chunk; a second region merges them, row by row.
void run_spans(const device::Stream &stream, const Call &call, const std::vector<Block> &blocks,
               int64_t n_spans, cpu::Scratch &scratch) {
    const cpu::Kernels &kernels = cpu::kernels();
    device::ThreadPool &pool = device::pool_of(stream);
    const int64_t items = int64_t(blocks.size()) * call.head_groups();
    const int64_t per_thread = thread_floats(call);
    const int64_t state = state_floats(call);
    const int64_t rows = call.heads * call.max_rows; // of an item
    float *memory =
        scratch.floats(per_thread * pool.size() + items * (n_spans * state + rows * call.ldo));
    float *states = memory + per_thread * pool.size(); // [items, n_spans]
    float *merged = states + items * n_spans * state;  // [items, rows, ldo]
    pool.run(items * n_spans, [&](int64_t chunk, int thread) {
        const int64_t item = chunk / n_spans;
        const Block &block = blocks[size_t(item / call.head_groups())];
        const int64_t span = chunk % n_spans;
        if (span >= block.n_spans()) {
            return;
        }
        float *q = memory + thread * per_thread;
        const AttentionTask task = make_task(kernels, call, block, item, q, q + q_floats(call));
        span_of(kernels, call, task, block, block.first_span() + span,
                state_at(call, states + chunk * state));
    });
    // The states are in the caches of the threads that wrote them: slower to read than its own.
    constexpr int64_t kRemote = 8;
    cpu::for_rows(stream, items * rows, kRemote * n_spans * call.ldo,
                  [&](int64_t first, int64_t last) {
                      for (int64_t i = first; i < last; ++i) {
                          const int64_t item = i / rows;
                          const int64_t h = i % rows / call.max_rows;
                          const int64_t r = i % call.max_rows;
                          const Block &block = blocks[size_t(item / call.head_groups())];
                          if (h < call.heads_of(item) && r < block.n_tokens * call.group) {
                              merge_row(kernels, call, block, item, h, r,
                                        states + item * n_spans * state, merged + i * call.ldo);
                          }
                      }
                  });
}

// Query tokens of an item: as many as share a tile of keys and values profitably, unless threads would
// have few items each. Multiples of 16 leave no part of a tile register unused.
int64_t tokens_together(const Call &call, int threads) {
    const int64_t most = call.prepared != nullptr ? call.prepared->rows : kRows;
    const int64_t n = call.q.size(0);
    int64_t tokens = std::max<int64_t>(1, kRows / call.group);
    tokens -= tokens > 16 ? tokens % 16 : 0;
    while (2 * tokens * call.group <= most &&
           n / (2 * tokens) * call.kv_heads >= 8 * int64_t(threads)) {
        tokens *= 2;
    }
    return std::min(n, tokens);
}

// KV heads per item: as many as its rows leave room for, unless threads would be idle.
int64_t heads_together(const Call &call, int64_t chunks, int threads) {
    int64_t heads = std::min(call.kv_heads, std::max<int64_t>(1, kRows / call.max_rows));
    while (heads > 1 && (call.kv_heads + heads - 1) / heads * chunks < 4 * int64_t(threads)) {
        heads = (heads + 1) / 2;
    }
    return heads;
}

// Parts of the query heads of a single KV head, each processed as if it had a KV head of its own:
// as few as give every thread a chunk. 1: they stay together.
int64_t head_parts(const Call &call, int64_t chunks, int threads) {
    int64_t parts = 1;
    while (call.kv_heads == 1 && parts * chunks < threads && parts < call.group) {
        do {
            ++parts;
        } while (call.group % parts != 0);
    }
    return parts;
}

} // namespace

void attention_cpu(const device::Stream &stream, const Tensor &out, const Tensor &q,
                   const KvLayer &kv, const AttentionLists &lists, float scale, float soft_cap,
                   const Tensor *sinks) {
    static thread_local cpu::Scratch scratch;
    static thread_local std::vector<Block> own_blocks;
    std::vector<Block> &blocks = own_blocks; // a lambda would refer to its own thread's vector
    const int64_t kv_heads = kv.n_heads;
    const int64_t group = q.size(1) / kv_heads;
    if (q.elements() == 0) {
        return;
    }
    device::ThreadPool &pool = device::pool_of(stream);
    Call call = {out,
                 q,
                 kv.k,
                 kv.values(),
                 lists,
                 scale,
                 soft_cap,
                 sinks != nullptr ? sinks->as<float>() : nullptr,
                 kv_heads,
                 group,
                 q.size(2),
                 kv.value_dim,
                 cpu::round_up(kv.value_dim, cpu::kPanel),
                 0,
                 1,
                 kv.head_stride(),
                 kv_heads * kv.head_stride(),
                 cpu::prepared_attention(kv.k.dtype(), kv.values().dtype(), q.size(2))};
    const int64_t tokens = tokens_together(call, pool.size());
    call.max_rows = tokens * group;
    make_blocks(call, blocks);

    int64_t n_spans = 1;
    for (const Block &block : blocks) {
        n_spans = std::max(n_spans, block.n_spans());
    }
    const int64_t parts = head_parts(call, int64_t(blocks.size()) * n_spans, pool.size());
    if (parts > 1) {
        call.kv_heads = parts;
        call.group = group / parts;
        call.max_rows = tokens * call.group;
        call.head_stride = 0;
    }
    call.heads = heads_together(call, int64_t(blocks.size()) * n_spans, pool.size());
    const int64_t items = int64_t(blocks.size()) * call.head_groups();
    if (pool.size() > 1 && n_spans > 1 && items < 4 * pool.size()) {
        run_spans(stream, call, blocks, n_spans, scratch);
        return;
    }
    const cpu::Kernels &kernels = cpu::kernels();
    const int64_t per_thread = thread_floats(call);
    float *memory = scratch.floats(per_thread * pool.size());
    pool.run(items, [&](int64_t chunk, int thread) {
        const int64_t item = items - 1 - chunk; // longest contexts of a prompt first
        run_item(kernels, call, blocks, item, memory + thread * per_thread);
    });
}

} // namespace llaisys::ops
