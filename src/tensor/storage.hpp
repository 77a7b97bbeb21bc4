// Bytes behind tensors: device memory, or a range of a file mapped read-only.
#pragma once

#include "device/runtime.hpp"

#include <cstdint>
#include <memory>
#include <string>

namespace llaisys {

class FileMapping;

class Storage {
public:
    // Zeroed memory.
    Storage(DeviceType device, int device_id, int64_t bytes,
            device::Lifetime lifetime = device::Lifetime::persistent);
    // [offset, offset + bytes) of a mapped file, used in place.
    Storage(std::shared_ptr<FileMapping> file, uint64_t offset, int64_t bytes);
    ~Storage();
    Storage(const Storage &) = delete;
    Storage &operator=(const Storage &) = delete;

    std::byte *data() const { return data_; }
    int64_t bytes() const { return bytes_; }
    DeviceType device() const { return runtime_->type; }
    int device_id() const { return device_id_; }
    const device::Runtime &runtime() const { return *runtime_; }
    bool is_mapped() const { return file_ != nullptr; }

    // Mapped storage: lets the kernel evict its pages (they are read again on access).
    void drop_pages() const;

private:
    const device::Runtime *runtime_;
    int device_id_;
    int64_t bytes_;
    device::Lifetime lifetime_;
    std::byte *data_;
    std::shared_ptr<FileMapping> file_;
};

// A whole file mapped read-only, shared by all storages on it.
class FileMapping {
public:
    // The mapping of this file, created on first use. Throws LLAISYS_ERROR_IO with the reason.
    static std::shared_ptr<FileMapping> open(const std::string &path);

    explicit FileMapping(const std::string &path);
    ~FileMapping();
    FileMapping(const FileMapping &) = delete;
    FileMapping &operator=(const FileMapping &) = delete;

    const std::byte *data() const { return data_; }
    uint64_t bytes() const { return bytes_; }
    const std::string &path() const { return path_; }

private:
    std::string path_;
    const std::byte *data_ = nullptr;
    uint64_t bytes_ = 0;
};

} // namespace llaisys
