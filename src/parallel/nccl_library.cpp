#include "parallel/nccl_library.hpp"

#include "base/check.hpp"

#include <dlfcn.h>

namespace llaisys::parallel {

namespace {

const NcclLibrary *substitute = nullptr;

template <typename Function> void find(void *file, const char *name, Function **function) {
    *function = reinterpret_cast<Function *>(dlsym(file, name));
    if (*function == nullptr) {
        fail(LLAISYS_ERROR_UNSUPPORTED, "libnccl.so.2 has no ", name, ": it is older than 2.7");
    }
}

NcclLibrary load() {
    void *file = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (file == nullptr) {
        const char *reason = dlerror();
        fail(LLAISYS_ERROR_UNSUPPORTED,
             "tensor parallelism on GPUs needs NCCL (a CUDA toolkit package or the wheel "
             "nvidia-nccl-cu13): ",
             reason != nullptr ? reason : "libnccl.so.2 was not found");
    }
    NcclLibrary library;
    find(file, "ncclGetVersion", &library.GetVersion);
    find(file, "ncclGetUniqueId", &library.GetUniqueId);
    find(file, "ncclCommInitRank", &library.CommInitRank);
    find(file, "ncclCommDestroy", &library.CommDestroy);
    find(file, "ncclCommAbort", &library.CommAbort);
    find(file, "ncclCommGetAsyncError", &library.CommGetAsyncError);
    find(file, "ncclGetErrorString", &library.GetErrorString);
    find(file, "ncclGroupStart", &library.GroupStart);
    find(file, "ncclGroupEnd", &library.GroupEnd);
    find(file, "ncclAllReduce", &library.AllReduce);
    find(file, "ncclAllGather", &library.AllGather);
    find(file, "ncclReduceScatter", &library.ReduceScatter);
    find(file, "ncclBroadcast", &library.Broadcast);
    find(file, "ncclSend", &library.Send);
    find(file, "ncclRecv", &library.Recv);
    return library;
}

} // namespace

const NcclLibrary &nccl_library() {
    if (substitute != nullptr) {
        return *substitute;
    }
    static const NcclLibrary library = load();
    return library;
}

void use_nccl_library(const NcclLibrary *library) { substitute = library; }

} // namespace llaisys::parallel
