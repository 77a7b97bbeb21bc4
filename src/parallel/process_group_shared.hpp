// Groups on the CPU: ranks meet in memory that all of them see, or through a network.
#pragma once

#include "parallel/exchange.hpp"
#include "parallel/process_group.hpp"

#include <condition_variable>
#include <deque>
#include <functional>
#include <thread>

namespace llaisys::parallel {

// Runs calls one after the other in a thread that is started with the first of them.
class WorkQueue {
public:
    ~WorkQueue(); // runs what was added
    std::shared_ptr<Work> add(std::function<void()> call);
    bool is_idle() const; // everything added is over

private:
    void run();

    mutable std::mutex mutex_;
    std::condition_variable added_;
    std::deque<std::pair<std::function<void()>, std::shared_ptr<HostWork>>> calls_;
    int pending_ = 0; // added and not over
    bool stopping_ = false;
    std::thread thread_;
};

// The collectives over an Exchange. A message larger than a piece goes in several rounds. Nothing
// is allocated by a call that is not asynchronous.
class ProcessGroupShared : public ProcessGroup {
public:
    std::shared_ptr<Work> AllReduce(const tensor_t &tensor, function::ReduceOpType reduce_op,
                                    bool async_op) const override;
    std::shared_ptr<Work> AllGather(const tensor_t &output, const tensor_t &input,
                                    bool async_op) const override;
    std::shared_ptr<Work> ReduceScatter(const tensor_t &output, const tensor_t &input,
                                        function::ReduceOpType reduce_op,
                                        bool async_op) const override;
    std::shared_ptr<Work> BroadCast(const tensor_t &tensor, int root, bool async_op) const override;
    std::shared_ptr<Work> Scatter(const tensor_t &output, const tensor_t &input, int root,
                                  bool async_op) const override;
    std::shared_ptr<Work> Gather(const tensor_t &output, const tensor_t &input, int root,
                                 bool async_op) const override;
    std::shared_ptr<Work> Send(const tensor_t &tensor, int dest_rank, bool async_op) const override;
    std::shared_ptr<Work> Recv(const tensor_t &tensor, int src_rank, bool async_op) const override;
    void Abort(const std::string &reason) const noexcept override;
    void CheckPeers() const override; // while no call is under way

protected:
    ProcessGroupShared(const GroupOptions &options, std::unique_ptr<Exchange> exchange);

    Exchange &exchange() const { return *exchange_; }

private:
    template <typename Body>
    std::shared_ptr<Work> submit(const char *call, bool async_op, Body body) const;
    void reduce_pieces(const tensor_t &tensor, function::ReduceOpType op) const;

    std::unique_ptr<Exchange> exchange_;
    std::shared_ptr<Work> done_; // what a call that is over returns
    mutable WorkQueue queue_;    // ends before the exchange does
};

// Ranks are threads of this process. `init_method` is any text: groups meet under it and the name.
class ProcessGroupThreads final : public ProcessGroupShared {
public:
    explicit ProcessGroupThreads(const GroupOptions &options);
};

// Ranks are processes of this machine. `init_method`:
//   fd://N       a file descriptor that this process has inherited, the same empty file (memfd) for
//                all ranks. It belongs to the group from here on. Leaves no name anywhere.
//   shm://NAME   a name for POSIX shared memory, /NAME. The constructor returns when all ranks have
//                come, and the name is gone by then, or when it throws.
// A rank holds a record lock on the file, which the system lets go with the process: that is how the
// others see that it has died, however it died.
class ProcessGroupShm final : public ProcessGroupShared {
public:
    explicit ProcessGroupShm(const GroupOptions &options);
    ~ProcessGroupShm() override;

private:
    class File;
    ProcessGroupShm(const GroupOptions &options, std::shared_ptr<File> file);

    std::shared_ptr<File> file_;
};

// Ranks are processes of any machines, connected in pairs by TCP. `init_method`:
//   tcp://FD:TOKEN@HOST:PORT,HOST:PORT,..   where each rank listens, in their order; FD is the
//                caller's own listening socket, which belongs to the group from here on, and TOKEN
//                (at most 64 letters and digits) is what connections are known by.
// The constructor returns when this rank is connected to all others. What is sent is not encrypted.
class ProcessGroupTcp final : public ProcessGroupShared {
public:
    explicit ProcessGroupTcp(const GroupOptions &options);
};

} // namespace llaisys::parallel
