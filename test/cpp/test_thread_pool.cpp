// The pool under every shape of load: exactly once, visible afterwards, no lost wake-up, no deadlock.
// Run under ThreadSanitizer too; `test_thread_pool empty_region` prints what a region costs.
#include "check.hpp"
#include "device/cpu/thread_pool.hpp"

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>

using llaisys::device::ThreadPool;
using Clock = std::chrono::steady_clock;

namespace {

constexpr auto kLongerThanSpinning = std::chrono::milliseconds(3); // workers are asleep after it

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

// Work that the compiler cannot drop.
void burn(int64_t rounds) {
    volatile int64_t sink = 0;
    for (int64_t i = 0; i < rounds; ++i) {
        sink = sink + i;
    }
}

// Plain (not atomic) counters: a chunk that ran twice or was not visible after run() is a wrong
// number, and a data race under ThreadSanitizer.
struct Counted {
    std::vector<int> runs;
    std::vector<int64_t> values;
    std::vector<int> by_thread;

    void run(ThreadPool &pool, int64_t n, int64_t cost = 0) {
        begin(n);
        pool.run(n, [&](int64_t chunk, int thread) {
            burn(cost);
            count(chunk, thread);
        });
        check(pool, n);
    }

    void run_ranges(ThreadPool &pool, int64_t n, int64_t cost = 0) {
        begin(n);
        pool.run_ranges(n, [&](int64_t first, int64_t last, int thread) {
            for (int64_t chunk = first; chunk < last; ++chunk) {
                burn(cost);
                count(chunk, thread);
            }
        });
        check(pool, n);
    }

private:
    void begin(int64_t n) {
        runs.assign(size_t(n), 0);
        values.assign(size_t(n), -1);
        by_thread.assign(size_t(n), -1);
    }
    void count(int64_t chunk, int thread) {
        runs[size_t(chunk)] += 1;
        values[size_t(chunk)] = chunk * 3 + 1;
        by_thread[size_t(chunk)] = thread;
    }
    void check(const ThreadPool &pool, int64_t n) {
        for (int64_t i = 0; i < n; ++i) {
            CHECK_EQ(runs[size_t(i)], 1);
            CHECK_EQ(values[size_t(i)], i * 3 + 1);
            CHECK(by_thread[size_t(i)] >= 0 && by_thread[size_t(i)] < pool.size());
        }
    }
};

} // namespace

TEST(every_chunk_runs_exactly_once_with_1_to_8_threads) {
    for (int threads = 1; threads <= 8; ++threads) {
        ThreadPool pool(threads);
        CHECK(pool.size() >= 1 && pool.size() <= threads);
        Counted counted;
        for (const int64_t n : {0, 1, 2, 3, 7, 8, 9, 64, 1000, 4096}) {
            for (int repeat = 0; repeat < 20; ++repeat) {
                counted.run(pool, n);
                counted.run_ranges(pool, n);
            }
        }
    }
}

TEST(a_range_is_at_most_a_quarter_of_the_rest_of_a_run) {
    ThreadPool pool(4);
    for (const int64_t n : {4, 5, 30, 64, 1001}) {
        const int64_t run = (n + pool.size() - 1) / pool.size();
        const int64_t most = std::clamp<int64_t>(run / 4, 1, ThreadPool::kTogether);
        pool.run_ranges(n, [&](int64_t first, int64_t last, int) {
            CHECK(0 <= first && first < last && last <= n);
            CHECK(last - first <= most);
        });
    }
}

TEST(no_chunks_means_no_calls) {
    ThreadPool pool(2);
    int calls = 0;
    pool.run(0, [&](int64_t, int) { ++calls; });
    pool.run(-5, [&](int64_t, int) { ++calls; });
    pool.run_ranges(0, [&](int64_t, int64_t, int) { ++calls; });
    CHECK_EQ(calls, 0);
}

TEST(one_chunk_and_one_thread_stay_on_the_caller) {
    const auto caller = std::this_thread::get_id();
    ThreadPool pool(4);
    pool.run(1, [&](int64_t, int thread) {
        CHECK(std::this_thread::get_id() == caller);
        CHECK_EQ(thread, 0);
    });
    ThreadPool alone(1);
    CHECK_EQ(alone.size(), 1);
    int64_t expected = 0;
    alone.run(100, [&](int64_t chunk, int thread) {
        CHECK_EQ(chunk, expected++);
        CHECK_EQ(thread, 0);
    });
    CHECK_EQ(expected, 100);
    alone.run_ranges(100, [&](int64_t first, int64_t last, int thread) {
        CHECK_EQ(first, 0);
        CHECK_EQ(last, 100);
        CHECK_EQ(thread, 0);
    });
}

TEST(a_region_sees_what_the_one_before_it_wrote) {
    ThreadPool pool(4);
    constexpr int64_t kCells = 64;
    std::vector<int64_t> from(kCells, 1), to(kCells);
    for (int round = 0; round < 2000; ++round) {
        pool.run(kCells, [&](int64_t i, int) {
            to[size_t(i)] = from[size_t((i + 17) % kCells)] + 1; // a cell of another chunk
        });
        from.swap(to);
    }
    CHECK_EQ(std::count(from.begin(), from.end(), 2001), kCells);
}

// A worker that comes late to a region must never take a chunk of the next one with the old body:
// each region has its own body on the stack and its own number of chunks.
TEST(short_regions_back_to_back_do_not_mix) {
    for (const int threads : {2, 3, 8}) {
        ThreadPool pool(threads);
        const auto start = Clock::now();
        int64_t sum = 0;
        int64_t expected = 0;
        for (int64_t region = 0; region < 20000 && seconds_since(start) < 20; ++region) {
            const int64_t n = 2 + region % 5;
            int64_t cells[8] = {};
            pool.run(n, [&cells, region](int64_t chunk, int) { cells[chunk] += region + chunk; });
            for (int64_t i = 0; i < 8; ++i) {
                sum += cells[i];
                expected += i < n ? region + i : 0;
            }
        }
        CHECK_EQ(sum, expected);
    }
}

TEST(sleeping_workers_wake_and_help) {
    ThreadPool pool(3);
    Counted counted;
    for (int round = 0; round < 30; ++round) {
        std::this_thread::sleep_for(kLongerThanSpinning);
        counted.run(pool, 16);
    }
    // A region long enough for the others to come must not stay with the caller. (A loaded machine
    // may not run them at once: bounded tries.)
    bool was_helped = pool.size() == 1;
    for (int round = 0; round < 200 && !was_helped; ++round) {
        std::this_thread::sleep_for(kLongerThanSpinning);
        counted.run(pool, 64, 100000);
        const std::vector<int> &by = counted.by_thread;
        was_helped = std::any_of(by.begin(), by.end(), [](int thread) { return thread != 0; });
    }
    CHECK(was_helped);
}

// A region that is over before a sleeper is awake still gets it spinning for those that follow.
TEST(a_burst_of_short_regions_is_helped_after_a_pause) {
    ThreadPool pool(2);
    bool was_helped = pool.size() == 1;
    for (int round = 0; round < 200 && !was_helped; ++round) {
        std::this_thread::sleep_for(kLongerThanSpinning);
        int helped[2] = {0, 0};
        for (int region = 0; region < 2000; ++region) {
            pool.run(2, [&](int64_t chunk, int thread) {
                burn(200);
                helped[chunk] = thread;
            });
            was_helped = was_helped || helped[0] + helped[1] > 0;
        }
    }
    CHECK(was_helped);
}

TEST(regions_around_the_moment_of_falling_asleep) {
    ThreadPool pool(4);
    Counted counted;
    // Pauses sweep across the spin time, so that regions open while workers go to sleep.
    for (int round = 0; round < 400; ++round) {
        const auto until = Clock::now() + std::chrono::microseconds(100 + round);
        while (Clock::now() < until) {
        }
        counted.run(pool, 5);
    }
}

TEST(uneven_chunks_are_shared_out) {
    ThreadPool pool(4);
    std::vector<int64_t> done(64, 0);
    for (int round = 0; round < 20; ++round) {
        std::fill(done.begin(), done.end(), 0);
        pool.run(64, [&](int64_t chunk, int) {
            burn(chunk % 16 == 0 ? 50000 : 10); // a few are 5000 times as long as the rest
            done[size_t(chunk)] = chunk + 1;
        });
        for (int64_t i = 0; i < 64; ++i) {
            CHECK_EQ(done[size_t(i)], i + 1);
        }
    }
}

TEST(pools_of_several_callers_do_not_disturb_each_other) {
    std::vector<std::thread> callers;
    std::vector<int64_t> sums(4, 0);
    for (size_t c = 0; c < sums.size(); ++c) {
        callers.emplace_back([&sums, c] {
            for (int life = 0; life < 3; ++life) {
                ThreadPool pool(int(c) + 1);
                for (int region = 0; region < 300; ++region) {
                    int64_t cells[10] = {};
                    pool.run(10, [&](int64_t chunk, int) { cells[chunk] += chunk; });
                    for (const int64_t cell : cells) {
                        sums[c] += cell;
                    }
                }
            }
        });
    }
    for (std::thread &caller : callers) {
        caller.join();
    }
    for (const int64_t sum : sums) {
        CHECK_EQ(sum, 3 * 300 * 45);
    }
}

// One caller at a time, but not always the same thread.
TEST(a_pool_can_be_handed_from_thread_to_thread) {
    ThreadPool pool(3);
    for (int round = 0; round < 20; ++round) {
        std::thread([&] {
            Counted counted;
            counted.run(pool, 33);
        }).join();
    }
}

TEST(what_regions_read_may_be_announced_and_be_gone) {
    ThreadPool pool(4);
    Counted counted;
    const auto announce = [&](const void *begin, int64_t bytes) {
        llaisys::device::Reads reads;
        reads.begin[0] = begin;
        reads.begin[2] = begin;
        reads.bytes[0] = bytes;
        reads.bytes[2] = bytes / 2;
        pool.announce(reads);
    };
    for (int round = 0; round < 50; ++round) {
        const std::vector<char> memory(round % 2 == 0 ? 1000 : 3000000);
        announce(memory.data(), int64_t(memory.size()));
        counted.run(pool, 16);
        announce(reinterpret_cast<const void *>(uintptr_t(64 + round)), int64_t(1) << 40);
        counted.run(pool, 16);
        announce(nullptr, 0);
        if (round % 10 == 0) {
            std::this_thread::sleep_for(kLongerThanSpinning);
        }
        counted.run(pool, 16);
    }
}

TEST(destruction_while_workers_start_spin_or_sleep) {
    const auto start = Clock::now();
    for (int round = 0; round < 100; ++round) {
        {
            ThreadPool unused(4);
        } // workers may not even have started
        ThreadPool pool(4);
        Counted counted;
        counted.run(pool, 8);
        if (round % 10 == 0) {
            std::this_thread::sleep_for(kLongerThanSpinning);
        }
    }
    CHECK(seconds_since(start) < 60);
}

TEST(the_process_wide_cap_is_kept_and_given_back) {
    ThreadPool::set_process_limit(4); // 3 workers in all
    {
        ThreadPool first(3);
        CHECK_EQ(first.size(), 3);
        ThreadPool second(8);
        CHECK_EQ(second.size(), 2);
        ThreadPool third(8);
        CHECK_EQ(third.size(), 1);
        Counted counted;
        for (ThreadPool *pool : {&first, &second, &third}) {
            counted.run(*pool, 50);
        }
        ThreadPool::set_process_limit(1); // below the number in use: no new workers
        CHECK_EQ(ThreadPool(4).size(), 1);
        ThreadPool::set_process_limit(6);
        CHECK_EQ(ThreadPool(4).size(), 3);
        CHECK_EQ(ThreadPool(4).size(), 3); // the pool of the line above is gone
    }
    ThreadPool::set_process_limit(64);
    CHECK_EQ(ThreadPool(8).size(), 8);
    CHECK_EQ(ThreadPool(64).size(), 64);
}

TEST(bad_sizes_are_refused) {
    CHECK_THROWS(ThreadPool(-1), "n_threads", "-1");
    CHECK_THROWS(ThreadPool(4097), "n_threads", "4097");
    CHECK_THROWS(ThreadPool::set_process_limit(0), "at least 1", "0");
    CHECK(ThreadPool(0).size() >= 1);
}

// What a region costs on its own: opening, handing out two chunks, closing. Printed, and bounded only
// far above what an idle machine needs: the tests run beside others.
TEST(an_empty_region_is_cheap) {
    ThreadPool pool(2);
    constexpr int kRegions = 20000;
    double best = 1;
    for (int round = 0; round < 5; ++round) {
        const auto start = Clock::now();
        for (int region = 0; region < kRegions; ++region) {
            pool.run(2, [](int64_t, int) {});
        }
        best = std::min(best, seconds_since(start) / kRegions);
    }
    std::printf("       empty region with %d threads: %.3f microseconds\n", pool.size(),
                best * 1e6);
    CHECK(best < 200e-6);
}
