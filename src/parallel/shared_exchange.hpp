// An exchange in memory that all ranks see: threads of a process share a heap block, processes of a
// machine share a mapping. Where the memory comes from is the group's business.
#pragma once

#include "parallel/exchange.hpp"

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>

namespace llaisys::parallel {

class SharedExchange final : public Exchange {
public:
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
    SharedExchange(std::shared_ptr<void> memory, const Options &options);
    ~SharedExchange() override;

    std::byte *mine() const override;
    void meet(const CallTag &tag, int64_t bytes) override;
    const std::byte *of(int rank) const override;
    // A second message to the same rank waits until the first is taken.
    void put_mail(int to, const CallTag &tag, const void *data, int64_t bytes) override;
    void take_mail(int from, const CallTag &tag, void *data, int64_t bytes) override;
    void check_peers() override;
    void abort(const std::string &reason) noexcept override;

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
