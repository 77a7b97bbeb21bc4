#include "device/cpu/huge_memory.hpp"

#include "check.hpp"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <random>
#include <thread>
#include <unistd.h>

using namespace llaisys::device;

namespace {

struct Block {
    unsigned char *memory;
    size_t bytes;
    unsigned char mark;
};

// Fresh, zeroed, and filled with a mark of its own.
Block take(size_t bytes, unsigned char mark) {
    Block block = {static_cast<unsigned char *>(allocate_huge(bytes)), bytes, mark};
    CHECK(block.memory != nullptr);
    CHECK_EQ(reinterpret_cast<uintptr_t>(block.memory) % 64, 0u);
    CHECK(std::all_of(block.memory, block.memory + bytes, [](unsigned char c) { return c == 0; }));
    std::fill(block.memory, block.memory + bytes, mark);
    return block;
}

void check_and_release(const Block &block) {
    CHECK(std::all_of(block.memory, block.memory + block.bytes,
                      [&](unsigned char c) { return c == block.mark; }));
    release_huge(block.memory, block.bytes);
}

const int64_t kSlabPages = (int64_t(64) << 20) / sysconf(_SC_PAGESIZE);

// Pages of this process: mapped, and in memory.
struct Pages {
    int64_t mapped = 0;
    int64_t resident = 0;
    Pages() { std::ifstream("/proc/self/statm") >> mapped >> resident; }
};

// Random takes and releases, at most `most` blocks at a time; all released at the end.
void churn(uint32_t seed, int steps, size_t most) {
    std::mt19937 random(seed);
    std::vector<Block> blocks;
    for (int i = 0; i < steps; ++i) {
        if (blocks.size() < most && random() % 3 != 0) {
            const size_t bytes = kHugeMemoryFrom + random() % (size_t(3) << 20) * (random() % 2);
            blocks.push_back(take(bytes + random() % 100, static_cast<unsigned char>(i | 1)));
        } else if (!blocks.empty()) {
            std::swap(blocks[random() % blocks.size()], blocks.back());
            check_and_release(blocks.back());
            blocks.pop_back();
        }
    }
    for (const Block &block : blocks) {
        check_and_release(block);
    }
}

} // namespace

TEST(blocks_are_zeroed_and_apart) {
    std::vector<Block> blocks;
    for (const size_t bytes : {kHugeMemoryFrom, kHugeMemoryFrom + 1, size_t(1) << 20,
                               (size_t(16) << 20) - 1, size_t(16) << 20, (size_t(16) << 20) + 1}) {
        blocks.push_back(take(bytes, static_cast<unsigned char>(blocks.size() + 1)));
    }
    for (const Block &block : blocks) {
        check_and_release(block);
    }
}

TEST(random_blocks_of_several_threads) {
    std::vector<std::thread> threads;
    for (uint32_t seed = 1; seed <= 3; ++seed) {
        threads.emplace_back(churn, seed, 60, size_t(12));
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
}

TEST(everything_goes_back_to_the_system) {
    churn(7, 40, 8);
    const Pages before;
    churn(7, 200, 8);
    const Pages after;
    CHECK(after.mapped - before.mapped < kSlabPages); // an emulator's own memory may grow a little
}

TEST(one_block_that_stays_does_not_keep_the_memory_of_the_others) {
    const Block stays = take(kHugeMemoryFrom, 1);
    const Pages before;
    for (int i = 0; i < 50; ++i) {
        check_and_release(take(size_t(8) << 20, 2));
    }
    const Pages after;
    CHECK(after.mapped - before.mapped <= kSlabPages);
#if !defined(__SANITIZE_THREAD__)                         // its shadow memory counts as ours
    CHECK(after.resident - before.resident < kSlabPages); // of the 400 MiB
#endif
    check_and_release(stays);
}

TEST(a_block_of_small_pages_costs_what_is_written_of_it) {
    std::vector<unsigned char *> blocks;
    const size_t bytes = size_t(12) << 20; // in slabs, several side by side
    const Pages before;
    for (int i = 0; i < 20; ++i) {
        blocks.push_back(static_cast<unsigned char *>(allocate_huge(bytes)));
        use_small_pages(blocks.back(), bytes);
        blocks.back()[bytes / 2] = 1;
    }
    const Pages after;
#if !defined(__SANITIZE_THREAD__)
    CHECK((after.resident - before.resident) * sysconf(_SC_PAGESIZE) < int64_t(8) << 20); // of 40
#endif
    for (unsigned char *block : blocks) {
        CHECK(block[bytes / 2] == 1 && block[bytes / 2 + 1] == 0 && block[0] == 0);
        release_huge(block, bytes);
    }
}

TEST(a_block_apart_leaves_no_hole_between_those_that_last) {
    // As weights are loaded: the source, the packed copy beside it, and the source goes.
    std::vector<Block> lasting;
    for (int i = 0; i < 6; ++i) {
        const size_t bytes = (size_t(1) << 20) + size_t(i) * 1000;
        auto *source = static_cast<unsigned char *>(allocate_mapping(bytes));
        CHECK(source != nullptr && source[0] == 0 && source[bytes - 1] == 0);
        std::fill(source, source + bytes, static_cast<unsigned char>(255));
        lasting.push_back(take(bytes, static_cast<unsigned char>(i + 1)));
        release_mapping(source, bytes);
        if (i > 0) {
            const Block &before = lasting[size_t(i) - 1];
            CHECK_EQ(lasting.back().memory - before.memory,
                     ptrdiff_t((before.bytes + 63) / 64 * 64));
        }
    }
    for (const Block &block : lasting) {
        check_and_release(block);
    }
}

TEST(what_cannot_be_had_is_null) {
    CHECK(allocate_mapping(SIZE_MAX - 4096) == nullptr);
    CHECK(allocate_huge(SIZE_MAX - 4096) == nullptr);
    CHECK(allocate_huge(size_t(1) << 60) == nullptr);
}
