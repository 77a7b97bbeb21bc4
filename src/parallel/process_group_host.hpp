// Process groups on the CPU over a Transport: threads, processes of one machine, TCP.
#pragma once

#include "parallel/process_group.hpp"
#include "parallel/transport.hpp"

#include <condition_variable>
#include <deque>
#include <functional>
#include <thread>

namespace llaisys::parallel {

// Runs calls in order on one thread, which starts with the first call.
class WorkQueue {
public:
    ~WorkQueue(); // runs the queued calls first
    std::shared_ptr<Work> add(std::function<void()> call);
    bool is_idle() const; // no call is queued or running

private:
    void run();

    mutable std::mutex mutex_;
    std::condition_variable added_;
    std::deque<std::pair<std::function<void()>, std::shared_ptr<HostWork>>> calls_;
    int pending_ = 0; // queued or running
    bool stopping_ = false;
    std::thread thread_;
};

// The collectives over a Transport. A message larger than a chunk takes several rounds. A
// synchronous call allocates nothing.
class ProcessGroupHost : public ProcessGroup {
public:
    void Abort(const std::string &reason) const noexcept override;
    void CheckPeers() const override; // only while no call runs

protected:
    ProcessGroupHost(const GroupOptions &options, std::unique_ptr<Transport> transport);

private:
    WorkPtr submit(const Collective &call, bool is_async) const override;
    void run(const Collective &call) const;

    std::unique_ptr<Transport> transport_;
    WorkPtr done_ = completed_work();
    mutable WorkQueue queue_; // destroyed before the transport
};

// Ranks are threads of this process. Ranks with the same `init_method` (any text) and name form a
// group.
class ProcessGroupThreads final : public ProcessGroupHost {
public:
    explicit ProcessGroupThreads(const GroupOptions &options);
};

// Ranks are processes of this machine. `init_method`:
//   fd://N       an inherited file descriptor of an empty file (memfd), the same for all ranks. The
//                group takes ownership of it.
//   shm://NAME   POSIX shared memory /NAME. The constructor returns when all ranks have joined; the
//                name is unlinked before it returns or throws.
// Each rank holds a record lock on the file. The kernel releases the lock when the process ends,
// which is how the other ranks detect its death.
class ProcessGroupShm final : public ProcessGroupHost {
public:
    explicit ProcessGroupShm(const GroupOptions &options);
};

// Ranks are processes on any machines with a TCP connection between each two. `init_method`:
//   tcp://FD:TOKEN@HOST:PORT,HOST:PORT,..   the listening addresses in rank order; FD is the
//                listening socket of the caller, owned by the group from then on; TOKEN (at most 64
//                letters and digits) authenticates connections.
// The constructor returns when this rank is connected to all others. Traffic is not encrypted.
class ProcessGroupTcp final : public ProcessGroupHost {
public:
    explicit ProcessGroupTcp(const GroupOptions &options);
};

} // namespace llaisys::parallel
