#include "tensor/storage.hpp"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <map>
#include <mutex>
#include <sys/mman.h>
#include <sys/stat.h>
#include <tuple>
#include <unistd.h>

namespace llaisys {

Storage::Storage(DeviceType device, int device_id, int64_t bytes, device::Lifetime lifetime)
    : runtime_(&device::runtime_of(device)), device_id_(device_id), bytes_(bytes),
      lifetime_(lifetime) {
    const int count = runtime_->device_count();
    require(device_id >= 0 && device_id < count, "device_id must be in [0, ", count, "), got ",
            device_id);
    data_ = static_cast<std::byte *>(runtime_->allocate(device_id, size_t(bytes), lifetime));
}

Storage::Storage(std::shared_ptr<FileMapping> file, uint64_t offset, int64_t bytes)
    : runtime_(&device::cpu_runtime()), device_id_(0), bytes_(bytes),
      lifetime_(device::Lifetime::persistent),
      data_(const_cast<std::byte *>(file->data()) + offset), file_(std::move(file)) {}

Storage::~Storage() {
    if (!file_) {
        runtime_->release(device_id_, data_, size_t(bytes_), lifetime_);
    }
}

void Storage::drop_pages() const {
    if (!file_ || bytes_ == 0) {
        return;
    }
    // Whole pages inside the range only: the first and last may be shared with other tensors.
    const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(data_) + page - 1) / page * page;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(data_) + uintptr_t(bytes_)) / page * page;
    if (begin < end) {
        madvise(reinterpret_cast<void *>(begin), end - begin, MADV_DONTNEED);
    }
}

namespace {

class FileDescriptor {
public:
    explicit FileDescriptor(const std::string &path)
        : fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
        if (fd_ < 0) {
            fail(LLAISYS_ERROR_IO, "cannot open ", path, ": ", std::strerror(errno));
        }
    }
    ~FileDescriptor() { ::close(fd_); }
    FileDescriptor(const FileDescriptor &) = delete;
    FileDescriptor &operator=(const FileDescriptor &) = delete;
    int get() const { return fd_; }

private:
    int fd_;
};

struct stat status_of(const FileDescriptor &file, const std::string &path) {
    struct stat status{};
    if (fstat(file.get(), &status) != 0) {
        fail(LLAISYS_ERROR_IO, "cannot read the size of ", path, ": ", std::strerror(errno));
    }
    if (!S_ISREG(status.st_mode)) {
        fail(LLAISYS_ERROR_IO, path, " is not a regular file");
    }
    return status;
}

} // namespace

FileMapping::FileMapping(const std::string &path) : path_(path) {
    const FileDescriptor file(path);
    bytes_ = uint64_t(status_of(file, path).st_size);
    if (bytes_ == 0) {
        return;
    }
    void *memory = mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, file.get(), 0);
    if (memory == MAP_FAILED) {
        fail(LLAISYS_ERROR_IO, "cannot map ", path, ": ", std::strerror(errno));
    }
    data_ = static_cast<const std::byte *>(memory);
}

FileMapping::~FileMapping() {
    if (data_ != nullptr) {
        munmap(const_cast<std::byte *>(data_), bytes_);
    }
}

std::shared_ptr<FileMapping> FileMapping::open(const std::string &path) {
    // Keyed by inode, size and mtime, not by path: a replaced file gets its own mapping.
    using Identity = std::tuple<dev_t, ino_t, off_t, time_t, long>;
    static std::mutex mutex;
    static std::map<Identity, std::weak_ptr<FileMapping>> mappings;

    const struct stat status = status_of(FileDescriptor(path), path);
    const Identity identity{status.st_dev, status.st_ino, status.st_size, status.st_mtim.tv_sec,
                            status.st_mtim.tv_nsec};
    std::lock_guard<std::mutex> lock(mutex);
    for (auto it = mappings.begin(); it != mappings.end();) {
        it = it->second.expired() ? mappings.erase(it) : std::next(it);
    }
    std::shared_ptr<FileMapping> mapping = mappings[identity].lock();
    if (!mapping) {
        mapping = std::make_shared<FileMapping>(path);
        mappings[identity] = mapping;
    }
    return mapping;
}

} // namespace llaisys
