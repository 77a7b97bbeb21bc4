#include "parallel/peer_kernels.hpp"

namespace llaisys::parallel {

namespace {
const PeerKernels *substitute = nullptr;
}

void use_peer_kernels(const PeerKernels *kernels) { substitute = kernels; }

const PeerKernels &peer_kernels() {
    if (substitute != nullptr) {
        return *substitute;
    }
#if defined(LLAISYS_HAVE_CUDA)
    return cuda_peer_kernels();
#else
    fail(LLAISYS_ERROR_UNSUPPORTED, "peer memory is not part of this build");
#endif
}

} // namespace llaisys::parallel
