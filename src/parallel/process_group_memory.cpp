// Where the ranks of a group on the CPU find their common memory.
#include "parallel/process_group_shared.hpp"
#include "parallel/shared_exchange.hpp"

#include <algorithm>
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

// Pages that are there once they are touched; fd -1: of no file.
std::shared_ptr<void> map_memory(int fd, size_t bytes) {
    const int flags = fd < 0 ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED;
    void *memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (memory == MAP_FAILED) {
        fail(LLAISYS_ERROR_MEMORY, bytes,
             " bytes of shared memory could not be mapped: ", std::strerror(errno));
    }
    return {memory, [bytes](void *mapped) { munmap(mapped, bytes); }};
}

// ---- threads -------------------------------------------------------------------------------------

// The memory of a group of threads: made by who comes first, kept by those who are in it.
std::shared_ptr<void> memory_of_threads(const GroupOptions &options) {
    static std::mutex mutex;
    static std::map<std::string, std::weak_ptr<void>> memories;
    std::lock_guard<std::mutex> lock(mutex);
    for (auto it = memories.begin(); it != memories.end();) {
        it = it->second.expired() ? memories.erase(it) : std::next(it);
    }
    std::weak_ptr<void> &place = memories[options.init_method + '\n' + options.name];
    std::shared_ptr<void> memory = place.lock();
    if (!memory) {
        memory = map_memory(-1, SharedExchange::bytes_for(int(options.ranks.size())));
        place = memory;
    }
    return memory;
}

std::unique_ptr<SharedExchange> exchange_in(std::shared_ptr<void> memory,
                                            const GroupOptions &options,
                                            std::function<bool(int)> is_alive) {
    return std::make_unique<SharedExchange>(
        std::move(memory),
        SharedExchange::Options{int(options.ranks.size()), place_of(options, options.rank),
                                options.timeout, std::move(is_alive)});
}

bool starts_with(const std::string &text, const char *start) { return text.rfind(start, 0) == 0; }

} // namespace

ProcessGroupThreads::ProcessGroupThreads(const GroupOptions &options)
    : ProcessGroupShared(options, exchange_in(memory_of_threads(options), options, nullptr)) {}

// ---- processes -----------------------------------------------------------------------------------

// The open file behind the memory. Closing any descriptor of it would let go the locks that this
// process holds on it, so there is one.
class ProcessGroupShm::File {
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
            shm_unlink(name_.c_str()); // another rank may have been faster
            name_.clear();
        }
    }

    // Locks this rank's byte and maps the whole; every rank sets the same size.
    std::shared_ptr<void> map(int rank, int world) {
        struct flock lock = byte_of(rank);
        if (fcntl(fd_, F_SETLK, &lock) != 0) {
            fail(LLAISYS_ERROR_INVALID, "rank ", rank, " is taken by another process");
        }
        const size_t bytes = SharedExchange::bytes_for(world);
        struct stat status{};
        if (fstat(fd_, &status) != 0 || (status.st_size != 0 && size_t(status.st_size) != bytes)) {
            fail(LLAISYS_ERROR_INVALID, "the file of the group has ", status.st_size,
                 " bytes: it is not that of a group of ", world);
        }
        // Taken now: a page that cannot be had later would be a signal and not an error.
        const int error = posix_fallocate(fd_, 0, off_t(bytes));
        if (error != 0) {
            fail(LLAISYS_ERROR_MEMORY, bytes,
                 " bytes of shared memory could not be had: ", std::strerror(error));
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
    std::string name_; // "/NAME" while others may still need it
};

ProcessGroupShm::ProcessGroupShm(const GroupOptions &options)
    : ProcessGroupShm(options, std::make_shared<File>(options)) {}

ProcessGroupShm::ProcessGroupShm(const GroupOptions &options, std::shared_ptr<File> file)
    : ProcessGroupShared(
          options,
          exchange_in(file->map(place_of(options, options.rank), int(options.ranks.size())),
                      options, [file](int rank) { return file->is_alive(rank); })),
      file_(std::move(file)) {
    if (file_->has_name()) {
        static_cast<SharedExchange &>(exchange()).wait_for_all();
        file_->unlink();
    }
}

ProcessGroupShm::~ProcessGroupShm() = default;

} // namespace llaisys::parallel
