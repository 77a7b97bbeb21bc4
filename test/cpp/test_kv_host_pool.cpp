// Offloaded KV blocks: byte-exact against a reference for every dtype and odd sizes; invalid
// indices are rejected before any copy.
#include "attention_cases.hpp"

#include "runtime/kv_cache/kv_host_pool.hpp"

#include <map>
#include <sys/mman.h>
#include <unistd.h>

using namespace ops_test;

namespace {

constexpr ops::KvDirection kToHost = ops::KvDirection::to_host;
constexpr ops::KvDirection kFromHost = ops::KvDirection::from_host;

struct Shape4 {
    int64_t layers, heads, d;
    int32_t block_size, n_blocks, n_host_slots;
    int64_t value_dim = 0; // above 0: the keys contain the values
};

using Bytes = std::vector<std::byte>;

// Fills the whole storage with bytes that differ from call to call.
void scribble(const runtime::KvStorage &storage, uint32_t *state) {
    for (const ops::KvLayer &layer : storage.layers()) {
        for (const Tensor &cache : {layer.k, layer.values()}) {
            for (int64_t i = 0; i < cache.bytes(); ++i) {
                *state = *state * 1664525u + 1013904223u;
                cache.data()[i] = std::byte(*state >> 24);
            }
        }
    }
}

// The bytes of one block: per layer keys, then values.
Bytes block_of(const runtime::KvStorage &storage, const Shape4 &shape, int32_t block) {
    Bytes found;
    for (const ops::KvLayer &layer : storage.layers()) {
        for (const Tensor &cache : {layer.k, layer.values()}) {
            const int64_t bytes = cache.bytes() / shape.n_blocks;
            const std::byte *from = cache.data() + block * bytes;
            found.insert(found.end(), from, from + bytes);
        }
    }
    return found;
}

} // namespace

TEST(blocks_round_trip_through_host_memory) {
    const Shape4 shapes[] = {
        {1, 1, 2, 1, 3, 1}, {3, 3, 10, 4, 5, 4}, {2, 2, 64, 16, 6, 9}, {2, 1, 24, 16, 6, 9, 16}};
    uint32_t state = 7;
    for (const DType dtype : {kF32, LLAISYS_DTYPE_BF16, LLAISYS_DTYPE_F16, LLAISYS_DTYPE_I8}) {
        for (const Shape4 &shape : shapes) {
            if (shape.value_dim > 0 && dtype == LLAISYS_DTYPE_I8) {
                continue;
            }
            const Stream &stream = one_thread();
            runtime::KvStorage storage(
                stream, shape.layers, int64_t(shape.n_blocks) * shape.block_size, shape.heads,
                shape.d, dtype, random_tensor({shape.d / 2}, kF32), shape.value_dim);
            runtime::KvHostPool pool(stream, storage, shape.block_size, shape.n_host_slots, -1);
            std::map<int32_t, Bytes> reference; // host slot -> bytes
            for (int round = 0; round < 8; ++round) {
                scribble(storage, &state);
                const int32_t n = std::min(shape.n_host_slots, shape.n_blocks - 1);
                std::vector<int32_t> blocks, slots;
                for (int32_t i = 0; i < n; ++i) {
                    blocks.push_back((i + round) % shape.n_blocks);
                    slots.push_back((i * 2 + round) % shape.n_host_slots);
                }
                std::sort(slots.begin(), slots.end());
                slots.erase(std::unique(slots.begin(), slots.end()), slots.end());
                const auto count = int32_t(slots.size());
                pool.move(kToHost, blocks.data(), slots.data(), count);
                for (int32_t i = 0; i < count; ++i) {
                    reference[slots[size_t(i)]] = block_of(storage, shape, blocks[size_t(i)]);
                }
                scribble(storage, &state);
                std::vector<Bytes> before;
                for (int32_t block = 0; block < shape.n_blocks; ++block) {
                    before.push_back(block_of(storage, shape, block));
                }
                const int32_t slot = reference.begin()->first;
                const int32_t block = (round * 3) % shape.n_blocks;
                pool.move(kFromHost, &block, &slot, 1);
                before[size_t(block)] = reference[slot];
                for (int32_t i = 0; i < shape.n_blocks; ++i) {
                    CHECK(block_of(storage, shape, i) == before[size_t(i)]);
                }
            }
        }
    }
}

TEST(host_slots_in_a_file_can_be_read_and_written_by_others) {
    const Shape4 shape{3, 2, 8, 4, 3, 2};
    const Stream &stream = one_thread();
    runtime::KvStorage storage(stream, 3, 12, 2, 8, kF32, random_tensor({4}, kF32));
    CHECK_THROWS(runtime::KvHostPool(stream, storage, 4, 2, 1 << 20), "cannot be resized");
    const int fd = memfd_create("llaisys-test", MFD_CLOEXEC);
    {
        runtime::KvHostPool pool(stream, storage, 4, 2, fd);
        uint32_t state = 3;
        scribble(storage, &state);
        const int32_t blocks[] = {2, 0};
        const int32_t slots[] = {0, 1};
        pool.move(kToHost, blocks, slots, 2);
        Bytes first = block_of(storage, shape, 2), second = block_of(storage, shape, 0);
        Bytes found(2 * first.size());
        CHECK(lseek(fd, 0, SEEK_END) == off_t(found.size()));
        CHECK(pread(fd, found.data(), found.size(), 0) == ssize_t(found.size()));
        first.insert(first.end(), second.begin(), second.end());
        CHECK(found == first);
        CHECK(pwrite(fd, second.data(), second.size(), 0) == ssize_t(second.size()));
        pool.move(kFromHost, blocks, slots, 1);
        CHECK(block_of(storage, shape, 2) == second);
    }
    close(fd);
}

TEST(invalid_indices_are_rejected_before_any_copy) {
    const Shape4 shape{2, 2, 8, 4, 3, 2};
    const Stream &stream = one_thread();
    runtime::KvStorage storage(stream, 2, 12, 2, 8, kF32, random_tensor({4}, kF32));
    runtime::KvHostPool pool(stream, storage, 4, 2, -1);
    const int32_t good[] = {0, 1};
    const int32_t same[] = {1, 1};
    const int32_t far[] = {0, 3};
    const int32_t negative[] = {-1, 0};
    uint32_t state = 1;
    scribble(storage, &state);
    pool.move(kToHost, good, good, 2);
    scribble(storage, &state);
    const Bytes before = block_of(storage, shape, 1);
    CHECK_THROWS(pool.move(kToHost, good, same, 2), "host_slots names 1 twice");
    CHECK_THROWS(pool.move(kFromHost, same, good, 2), "blocks names 1 twice");
    CHECK_THROWS(pool.move(kFromHost, far, good, 2), "blocks[1] must be in [0, 3), got 3");
    CHECK_THROWS(pool.move(kFromHost, good, far, 2), "host_slots[1] must be in [0, 2), got 3");
    CHECK_THROWS(pool.move(kToHost, negative, good, 2), "blocks[0] must be in [0, 3), got -1");
    CHECK(block_of(storage, shape, 1) == before);
    pool.move(kToHost, same, good, 2); // one block into two host slots is valid
    pool.move(kFromHost, good, same, 2);
    CHECK(block_of(storage, shape, 0) == before && block_of(storage, shape, 1) == before);
}
