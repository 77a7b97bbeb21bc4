// Shared memory of thread and process groups.
#include "parallel/process_group_host.hpp"
#include "parallel/shared_memory_transport.hpp"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace llaisys::parallel {

namespace {

// Shared pages of a file; fd -1: anonymous.
std::shared_ptr<void> map_memory(int fd, size_t bytes) {
    const int flags = fd < 0 ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED;
    void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (memory == MAP_FAILED) {
        fail(LLAISYS_ERROR_MEMORY, bytes,
             " bytes of shared memory could not be mapped: ", std::strerror(errno));
    }
    return {memory, [bytes](void *mapped) { munmap(mapped, bytes); }};
}

// The memory of a group of threads: created by its first rank, owned by all of them.
std::shared_ptr<void> thread_group_memory(const GroupOptions &options) {
    static std::mutex mutex;
    static std::map<std::string, std::weak_ptr<void>> memories;
    std::lock_guard<std::mutex> lock(mutex);
    for (auto it = memories.begin(); it != memories.end();) {
        it = it->second.expired() ? memories.erase(it) : std::next(it);
    }
    std::weak_ptr<void> &entry = memories[options.init_method + '\n' + options.name];
    std::shared_ptr<void> memory = entry.lock();
    if (!memory) {
        memory = map_memory(-1, SharedMemoryTransport::bytes_for(int(options.ranks.size())));
        entry = memory;
    }
    return memory;
}

std::unique_ptr<SharedMemoryTransport> make_transport(std::shared_ptr<void> memory,
                                                      const GroupOptions &options,
                                                      std::function<bool(int)> is_alive) {
    return std::make_unique<SharedMemoryTransport>(
        std::move(memory), SharedMemoryTransport::Options{int(options.ranks.size()),
                                                          group_rank_of(options, options.rank),
                                                          options.timeout, std::move(is_alive)});
}

bool starts_with(const std::string &text, const char *start) { return text.rfind(start, 0) == 0; }

// The open file behind the memory. Closing any descriptor of the file releases all record locks of
// this process on it, so there is only one.
class File {
public:
    explicit File(const GroupOptions &options) {
        const std::string &where = options.init_method;
        if (starts_with(where, "fd://")) {
            char *end = nullptr;
            const long number = std::strtol(where.c_str() + 5, &end, 10);
            require(end != where.c_str() + 5 && *end == '\0' && number >= 0 && number < 1 << 30,
                    "init_method: '", where, "' names no file descriptor");
            fd_ = int(number);
            if (fcntl(fd_, F_SETFD, FD_CLOEXEC) != 0) {
                fail(LLAISYS_ERROR_IO, "init_method: '", where, "': ", std::strerror(errno));
            }
        } else {
            require(starts_with(where, "shm://") && where.size() > 6 &&
                        where.find('/', 6) == std::string::npos,
                    "init_method must be fd://N or shm://NAME, got '", where, "'");
            name_ = where.substr(5);
            fd_ = shm_open(name_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
            if (fd_ < 0) {
                fail(LLAISYS_ERROR_IO, "init_method: '", where, "': ", std::strerror(errno));
            }
        }
    }
    ~File() {
        unlink();
        ::close(fd_);
    }
    File(const File &) = delete;
    File &operator=(const File &) = delete;

    bool has_name() const { return !name_.empty(); }

    void unlink() {
        if (has_name()) {
            shm_unlink(name_.c_str()); // fails when another rank has unlinked it
            name_.clear();
        }
    }

    // Locks this rank's byte and maps the whole; every rank sets the same size.
    std::shared_ptr<void> map(int rank, int world) {
        struct flock lock = byte_of(rank);
        if (fcntl(fd_, F_SETLK, &lock) != 0) {
            fail(LLAISYS_ERROR_INVALID, "rank ", rank, " is taken by another process");
        }
        const size_t bytes = SharedMemoryTransport::bytes_for(world);
        struct stat status{};
        if (fstat(fd_, &status) != 0 || (status.st_size != 0 && size_t(status.st_size) != bytes)) {
            fail(LLAISYS_ERROR_INVALID, "the file of the group has ", status.st_size,
                 " bytes; that is not the size for ", world, " ranks");
        }
        // Allocated here: a page that is missing later raises SIGBUS, not an error.
        const int error = posix_fallocate(fd_, 0, off_t(bytes));
        if (error != 0) {
            fail(LLAISYS_ERROR_MEMORY, bytes,
                 " bytes of shared memory could not be allocated: ", std::strerror(error));
        }
        return map_memory(fd_, bytes);
    }

    // Whether the process that joined as this rank still runs.
    bool is_alive(int rank) const {
        struct flock lock = byte_of(rank);
        return fcntl(fd_, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
    }

private:
    static struct flock byte_of(int rank) {
        struct flock lock{};
        lock.l_type = F_WRLCK;
        lock.l_whence = SEEK_SET;
        lock.l_start = rank;
        lock.l_len = 1;
        return lock;
    }

    int fd_ = -1;
    std::string name_; // "/NAME" until it is unlinked
};

std::unique_ptr<Transport> join_processes(const GroupOptions &options) {
    const auto file = std::make_shared<File>(options);
    auto transport =
        make_transport(file->map(group_rank_of(options, options.rank), int(options.ranks.size())),
                       options, [file](int rank) { return file->is_alive(rank); });
    if (file->has_name()) {
        transport->wait_for_all();
        file->unlink();
    }
    return transport;
}

} // namespace

ProcessGroupThreads::ProcessGroupThreads(const GroupOptions &options)
    : ProcessGroupHost(options, make_transport(thread_group_memory(options), options, nullptr)) {}

ProcessGroupShm::ProcessGroupShm(const GroupOptions &options)
    : ProcessGroupHost(options, join_processes(options)) {}

} // namespace llaisys::parallel
