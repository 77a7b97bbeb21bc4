// Options of the process groups on GPUs, on CPU streams: ranks are threads of the test.
#pragma once

#include "parallel/process_group.hpp"

namespace collectives {

using namespace llaisys;
using namespace llaisys::parallel;

inline const device::Stream &stream() {
    static const device::Stream one(LLAISYS_DEVICE_CPU, 0, 1);
    return one;
}

inline GroupOptions options_of(const std::string &name, int world, int rank) {
    GroupOptions options;
    options.name = name;
    options.init_method = "test";
    options.ranks.clear();
    for (int i = 0; i < world; ++i) {
        options.ranks.push_back(i);
    }
    options.rank = rank;
    options.timeout = std::chrono::milliseconds(60000);
    options.stream = &stream();
    options.host_backend = "threads";
    return options;
}

} // namespace collectives
