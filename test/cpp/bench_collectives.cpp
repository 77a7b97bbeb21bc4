// Microseconds of an AllReduce(sum) of f32 by message size: bench_collectives [threads|shm]
// [world]. Not a test: built with the others, run by hand.
#include "parallel/process_group_host.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

using namespace llaisys;
using namespace llaisys::parallel;

void measure(const ProcessGroup &group) {
    for (const int64_t bytes : {4 << 10, 16 << 10, 64 << 10, 256 << 10, 4 << 20}) {
        const tensor_t tensor = Tensor::create({bytes / 4}, LLAISYS_DTYPE_F32);
        const int rounds = bytes > 1 << 20 ? 200 : 5000;
        std::vector<double> times;
        for (int i = 0; i < rounds; ++i) {
            const auto start = std::chrono::steady_clock::now();
            group.AllReduce(tensor);
            times.push_back(
                std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
                    .count());
        }
        std::sort(times.begin(), times.end());
        if (group.rank() == 0) {
            std::printf("%6.0f KiB  p10 %8.2f us  median %8.2f us  p90 %8.2f us\n",
                        double(bytes) / 1024, times[times.size() / 10], times[times.size() / 2],
                        times[times.size() * 9 / 10]);
            std::fflush(stdout);
        }
    }
}

} // namespace

int main(int argc, char **argv) {
    const bool is_shm = argc > 1 && std::strcmp(argv[1], "shm") == 0;
    const int world = argc > 2 ? std::atoi(argv[2]) : 2;
    GroupOptions options;
    options.ranks.clear();
    for (int rank = 0; rank < world; ++rank) {
        options.ranks.push_back(rank);
    }
    if (!is_shm) {
        std::vector<std::thread> ranks;
        for (int rank = 0; rank < world; ++rank) {
            options.rank = rank;
            ranks.emplace_back([options] { measure(ProcessGroupThreads(options)); });
        }
        for (std::thread &rank : ranks) {
            rank.join();
        }
        return 0;
    }
    options.init_method = text("fd://", syscall(SYS_memfd_create, "llaisys-bench", 0u));
    for (int rank = 0; rank < world; ++rank) {
        if (fork() == 0) {
            options.rank = rank;
            measure(ProcessGroupShm(options));
            _exit(0);
        }
    }
    while (wait(nullptr) > 0) {
    }
    return 0;
}
