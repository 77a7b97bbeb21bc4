// Memory that all ranks of a group see, and the rules by which they use it: threads of a process
// share a heap block, processes of a machine share a mapping. Everything but where the memory
// comes from is here, so that both speak the same protocol.
//
// Collectives go in rounds. In a round each rank writes into its own part, meets the others, and
// reads theirs. Parts are double: a rank that is ahead writes the next round's part while the
// others still read this one's, and cannot be two ahead, because a round ends with a meeting of
// all. One meeting a round is therefore enough.
#pragma once

#include "base/dtype.hpp"
#include "parallel/reduce_op_type.hpp"

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
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

    struct Options {
        int world = 1;
        int rank = 0;
        std::chrono::milliseconds timeout{0}; // 0: as long as the others live
        // Whether a rank that has joined still runs; asked now and then while it is waited for.
        std::function<bool(int rank)> is_alive;
    };

    static size_t bytes_for(int world);

    // `memory`: bytes_for(world) bytes, zeroed before the first rank comes, aligned to a page; it is
    // kept as long as this lives. Throws when the group has another size or the rank is taken.
    Exchange(std::shared_ptr<void> memory, const Options &options);
    // The rank leaves: who waits for it fails at once.
    ~Exchange();
    Exchange(const Exchange &) = delete;
    Exchange &operator=(const Exchange &) = delete;

    int world() const { return options_.world; }
    int rank() const { return options_.rank; }

    // Room for kPieceBytes of this rank in the round to come.
    std::byte *mine() const;
    // Ends this rank's writing of the round and returns when all ranks have ended theirs. Throws when
    // one cannot be waited for any more or does something else.
    void meet(const CallTag &tag);
    // What a rank wrote in the round of the last meet; good until the next one.
    const std::byte *of(int rank) const;

    // One message of up to kMailBytes to or from a rank. A message waits in memory until it is
    // taken; a second one to the same rank waits for that. Sizes and tags must agree.
    void put_mail(int to, const CallTag &tag, const void *data, int64_t bytes);
    void take_mail(int from, const CallTag &tag, void *data, int64_t bytes);

    // Everyone's present and future calls fail with this reason. The first reason stays.
    void abort(const std::string &reason) noexcept;

    // Returns when all ranks have joined; throws when one of them dies or time is up.
    void wait_for_all() const;

private:
    struct Header;
    struct Seat;
    struct Mail;

    Header &header() const;
    Seat &seat(int rank) const;
    Mail &mail(int from, int to) const;
    void join();
    template <typename Reached>
    void wait(std::atomic<uint32_t> &word, std::atomic<uint32_t> &sleepers, int peer,
              const Reached &reached) const;
    void check_usable() const;
    void check_alive(int peer) const;
    void check_time(std::chrono::steady_clock::time_point start, const std::string &who) const;
    [[noreturn]] void give_up(const std::string &reason) const;

    std::shared_ptr<void> memory_;
    Options options_;
    std::chrono::microseconds spin_; // before a wait goes to sleep
    uint32_t round_ = 0;             // the last one that ended; wraps
};

} // namespace llaisys::parallel
