// Byte transport between the ranks of a CPU group. Shared memory and TCP implement it;
// ProcessGroupHost implements every collective on top of it.
//
// A collective runs in rounds. In a round each rank writes its send buffer, synchronizes with all
// ranks and reads their buffers. Buffers are double: a rank may write the buffer of the next round
// while others still read that of this round. It cannot be two rounds ahead, so one synchronization
// per round is enough.
#pragma once

#include "base/dtype.hpp"
#include "parallel/reduce_op_type.hpp"

#include <atomic>
#include <cstddef>
#include <mutex>
#include <string>

namespace llaisys::parallel {

enum class OpType : int32_t {
    kAllReduce,
    kAllReduceAdd,
    kAllGather,
    kReduceScatter,
    kBroadCast,
    kScatter,
    kGather,
    kSend,
    kRecv
};

const char *op_type_name(OpType op_type); // "AllReduce", ...

// Arguments of a call that must be equal on all ranks.
struct Fingerprint {
    OpType op_type = OpType::kAllReduce;
    DType dtype = LLAISYS_DTYPE_INVALID;
    int64_t count = 0; // elements of the call
    int32_t root = 0;
    function::ReduceOpType op = function::ReduceOpType::kSum;

    bool operator==(const Fingerprint &other) const;
    std::string text() const; // "AllReduce(sum, f32, 896 elements)"
};

// The first reason that a group was aborted with. Thread-safe.
class AbortReason {
public:
    // False: aborted before.
    bool set(const std::string &reason) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!is_set()) {
            reason_ = reason;
            return !is_set_.exchange(true);
        }
        return false;
    }
    bool is_set() const { return is_set_.load(); }
    void throw_if_set() const {
        if (is_set()) {
            const std::lock_guard<std::mutex> lock(mutex_);
            fail(LLAISYS_ERROR_INTERNAL, reason_);
        }
    }

private:
    mutable std::mutex mutex_;
    std::atomic<bool> is_set_{false};
    std::string reason_;
};

class Transport {
public:
    static constexpr int64_t kChunkBytes = 256 << 10;  // per rank and round
    static constexpr int64_t kMessageBytes = 16 << 10; // of a point-to-point message
    static constexpr int kMaxWorld = 64;

    Transport(int world, int rank); // throws when the rank is not in [0, world)
    virtual ~Transport() = default; // leaves the group: ranks that wait for this one fail at once
    Transport(const Transport &) = delete;
    Transport &operator=(const Transport &) = delete;

    int world() const { return world_; }
    int rank() const { return rank_; }

    // kChunkBytes of this rank, to be filled for the next round.
    virtual std::byte *send_buffer() const = 0;
    // Publishes the first `bytes` of send_buffer() and returns when all ranks have published
    // theirs. Throws when a rank is lost, times out or makes another call.
    virtual void exchange(const Fingerprint &fingerprint, int64_t bytes) = 0;
    // What a rank published in the last exchange(); valid until the next one.
    virtual const std::byte *buffer_of(int rank) const = 0;

    // One message of up to kMessageBytes to or from a rank; sizes and fingerprints must be equal.
    // The first message does not wait for its receiver; a second one to the same rank may.
    virtual void send_message(int to, const Fingerprint &fingerprint, const void *data,
                              int64_t bytes) = 0;
    virtual void recv_message(int from, const Fingerprint &fingerprint, void *data,
                              int64_t bytes) = 0;

    // Throws when the group is aborted or another rank is lost. Does not block.
    virtual void check_peers() = 0;

    // Makes present and future calls of all ranks fail with this reason. The first reason is kept.
    // Callable from any thread.
    virtual void abort(const std::string &reason) noexcept = 0;

private:
    int world_;
    int rank_;
};

} // namespace llaisys::parallel
