// NVTX ranges for NVIDIA's profilers, enabled by LLAISYS_NVTX=1 in the environment. They have no
// effect in libllaisys: only libllaisys_cuda is compiled with NVTX.
#pragma once

namespace llaisys {

namespace nvtx {
bool is_on();
void push(const char *name);
void pop();
} // namespace nvtx

// Names are STAGE/PART, as "attn_meta/build"; ranges nest.
class NvtxRange {
public:
    explicit NvtxRange(const char *name) : is_on_(nvtx::is_on()) {
        if (is_on_) {
            nvtx::push(name);
        }
    }
    ~NvtxRange() {
        if (is_on_) {
            nvtx::pop();
        }
    }
    NvtxRange(const NvtxRange &) = delete;
    NvtxRange &operator=(const NvtxRange &) = delete;

private:
    bool is_on_;
};

} // namespace llaisys
