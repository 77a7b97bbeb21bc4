// NVTX ranges for NVIDIA's profilers, enabled by LLAISYS_NVTX=1 in the environment. Empty in a
// build without CUDA.
#pragma once

#if defined(LLAISYS_HAVE_CUDA) && __has_include(<nvtx3/nvToolsExt.h>)

#include <cstdlib>
#include <cstring>
#include <nvtx3/nvToolsExt.h>

namespace llaisys {

class NvtxRange {
public:
    explicit NvtxRange(const char *name) {
        if (is_on()) {
            nvtxRangePushA(name);
        }
    }
    ~NvtxRange() {
        if (is_on()) {
            nvtxRangePop();
        }
    }
    NvtxRange(const NvtxRange &) = delete;
    NvtxRange &operator=(const NvtxRange &) = delete;

private:
    static bool is_on() {
        static const bool on = [] {
            const char *value = std::getenv("LLAISYS_NVTX");
            return value != nullptr && std::strcmp(value, "1") == 0;
        }();
        return on;
    }
};

} // namespace llaisys

#else

namespace llaisys {

struct NvtxRange {
    explicit NvtxRange(const char *) {}
};

} // namespace llaisys

#endif
