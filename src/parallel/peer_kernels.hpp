// Collectives by kernels that read the memory of the other ranks' GPUs. Each rank has an area that
// all ranks can address: a rank writes its data there, signals the others, waits for their signals
// and reads their areas. No host takes part, so the calls can be captured in a graph.
//
// All ranks make the same calls in the same order. The kernels of all ranks must run at the same
// time or by turns: on GPUs of their own, or in processes that share a GPU. (Ranks of one process
// on one GPU deadlock when a host call of one waits for the whole device.)
#pragma once

#include "parallel/reduce_op_type.hpp"
#include "tensor/tensor.hpp"

namespace llaisys::parallel {

constexpr int kMaxPeers = 8;
constexpr int64_t kPeerChunk = 4 << 20;    // bytes of a rank in one collective
constexpr int64_t kPeerMessage = 64 << 10; // bytes of one message

// The areas as one rank's kernels address them; passed to kernels by value.
struct Peers {
    int world = 0;
    int rank = 0;
    std::byte *areas[kMaxPeers] = {};     // PeerKernels::area_bytes each, zero at the start
    const uint32_t *is_aborted = nullptr; // host memory; once set, kernels return at once
};

struct PeerKernels {
    int64_t area_bytes;

    // data = the reduction of all ranks' data in rank order; at most kPeerChunk bytes.
    void (*all_reduce)(const device::Stream &stream, const Peers &peers, std::byte *data,
                       int64_t count, DType dtype, function::ReduceOpType op);
    // sum += the sum of all ranks' terms in rank order; at most kPeerChunk bytes of terms.
    void (*all_reduce_add)(const device::Stream &stream, const Peers &peers, float *sum,
                           const std::byte *terms, int64_t count, DType dtype);
    // Every rank shares `bytes` at `in` (null: nothing) and copies to `out` (null: nothing) those
    // of rank `from`, or with `from` -1 those of all ranks, `stride` bytes apart. At most
    // kPeerChunk bytes.
    void (*exchange)(const device::Stream &stream, const Peers &peers, std::byte *out,
                     const std::byte *in, int64_t bytes, int from, int64_t stride);
    // One message of at most kPeerMessage bytes; only the two ranks call. Sending waits until the
    // previous message has been received.
    void (*send)(const device::Stream &stream, const Peers &peers, const std::byte *in,
                 int64_t bytes, int to);
    void (*recv)(const device::Stream &stream, const Peers &peers, std::byte *out, int64_t bytes,
                 int from);
    // Whether the other ranks have finished all calls that this rank has finished: then they do not
    // read its area.
    bool (*is_idle)(const Peers &peers);
};

// Throws LLAISYS_ERROR_UNSUPPORTED in a build without CUDA.
const PeerKernels &peer_kernels();

// For tests: peer_kernels() returns these; null: those of the build.
void use_peer_kernels(const PeerKernels *kernels);

const PeerKernels &cuda_peer_kernels(); // in a build with CUDA

} // namespace llaisys::parallel
