#include "device/cuda/uploader.hpp"

#include "device/cpu/thread_pool.hpp"
#include "device/cuda/cuda_runtime.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>

namespace llaisys::device {

namespace {

constexpr size_t kPiece = size_t(16) << 20;
constexpr int kPieces = 4;
constexpr int kThreads = 8;

struct StagingBuffers {
    explicit StagingBuffers(int device_id) : pool(kThreads) {
        LLAISYS_CUDA(cudaSetDevice(device_id));
        LLAISYS_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        LLAISYS_CUDA(cudaMallocHost(&memory, kPiece * kPieces));
        for (cudaEvent_t &event : events) {
            LLAISYS_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
        }
    }

    void upload(std::byte *dst, const std::byte *src, size_t bytes) {
        size_t piece = 0;
        for (size_t at = 0; at < bytes; at += kPiece, ++piece) {
            const size_t slot = piece % kPieces;
            const size_t n = std::min(kPiece, bytes - at);
            std::byte *stage = static_cast<std::byte *>(memory) + slot * kPiece;
            LLAISYS_CUDA(cudaEventSynchronize(events[slot])); // new events are complete
            const size_t share = (n / kThreads + 4095) / 4096 * 4096;
            pool.run(kThreads, [&](int64_t part, int) {
                const size_t begin = std::min(n, size_t(part) * share);
                const size_t end = part + 1 == kThreads ? n : std::min(n, begin + share);
                std::memcpy(stage + begin, src + at + begin, end - begin);
            });
            LLAISYS_CUDA(cudaMemcpyAsync(dst + at, stage, n, cudaMemcpyHostToDevice, stream));
            LLAISYS_CUDA(cudaEventRecord(events[slot], stream));
        }
        LLAISYS_CUDA(cudaStreamSynchronize(stream));
    }

    std::mutex mutex;
    ThreadPool pool;
    cudaStream_t stream = nullptr;
    void *memory = nullptr;
    cudaEvent_t events[kPieces] = {};
};

} // namespace

void upload_pageable(int device_id, void *dst, const void *src, size_t bytes) {
    static std::mutex mutex;
    static std::map<int, StagingBuffers *> all; // never destroyed
    StagingBuffers *buffers = nullptr;
    {
        const std::lock_guard<std::mutex> lock(mutex);
        StagingBuffers *&known = all[device_id];
        if (known == nullptr) {
            known = new StagingBuffers(device_id);
        }
        buffers = known;
    }
    const std::lock_guard<std::mutex> lock(buffers->mutex);
    LLAISYS_CUDA(cudaSetDevice(device_id));
    buffers->upload(static_cast<std::byte *>(dst), static_cast<const std::byte *>(src), bytes);
}

} // namespace llaisys::device
