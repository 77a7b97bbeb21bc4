#include "base/nvtx.hpp"

#if defined(LLAISYS_HAVE_CUDA)

#include <cstdlib>
#include <cstring>
#include <nvtx3/nvToolsExt.h>

namespace llaisys::nvtx {

bool is_on() {
    static const bool on = [] {
        const char *value = std::getenv("LLAISYS_NVTX");
        return value != nullptr && std::strcmp(value, "1") == 0;
    }();
    return on;
}

void push(const char *name) { nvtxRangePushA(name); }
void pop() { nvtxRangePop(); }

} // namespace llaisys::nvtx

#else

namespace llaisys::nvtx {

bool is_on() { return false; }
void push(const char *) {}
void pop() {}

} // namespace llaisys::nvtx

#endif
