// How the ranks of a group on CPUs hand each other bytes: the one thing that differs between ranks
// that share memory and ranks on several machines. The collectives are written over it once.
//
// Collectives go in rounds. In a round each rank writes into its own part, meets the others, and
// reads theirs. Parts are double: a rank that is ahead writes the next round's part while the
// others still read this one's, and cannot be two ahead, because a round ends with a meeting of
// all. One meeting a round is therefore enough.
#pragma once

#include "base/dtype.hpp"
#include "parallel/reduce_op_type.hpp"

#include <cstddef>
#include <string>

namespace llaisys::parallel {

enum class Call : int32_t {
    kAllReduce,
    kAllGather,
    kReduceScatter,
    kBroadCast,
    kScatter,
    kGather,
    kSend,
    kRecv
};

const char *call_name(Call call); // "AllReduce", ...

// What a rank says it does in a round; all ranks must say the same.
struct CallTag {
    Call call = Call::kAllReduce;
    DType dtype = LLAISYS_DTYPE_INVALID;
    int64_t count = 0; // elements of the call
    int32_t root = 0;
    function::ReduceOpType op = function::ReduceOpType::kSum;

    bool operator==(const CallTag &other) const;
    std::string text() const; // "AllReduce(sum, f32, 896 elements)"
};

class Exchange {
public:
    static constexpr int64_t kPieceBytes = 256 << 10; // of a rank, in one round
    static constexpr int64_t kMailBytes = 16 << 10;   // of a message between two ranks
    static constexpr int kMaxWorld = 64;

    Exchange(int world, int rank); // throws when there is no such place
    virtual ~Exchange() = default; // the rank leaves: who waits for it fails at once
    Exchange(const Exchange &) = delete;
    Exchange &operator=(const Exchange &) = delete;

    int world() const { return world_; }
    int rank() const { return rank_; }

    // Room for kPieceBytes of this rank in the round to come.
    virtual std::byte *mine() const = 0;
    // Ends this rank's writing of the round, the first `bytes` of mine(), and returns when all ranks
    // have ended theirs. Throws when one cannot be waited for any more or does something else.
    virtual void meet(const CallTag &tag, int64_t bytes) = 0;
    // What a rank wrote in the round of the last meet; good until the next one.
    virtual const std::byte *of(int rank) const = 0;

    // One message of up to kMailBytes to or from a rank; sizes and tags must agree. A message waits
    // until it is taken; whether a second one to the same rank waits for that is up to the kind.
    virtual void put_mail(int to, const CallTag &tag, const void *data, int64_t bytes) = 0;
    virtual void take_mail(int from, const CallTag &tag, void *data, int64_t bytes) = 0;

    // Throws when the exchange is broken or another rank is gone; waits for nothing.
    virtual void check_peers() = 0;

    // Everyone's present and future calls fail with this reason. The first reason stays. Any thread.
    virtual void abort(const std::string &reason) noexcept = 0;

private:
    int world_;
    int rank_;
};

} // namespace llaisys::parallel
