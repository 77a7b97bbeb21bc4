// NCCL, loaded at run time: a build needs no NCCL header, and only tensor parallelism on GPUs needs
// the library.
//
// Types and values are those of NCCL's C API, which is stable within version 2.
#pragma once

#include <cstddef>

namespace llaisys::parallel {

struct NcclId {
    char bytes[128]; // passed by value
};
using NcclComm = struct NcclCommunicator *;
enum class NcclResult : int { success = 0, in_progress = 7 };
enum class NcclType : int { i8 = 0, i32 = 2, i64 = 4, f16 = 6, f32 = 7, bf16 = 9 };
enum class NcclOp : int { sum = 0, prod = 1, max = 2, min = 3, avg = 4 };

// A stream is a cudaStream_t. A call enqueues its work there and returns.
struct NcclLibrary {
    NcclResult (*GetVersion)(int *version) = nullptr;
    NcclResult (*GetUniqueId)(NcclId *id) = nullptr;
    NcclResult (*CommInitRank)(NcclComm *comm, int world, NcclId id, int rank) = nullptr;
    NcclResult (*CommDestroy)(NcclComm comm) = nullptr;
    NcclResult (*CommAbort)(NcclComm comm) = nullptr;
    NcclResult (*CommGetAsyncError)(NcclComm comm, NcclResult *error) = nullptr;
    const char *(*GetErrorString)(NcclResult result) = nullptr;
    NcclResult (*GroupStart)() = nullptr;
    NcclResult (*GroupEnd)() = nullptr;
    NcclResult (*AllReduce)(const void *input, void *output, size_t count, NcclType type, NcclOp op,
                            NcclComm comm, void *stream) = nullptr;
    NcclResult (*AllGather)(const void *input, void *output, size_t input_count, NcclType type,
                            NcclComm comm, void *stream) = nullptr;
    NcclResult (*ReduceScatter)(const void *input, void *output, size_t output_count, NcclType type,
                                NcclOp op, NcclComm comm, void *stream) = nullptr;
    NcclResult (*Broadcast)(const void *input, void *output, size_t count, NcclType type, int root,
                            NcclComm comm, void *stream) = nullptr;
    NcclResult (*Send)(const void *input, size_t count, NcclType type, int to, NcclComm comm,
                       void *stream) = nullptr;
    NcclResult (*Recv)(void *output, size_t count, NcclType type, int from, NcclComm comm,
                       void *stream) = nullptr;
};

// Throws LLAISYS_ERROR_UNSUPPORTED with the file name when the library is not installed.
const NcclLibrary &nccl_library();

// For tests: nccl_library() returns this one; null: the installed one.
void use_nccl_library(const NcclLibrary *library);

} // namespace llaisys::parallel
